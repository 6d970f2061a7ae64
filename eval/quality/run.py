"""Score a model folder on a suite, offline, with lm-eval in this process."""

import contextlib
import datetime
import json
import logging
import math
import os
import shutil
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from zaya.errors import CheckFailed, UserError
from zaya.eval.quality.identity import Answers, identity, tokenizer_sha256
from zaya.eval.quality.suite import Choice, Rendered, Suite, Text, load_suite, render
from zaya.files import check_target, sha256_json, stage_dir, write_text
from zaya.folder import read_config
from zaya.results import Metric, Result, digest, provenance, save
from zaya.uncertainty import ratio_error
from zaya.weights import weights_sha256

log = logging.getLogger(__name__)
DTYPES = ("auto", "float32", "bfloat16")
SEEDS = {"random_seed": 0, "numpy_random_seed": 1234, "torch_random_seed": 1234, "fewshot_random_seed": 1234}


def bits_per_byte(nats: Sequence[float], sizes: Sequence[int]) -> tuple[float, float | None]:
    """Bits per byte of documents with negative log-likelihoods `nats` and `sizes` bytes, and its standard error.

    The ratio of the sums. Documents are the sampling unit; the error is None for fewer than two.
    """
    value, error = ratio_error(nats, sizes)
    return value / math.log(2), None if error is None else error / math.log(2)


def score(
    folder: Path,
    suite: str = "demo",
    backend: str = "hf",
    out: Path | None = None,
    name: str | None = None,
    limit: int | None = None,
    heldout: Path | None = None,
    data: Path | None = None,
    dtype: str = "auto",
    batch_size: int = 32,
) -> list[Result]:
    """Results of `folder` on a suite, one per task; written with every sample into `out` when it is given.

    Raises UserError for an unknown suite, a folder that is not a model, a missing file of held-out text, a tokenizer
    of another model, a server that is not there; CheckFailed when a check of the evaluation itself fails.
    """
    began = datetime.datetime.now(datetime.UTC)
    chosen = load_suite(suite)
    if limit is not None and limit < 1:
        raise UserError(f"--limit {limit}: must be at least 1, or left out")
    if batch_size < 1:
        raise UserError(f"--batch-size {batch_size}: must be at least 1")
    if dtype not in DTYPES:
        raise UserError(f"--dtype {dtype}: use one of {', '.join(DTYPES)}")
    if out is not None:
        check_target(out, "scores")
    read_config(folder)
    weights = weights_sha256(folder)
    with _quiet(), tempfile.TemporaryDirectory(prefix="zaya-eval-") as scratch:
        rendered = render(chosen, Path(scratch), data, heldout, limit)
        begun = None if out is None else out.parent / f".{out.name}.begun"
        raw, about = _run(folder, backend, dtype, batch_size, rendered, (weights, limit, begun))
    about |= {"suite": chosen.name, "suite_seed": chosen.seed, "shots": 0, "seeds": SEEDS}
    about |= {"template": None, "limit": limit, "tokenizer_sha256": tokenizer_sha256(folder)}
    results = [_result(chosen, rendered, raw, task, about) for task in rendered.counts]
    made = provenance(began, chosen.seed)
    for result in results:
        result.subject, result.subject_sha256, result.provenance = name or folder.name, weights, made
    if out is not None:
        inputs = {"weights": weights, "suite": chosen.model_dump(), "items": rendered.digests, **about}
        with stage_dir(out, "scores", inputs, digest=digest) as stage:
            for result in results:
                save(stage, result)
                lines = (json.dumps(s, ensure_ascii=False) + "\n" for s in _samples(raw, rendered, result.name))
                write_text(stage / "samples" / f"{result.name}.jsonl", "".join(lines))
        shutil.rmtree(out.parent / f".{out.name}.begun", ignore_errors=True)
    return results


def _run(
    folder: Path, backend: str, dtype: str, batch_size: int, rendered: Rendered, stored: tuple[str, int | None, Any]
) -> tuple[dict, dict[str, Any]]:
    """lm-eval's answer, and the settings of the model that gave it.

    stored: the weights' digest, the limit, and the folder where answers are kept until the run is whole, or None.
    """
    import lm_eval
    from lm_eval import evaluator
    from lm_eval.tasks import TaskManager

    from zaya.eval.quality.backend import build

    lm, about = build(folder, backend, dtype, batch_size, rendered.texts)
    weights, limit, begun = stored
    key = identity(folder, weights, about | {"address": backend, "windows": _windows(rendered)}, SEEDS, limit)
    lm.answers = Answers(begun, key)
    tasks = TaskManager(include_path=str(rendered.folder), include_defaults=False)
    # lm-eval asks git in the working folder, which is the user's (and git complains where there is no repository), and
    # asks the system about itself for seconds; neither is used: `provenance` says what produced a result
    evaluator.get_git_commit_hash = lambda: None
    evaluator.add_env_info = lambda results: None
    raw = lm_eval.simple_evaluate(
        model=lm,
        tasks=list(rendered.counts),
        task_manager=tasks,
        batch_size=batch_size,
        use_cache=None,
        bootstrap_iters=0,
        **SEEDS,
    )
    for task, count in rendered.counts.items():
        if len(raw["samples"][task]) != count:
            raise CheckFailed(f"{folder}: task {task}: {len(raw['samples'][task])} of {count} items came back")
    if lm.answers.reused:
        print(f"{lm.answers.reused} requests were answered before the last run ended", file=sys.stderr)
    return raw, about | {"truncated_requests": lm.truncated}


def _windows(rendered: Rendered) -> dict[str, Any]:
    return {name: text.model_dump() for name, text in rendered.texts.items()}


def _samples(raw: dict, rendered: Rendered, task: str) -> list[dict[str, Any]]:
    """One row per item: what identifies it, and what the model did. Rows of the same item pair two models."""
    keep = ("doc_id", "doc_hash", "prompt_hash", "target_hash", "target")
    rows = []
    for s in sorted(raw["samples"][task], key=lambda s: s["doc_id"]):
        row = {"item": s["doc"]["item"], **{k: s[k] for k in keep}}
        if task in rendered.texts:
            nats, size = s["bits_per_byte"]
            row = {k: v for k, v in row.items() if k != "target"} | {"nats": -nats, "bytes": size}
        else:
            row |= {"log_likelihoods": [float(r[0]) for r in s["filtered_resps"]]}
            row |= {m: s[m] for m in ("acc", "acc_norm")}
            if column := rendered.clusters.get(task):
                row["cluster"] = sha256_json(s["doc"][column])[:16]
        rows.append(row)
    return rows


def _result(suite: Suite, rendered: Rendered, raw: dict, task: str, about: dict[str, Any]) -> Result:
    samples = _samples(raw, rendered, task)
    asked, whole = len(samples), rendered.whole[task]
    settings = about | {"items_sha256": rendered.digests[task], "task_version": raw["versions"][task]}
    settings |= {"suite_items": whole, "partial": asked < whole, "cluster": rendered.clusters.get(task)}
    if task in rendered.texts:
        metrics = _text_metrics(samples)
        settings |= rendered.texts[task].model_dump() | {"protocol": "bits per byte", "primary": "bits_per_byte"}
    else:
        choice = next(c for c in suite.choices if c.name == task)
        metrics = _choice_metrics(samples)
        settings |= _choice_settings(choice)
    settings["protocol_sha256"] = _protocol_sha256(raw["samples"][task], settings)
    return Result(kind="quality", name=task, subject="", metrics=metrics, settings=settings)


def _protocol_sha256(samples: list[dict[str, Any]], settings: dict[str, Any]) -> str:
    """Digest of what was asked and how it is counted, whoever answers: results that share it may be compared."""
    asked = sorted((s["doc_id"], s["doc_hash"], s["prompt_hash"], s["target_hash"]) for s in samples)
    counted = ("task_version", "protocol", "primary", "shots", "template", "seeds", "partial")
    windows = tuple(Text.model_fields)
    return sha256_json([asked, {k: settings.get(k) for k in (*counted, *windows)}])


def _choice_settings(choice: Choice) -> dict[str, Any]:
    form = "cloze: log-likelihood of each answer's whole text"
    return {"protocol": form, "primary": choice.primary, "task_file": choice.include, "data": choice.data}


def _choice_metrics(samples: list[dict[str, Any]]) -> list[Metric]:
    """Accuracies with standard errors that hold for items in clusters, and what guessing would get."""
    n, metrics = len(samples), []
    clusters = [s["cluster"] for s in samples] if "cluster" in samples[0] else None
    for name in ("acc", "acc_norm"):
        value, error = ratio_error([s[name] for s in samples], [1.0] * n, clusters)
        metrics.append(Metric(name=name, value=value, unit="fraction", stderr=error, n=n, higher_is_better=True))
    chance = sum(1 / len(s["log_likelihoods"]) for s in samples) / n
    return [*metrics, Metric(name="chance", value=chance, unit="fraction", n=n)]


def _text_metrics(samples: list[dict[str, Any]]) -> list[Metric]:
    n, size = len(samples), sum(s["bytes"] for s in samples)
    value, error = bits_per_byte([s["nats"] for s in samples], [s["bytes"] for s in samples])
    return [
        Metric(name="bits_per_byte", value=value, unit="bit/byte", stderr=error, n=n, higher_is_better=False),
        Metric(name="bytes", value=size, unit="byte", n=n),
    ]


@contextlib.contextmanager
def _quiet():
    """Offline, with lm-eval's own output on standard error and its bars only on a terminal."""
    os.environ.update(HF_HUB_OFFLINE="1", HF_DATASETS_OFFLINE="1", TRANSFORMERS_OFFLINE="1")
    if not sys.stderr.isatty():
        os.environ.setdefault("TQDM_DISABLE", "1")  # read when tqdm is first imported
    try:
        import datasets
        import lm_eval  # noqa: F401
    except ModuleNotFoundError as e:
        raise UserError(f"scoring needs the package {e.name}, which is not installed; pip install 'zaya[eval]'") from e
    for noisy in ("lm_eval", "lm-eval", "datasets", "transformers"):
        logging.getLogger(noisy).setLevel(logging.ERROR)
    datasets.disable_progress_bars()
    with contextlib.redirect_stdout(sys.stderr):
        yield
