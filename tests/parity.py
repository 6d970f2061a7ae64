"""Ours against stock transformers, as a table: python -m tests.parity [--write docs/parity.md] [--gpu FILE.jsonl]

fp32 rows run here, on a CPU. `--gpu` takes the lines that `tests.gpu.parity_gpu` wrote on a GPU.
"""

import argparse
import json
from pathlib import Path
from typing import Any

import torch
import transformers

import zaya
from tests.zaya.support import make, mixed_config, tokens, twin, used

MARK = "<!-- made by python -m tests.parity -->"
ROPE = {"rope_type": "default", "rope_theta": 10_000.0, "partial_rotary_factor": 0.5}
CONFIGS = {
    "tiny, full and sliding layers": (mixed_config, 96),
    "tiny, 3-tap convolutions": (lambda: zaya.ZayaConfig.tiny(cca_time0=3, cca_time1=3), 96),
    "medium: 6 layers, D 256, 16 experts": (
        lambda: zaya.ZayaConfig.nano(
            num_experts=16, vocab_size=512, num_hidden_layers=6, rope_parameters={"hybrid": dict(ROPE)}
        ),
        256,
    ),
}
LIMITS = {"logits": 1e-5, "gradients": 1e-4}


def fp32_row(name: str, decode_steps: int = 200) -> dict[str, Any]:
    """Largest differences of logits and gradients on spread routing, and greedy decoding over `decode_steps`."""
    build, length = CONFIGS[name]
    ours = make(build())
    stock = twin(ours)
    ids = tokens(ours, 4, length)
    counts = used(ours, ids)
    with torch.no_grad():
        a, b = ours(ids, use_cache=False).logits, stock(ids, use_cache=False).logits
    grads = [gradients(model, ids) for model in (ours, stock)]
    decoded = [greedy(model, ids[:2, :8], decode_steps) for model in (ours, stock)]
    return {
        "config": name,
        "classes_used": int((counts > 0).sum(1).min()),
        "classes": counts.shape[1],
        "skipped_share": float(counts[:, -1].sum() / counts.sum()),
        "logits": float((a - b).abs().max()),
        "logits_scale": float(b.abs().max()),
        "gradients": max(gradient_errors(*grads).values()),
        "same_gradients": grads[0].keys() == grads[1].keys(),
        "decoded": int((decoded[0] == decoded[1]).all(0).sum()),
        "decode_steps": decode_steps,
    }


def gradients(model, ids) -> dict[str, torch.Tensor]:
    """Gradient of the loss for every parameter."""
    model.zero_grad()
    model(ids, labels=ids, use_cache=False).loss.backward()
    return {n: p.grad.clone() for n, p in model.named_parameters() if p.grad is not None}


def gradient_errors(ours, stock) -> dict[str, float]:
    """Norm of each gradient's difference, over its norm in `stock` or, where that is larger, over a tenth of the
    largest norm of the same parameter in any layer: a sum that nearly cancels has no accurate digits in fp32."""
    kind = {n: ".".join(part for part in n.split(".") if not part.isdigit()) for n in stock}
    largest = {k: max(float(stock[n].norm()) for n in stock if kind[n] == k) for k in set(kind.values())}
    errors = {}
    for n, reference in stock.items():
        scale = max(float(reference.norm()), largest[kind[n]] / 10)
        errors[n] = float((ours[n] - reference).norm()) / max(scale, 1e-12)
    return errors


def greedy(model, prompt, steps: int) -> torch.Tensor:
    """`steps` greedy tokens with the model's own cache, never stopping early."""
    options = {"min_new_tokens": steps, "max_new_tokens": steps, "do_sample": False, "pad_token_id": 0}
    return model.generate(prompt, **options)[:, prompt.shape[1] :]


def passes(row: dict[str, Any]) -> bool:
    """Whether a row keeps the limits, and used everything that it should."""
    return (
        row["classes_used"] == row["classes"]
        and row["logits"] <= LIMITS["logits"]
        and row["gradients"] <= LIMITS["gradients"]
        and row["same_gradients"]
        and row["decoded"] == row["decode_steps"]
    )


def fp32_table(rows) -> list[str]:
    """Markdown."""
    out = [
        "| config | classes used (all layers) | skipped | largest logit difference | largest relative gradient "
        "difference | equal greedy tokens | |",
        "|---|---|---|---|---|---|---|",
    ]
    for r in rows:
        out.append(
            f"| {r['config']} | {r['classes_used']} of {r['classes']} | {r['skipped_share']:.1%} | {r['logits']:.1e} "
            f"(logits to {r['logits_scale']:.1f}) | {r['gradients']:.1e} | {r['decoded']} of {r['decode_steps']} | "
            f"{'pass' if passes(r) else 'FAIL'} |"
        )
    return out


def gpu_tables(lines: list[dict[str, Any]]) -> list[str]:
    """Markdown from what tests.gpu.parity_gpu wrote."""
    v = next(x for x in lines if x["what"] == "versions")
    out = [
        f"On one {v['device']}, torch {v['torch']}, transformers {v['transformers']}; relative error against fp32, "
        "ours / stock; 2,048 tokens, routing forced to the fp32 choice for the experts.",
        "",
        "| layer | classes used | attention | router state | experts, forced | flipped choices |",
        "|---|---|---|---|---|---|",
    ]
    for x in (x for x in lines if x["what"] == "layer"):
        cells = [f"{x['ours_' + k]:.2e} / {x['stock_' + k]:.2e}" for k in ("attention", "state", "experts_forced")]
        flips = f"{x['ours_flipped_share']:.2%} / {x['stock_flipped_share']:.2%}"
        out.append(f"| {x['layer']} | {x['experts_used']} of 17 | {' | '.join(cells)} | {flips} |")
    out += [
        "",
        "The whole model, 40 layers with random weights, eager unless it says otherwise:",
        "",
        "| implementation | batch x prompt | prefill, ms | decode, ms per token | peak memory, GB |",
        "|---|---|---|---|---|",
    ]
    for x in (x for x in lines if x["what"] == "model"):
        numbers = [
            f"{x[k]:.1f}" if x.get(k) is not None else "" for k in ("prefill_ms", "decode_ms_per_token", "peak_gb")
        ]
        note = f" ({x['failed']})" if "failed" in x else ""
        out.append(f"| {x['implementation']}{note} | {x['batch']} x {x['prompt_tokens']} | {' | '.join(numbers)} |")
    return out


def main() -> int:
    """Print the tables; write them under the mark of a document when asked."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--write", type=Path, help="replace the tables in this document")
    parser.add_argument("--gpu", type=Path, help="JSON lines of tests.gpu.parity_gpu")
    args = parser.parse_args()
    rows = [fp32_row(name) for name in CONFIGS]
    text = ["", f"## fp32, on a CPU (torch {torch.__version__}, transformers {transformers.__version__})", ""]
    text += fp32_table(rows)
    if args.gpu:
        lines = [json.loads(x) for x in args.gpu.read_text().splitlines()]
        text += ["", "## bf16, at the shape of ZAYA1-8B", "", *gpu_tables(lines)]
    print("\n".join(text))
    if args.write:
        head = args.write.read_text().split(MARK)[0]
        args.write.write_text(head + MARK + "\n" + "\n".join(text) + "\n")
    return 0 if all(passes(r) for r in rows) else 1


if __name__ == "__main__":
    raise SystemExit(main())
