"""Does an exported folder compute the same in stock transformers as in our class?

Stock runs in a child process that never imports our package, through `AutoModelForCausalLM` with no remote code, as a
user's script would. What it computed comes back as a file.
"""

import datetime
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from transformers.utils.logging import disable_progress_bar

from zaya import children
from zaya.errors import CheckFailed, UserError
from zaya.files import check_target, read_json_lines, stage_dir
from zaya.folder import loading, read_config
from zaya.text import text_only
from zaya.weights import weight_files, weights_sha256

CHILD = Path(__file__).with_name("_stock_child.py")


def read_prompts(folder: Path, text: Path | None, count: int, length: int) -> list[list[int]]:
    """`count` prompts of different lengths up to `length` tokens, from the texts in `text` or the folder's own README.

    Raises UserError for a missing or empty file, or a tokenizer that cannot be loaded.
    """
    from transformers import AutoTokenizer

    make = "`zaya data tokenize` writes heldout.jsonl"
    if text is not None and not text.is_file():
        raise UserError(f"{text}: no such file of probe texts; {make}")
    source = text or folder / "README.md"
    if not source.is_file():
        raise UserError(f"{folder}: holds no README.md to probe with; name a file of texts with --text; {make}")
    if source.suffix == ".jsonl":
        texts = [row["text"] for row in read_json_lines(source, "file of probe texts", ("text",))[:count]]
    else:
        texts = [source.read_text(encoding="utf-8", errors="replace")]
    if not all(isinstance(t, str) for t in texts):
        raise UserError(f"{source}: a field `text` is not text; {make}")
    with loading(folder):
        tokenizer = text_only(AutoTokenizer.from_pretrained(folder))
    ids = [tokenizer(t[: 20 * length], verbose=False)["input_ids"] for t in texts if t.strip()]
    if not ids:
        raise UserError(f"{source}: holds no text to probe with")
    return [ids[i % len(ids)][: max(1, length * (i + 1) // count)] for i in range(count)]


def run_stock(folder: Path, prompts: list[list[int]], new_tokens: int, scratch: Path) -> dict[str, Any]:
    """Logits and greedy tokens of stock transformers, from a child process without our package."""
    request, answer = scratch / "request.json", scratch / "answer.safetensors"
    request.write_text(json.dumps({"prompts": prompts, "new_tokens": new_tokens}))
    argv = [sys.executable, "-P", str(CHILD), str(folder), str(request), str(answer)]
    done = children.run(argv, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    if done.returncode != 0:
        raise CheckFailed(
            f"{folder}: stock transformers cannot load or run it: {done.stderr.strip().splitlines()[-1]}"
        )
    return {"class": done.stdout.strip().splitlines()[-1], "tensors": load_file(answer)}


def run_ours(folder: Path, prompts: list[list[int]], new_tokens: int) -> tuple[dict[str, torch.Tensor], torch.Tensor]:
    """The same with our class; also how many probe tokens chose each class, [L, E + 1]."""
    from zaya import ZayaForCausalLM
    from zaya.export._stock_child import compute

    with loading(folder):
        model = ZayaForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    tensors = compute(model, prompts, new_tokens)
    model.train()
    with torch.enable_grad():
        for prompt in prompts:
            model(torch.tensor([prompt]))
    return tensors, model.pop_expert_counts()


def compare(ours: dict[str, torch.Tensor], stock: dict[str, torch.Tensor]) -> dict[str, Any]:
    """Largest logit difference, and how many greedy tokens agree."""
    keys = [k for k in ours if k.startswith("logits")]
    tokens = [(ours[k], stock[k]) for k in ours if k.startswith("tokens")]
    return {
        "max_logit_difference": torch.stack([(ours[k] - stock[k]).abs().max() for k in keys]).max().item(),
        "equal_tokens": sum(int((a == b).sum()) for a, b in tokens),
        "tokens": sum(a.numel() for a, _ in tokens),
    }


def verify_folder(
    folder: Path,
    out: Path | None = None,
    text: Path | None = None,
    prompts: int = 8,
    new_tokens: int = 32,
    atol: float = 1e-4,
    vllm: bool = False,
) -> dict[str, Any]:
    """Compare an exported ZAYA folder in our class and in stock's; write a result into `out` when it is given.

    Raises CheckFailed when logits differ by more than `atol` or a greedy token differs (after `out` is written), and
    UserError when `folder` is not an exported ZAYA folder.
    """
    began = datetime.datetime.now(datetime.UTC)
    disable_progress_bar()
    config = read_config(folder)
    if config["model_type"] != "zaya":
        raise UserError(f"{folder}: model_type is {config['model_type']!r}; verify compares ZAYA folders only")
    if out is not None:
        check_target(out, "verify")
    ids = read_prompts(folder, text, prompts, 96)
    room, longest = config.get("max_position_embeddings") or 1 << 30, max(map(len, ids))
    if longest + new_tokens > room:
        raise UserError(
            f"--new-tokens {new_tokens}: with a prompt of {longest} tokens that is more than the {room} that the "
            "model holds; ask for fewer"
        )
    ours, counts = run_ours(folder, ids, new_tokens)
    with tempfile.TemporaryDirectory() as scratch:
        stock = run_stock(folder, ids, new_tokens, Path(scratch))
    report = compare(ours, stock["tensors"]) | {
        "stock_class": stock["class"],
        "classes_used_per_layer": (counts > 0).sum(1).tolist(),
        "skip_share": (counts[:, -1].sum() / counts.sum()).item(),
        "atol": atol,
    }
    if vllm:
        check_vllm(folder, prompts)
    if out is not None:
        write_result(folder, out, report, began)
    if not report["max_logit_difference"] <= atol or report["equal_tokens"] != report["tokens"]:
        raise CheckFailed(
            f"{folder}: stock transformers differs: logits by {report['max_logit_difference']:.2e} "
            f"(allowed {atol:.0e}), {report['equal_tokens']} of {report['tokens']} greedy tokens equal"
            + why_stock_differs(folder)
        )
    return report


def why_stock_differs(folder: Path) -> str:
    """A known cause, in words, when the folder has it: stock puts every skip bias back to -1 as it loads."""
    biases = [v for k, v in load_tensors(folder) if k.endswith("balancing_biases")]
    if all(b[-1] == -1 for b in biases):
        return ""
    return "; its skip biases are not -1 and stock resets them as it loads, which `zaya export` makes harmless"


def load_tensors(folder: Path) -> Iterator[tuple[str, torch.Tensor]]:
    """Name and tensor of everything in a folder's safetensors files."""
    for file in weight_files(folder):
        yield from load_file(file).items()


def check_vllm(folder: Path, prompts: int) -> None:
    """Run `zaya latency --parity-only` on the folder. Raises CheckFailed or UserError as it ended."""
    argv = ["latency", str(folder), "--parity-only", "--parity-prompts", str(prompts)]
    done = children.run([sys.executable, "-P", "-m", "zaya", *argv], env=os.environ | {"ZAYA_STAGE": "verify"})
    if done.returncode != 0:
        error = UserError if done.returncode == 2 else CheckFailed
        raise error(f"{folder}: the comparison with vLLM ended with exit code {done.returncode}")


def write_result(folder: Path, out: Path, report: dict[str, Any], began: datetime.datetime) -> None:
    """The report as a result file in the stage folder `out`."""
    from zaya.results import Metric, Result, digest, provenance, save

    sha = weights_sha256(folder)
    settings = {"atol": report["atol"], "against": report["stock_class"], "dtype": "float32"}
    result = Result(
        kind="verify",
        name="stock-transformers",
        subject=folder.name,
        subject_sha256=sha,
        metrics=[
            Metric(name="max_logit_difference", value=report["max_logit_difference"], unit="logit"),
            Metric(name="equal_tokens", value=report["equal_tokens"], unit="tokens", n=report["tokens"]),
            Metric(name="skip_share", value=report["skip_share"], unit="fraction"),
            Metric(name="min_classes_used", value=min(report["classes_used_per_layer"]), unit="classes"),
        ],
        settings=settings,
        provenance=provenance(began),
    )
    with stage_dir(out, "verify", {"model": sha, **settings}, digest=digest) as stage:
        save(stage, result)
