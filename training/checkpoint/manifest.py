"""What a checkpoint folder holds, and when it counts.

    <run>/checkpoints/step-000120/
        model.safetensors                       weights by their native names, fp32, tied aliases left out
        optimizer-00000-of-00002.safetensors    what rank 0 owns: whole tensors under `<parameter>/<state>`
        rng-00000-of-00002.safetensors          random state of rank 0
        config.json                             the model's config
        tokenizer/                              the tokenizer, so that an export needs nothing else
        state.json                              step, tokens, arm, what was trained on
        manifest.json                           written last: a digest of every file above

Names are global and tensors whole, so that any number of ranks can read what another number wrote. A folder without
its manifest, or with a file missing, is not a checkpoint.
"""

import fnmatch
import re
from pathlib import Path

from zaya.files import MANIFEST, read_manifest, sha256_file

FORMAT = 1
FOLDER = "checkpoints"
MODEL, CONFIG, STATE, TOKENIZER = "model.safetensors", "config.json", "state.json", "tokenizer"
_STEP = re.compile(r"step-(\d{6,})")


def step_name(step: int) -> str:
    """Name of a step's folder."""
    return f"step-{step:06d}"


def shard_name(kind: str, rank: int, ranks: int) -> str:
    """Name of one rank's file of `kind`: optimizer or rng."""
    return f"{kind}-{rank:05d}-of-{ranks:05d}.safetensors"


def is_whole(path: Path) -> bool:
    """Whether every file that the manifest names is there."""
    manifest = read_manifest(path)
    return manifest is not None and all((Path(path) / name).is_file() for name in manifest["outputs"])


def is_intact(path: Path, patterns: tuple[str, ...] = ("*",)) -> bool:
    """Whether every file that the manifest names, and whose name fits one of `patterns`, has the content named there.

    Reads those files. Files that the manifest does not name are not the checkpoint's and do no harm.
    """
    manifest = read_manifest(path)
    if manifest is None or not is_whole(path):
        return False
    return all(
        sha256_file(Path(path) / name) == digest
        for name, digest in manifest["outputs"].items()
        if any(fnmatch.fnmatchcase(name, pattern) for pattern in patterns)
    )


def steps(run: Path) -> dict[int, Path]:
    """The whole checkpoints of a run folder by step, ascending. Other names and half-written folders are ignored."""
    found = {}
    folder = Path(run) / FOLDER
    for path in folder.iterdir() if folder.is_dir() else ():
        match = _STEP.fullmatch(path.name)
        if match and (path / MANIFEST).is_file() and is_whole(path):
            found[int(match.group(1))] = path
    return dict(sorted(found.items()))
