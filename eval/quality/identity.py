"""What an answer depends on, as one key; and the store from which an interrupted run goes on.

lm-eval's own response cache knows a request and not the model that answered it: a second model gets the first one's
answers. Here the key holds everything, and an answer that was stored under another key is never found.
"""

import hashlib
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import zaya
from zaya.errors import UserError
from zaya.files import read_object, sha256_file, sha256_json, write_json
from zaya.results import versions

TOKENIZER = ("tokenizer*.json", "tokenizer.model", "special_tokens_map.json", "added_tokens.json", "vocab*", "merges*")
CHUNK = 512  # requests that are answered, and stored, together


def tokenizer_sha256(folder: Path) -> str:
    """Digest of the files from which a folder's tokenizer and chat template are read."""
    files = {p.name: sha256_file(p) for pattern in (*TOKENIZER, "chat_template*") for p in Path(folder).glob(pattern)}
    return sha256_json(files)


def code_sha256() -> str:
    """Digest of the source of the installed `zaya`: the same weights under another forward pass are another model."""
    root, digest = Path(zaya.__file__).parent, hashlib.sha256()
    for path in sorted(root.rglob("*.py")):
        digest.update(f"{path.relative_to(root)}:{sha256_file(path)};".encode())
    return digest.hexdigest()


def identity(folder: Path, weights: str, about: dict[str, Any], seeds: dict[str, int], limit: int | None) -> dict:
    """Everything but the requests that an answer of the model in `folder` depends on.

    weights: their digest. about: settings of the backend that `build` returned: its kind, dtype, batch size, <bos>,
    longest prompt. The requests hold task, shots and template as text.
    """
    return {
        "weights": weights,
        "tokenizer": tokenizer_sha256(folder),
        "config": sha256_file(Path(folder) / "config.json"),
        "backend": about,
        "versions": versions(),
        "code": code_sha256(),
        "seeds": seeds,
        "limit": limit,
    }


class Answers:
    """Answers on disk, a file for each chunk of requests; without a folder nothing is stored.

    Chunks are cut from the whole list of a task's requests and asked whole, so that a run that was interrupted and
    went on batches its requests as one that was not, and ends with the same bits.
    """

    def __init__(self, folder: Path | None = None, key: dict[str, Any] | None = None):
        self.folder = None if folder is None else Path(folder) / sha256_json(key)[:32]
        self.reused = 0

    def through(self, lm: Any, kind: str, requests: Sequence[Any], ask: Callable[[list], list]) -> list:
        """Answers to `requests`, in their order: those stored, and the rest from `ask`. lm.truncated counts both."""
        answers: list[Any] = [None] * len(requests)
        for task, at in _chunks(requests):
            part = [requests[i] for i in at]
            for i, answer in zip(at, self._chunk(lm, kind, task, part, ask), strict=True):
                answers[i] = answer
        return answers

    def _chunk(self, lm: Any, kind: str, task: str, part: list, ask: Callable[[list], list]) -> list:
        if self.folder is None:
            return ask(part)
        path = self.folder / f"{sha256_json([kind, task, [[r.idx, r.repeats, r.args] for r in part]])[:32]}.json"
        if path.is_file():
            stored = read_object(path, "file of answers")
            answers = stored.get("answers")
            if not isinstance(answers, list) or len(answers) != len(part):
                raise UserError(f"{path}: not the answers to {len(part)} requests; remove {self.folder.parent}")
            lm.truncated += stored["truncated"]
            self.reused += len(part)
            return [tuple(a) if isinstance(a, list) else a for a in answers]
        before = lm.truncated
        answers = ask(part)
        write_json(path, {"answers": answers, "truncated": lm.truncated - before})
        return answers


def _chunks(requests: Sequence[Any]) -> list[tuple[str, list[int]]]:
    """(task, numbers of at most CHUNK of its requests), all of a task before the next."""
    by_task: dict[str, list[int]] = {}
    for i, request in enumerate(requests):
        by_task.setdefault(request.task_name or "", []).append(i)
    return [(task, at[i : i + CHUNK]) for task, at in by_task.items() for i in range(0, len(at), CHUNK)]
