"""A Hugging Face model folder that a person names: is it whole, and is what goes wrong as it loads one line?"""

import contextlib
import logging
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from zaya.errors import CheckFailed, UserError
from zaya.files import read_json, read_object
from zaya.weights import stored_tensors

TOKENIZERS = ("tokenizer.json", "tokenizer_config.json", "tokenizer.model")
_REPORTS = "transformers.modeling_utils"  # where from_pretrained tells of missing and surplus weights


def read_config(folder: Path) -> dict[str, Any]:
    """config.json of a Hugging Face folder with weights and a tokenizer.

    Raises UserError when one of them is missing, or is not what its name says, as after a copy that was cut short.
    """
    folder = Path(folder)
    if not folder.is_dir():
        raise UserError(f"{folder}: no such model folder; make one with `zaya export`")
    if not (folder / "config.json").is_file():
        raise UserError(f"{folder}: not a model folder (no config.json); make one with `zaya export`")
    config = read_object(folder / "config.json", "model config")
    stored_tensors(folder)
    if not any((folder / name).is_file() for name in TOKENIZERS):
        raise UserError(f"{folder}: holds no tokenizer (tokenizer.json); export the model again, with its tokenizer")
    for name in ("model_type", "architectures"):
        if not config.get(name):
            raise UserError(f"{folder / 'config.json'}: field {name} is missing; export the model again")
    for file in (folder / "tokenizer.json", folder / "tokenizer_config.json"):
        if file.is_file():
            read_json(file, "tokenizer")
    return config


class _Missing(logging.Handler):
    """Keeps the names of weights that a model has and the folder does not: transformers fills them with noise."""

    def __init__(self) -> None:
        super().__init__(logging.WARNING)
        self.names: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        rows = [line.split("|") for line in record.getMessage().splitlines()]
        self.names += [row[0].strip() for row in rows if len(row) > 1 and "MISSING" in row[1]]


@contextlib.contextmanager
def loading(folder: Path) -> Iterator[None]:
    """Around `from_pretrained(folder)`: what it raises becomes a UserError of one line, and so do missing weights."""
    reports, missing = logging.getLogger(_REPORTS), _Missing()
    level, propagate = reports.level, reports.propagate
    reports.setLevel(logging.WARNING - 1)  # at WARNING itself transformers tells of its tensor-parallel plans
    reports.propagate = False
    reports.addHandler(missing)
    try:
        yield
    except (UserError, CheckFailed, MemoryError):
        raise
    except Exception as e:
        words = f"{type(e).__name__}: {e}".splitlines()[0][:200]
        if "ignore_mismatched_sizes" in str(e):
            words = "the weights are not of the sizes that config.json gives"
        elif "memory" in str(e):
            raise
        raise UserError(f"{folder}: cannot be loaded ({words}); export the model again") from e
    finally:
        reports.removeHandler(missing)
        reports.setLevel(level)
        reports.propagate = propagate
    if missing.names:
        raise UserError(
            f"{folder}: the weights lack {missing.names[0]}{' and others' if missing.names[1:] else ''}, "
            "which the model of its config.json has; export the model again"
        )
