"""Does the server compute what transformers computes? Greedy tokens equal, log-probabilities within a tolerance.

Tokens alone are too weak a gate: with a request's state restored wrongly on purpose, greedy tokens still agreed while
log-probabilities were off by half a nat. So every position counts, of prompts and of continuations.
"""

import sys
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from zaya.errors import CheckFailed, UserError
from zaya.eval.latency.server import request
from zaya.folder import loading
from zaya.text import text_only

ATOL_NATS = 1e-4
LONGEST = 160  # tokens of the longest probe
# text of several kinds, each a prefix of which becomes a probe
TEXTS = (
    "def mean(values):\n    total = 0.0\n    for v in values:\n        total += v\n    return total / len(values)\n",
    "The quick brown fox jumps over the lazy dog, and the dog, who has seen this before, goes on sleeping.",
    "import os\nimport sys\n\n\nclass Reader:\n    def __init__(self, path):\n        self.path = os.fspath(path)\n",
    "1, 1, 2, 3, 5, 8, 13, 21, 34, 55, 89, 144, 233, 377, 610, 987, 1597, 2584, 4181, 6765, 10946, 17711",
    'try:\n    with open(name, "rb") as f:\n        x = f.read()\nexcept OSError as e:\n    print(e, file=log)\n',
    "Größe, naïve, 東京, привет: text that is not ASCII has to come through as well.",
    "    if not isinstance(other, type(self)):\n        return NotImplemented\n    return self.key() == other.key()\n",
    "Question: what is the difference between a list and a tuple?\nAnswer: a list can be changed in place.",
)


@dataclass
class Parity:
    """What a comparison found. `tokens` is how many continuation tokens were compared, `positions` how many
    log-probabilities; the difference is in nats."""

    prompts: int
    tokens: int
    equal_tokens: int
    positions: int
    max_logprob_difference: float
    atol: float
    reference: str
    first_difference: str = ""
    samples: list[dict[str, Any]] = field(default_factory=list, repr=False)

    @property
    def good(self) -> bool:
        """Whether every token is equal and every log-probability within the tolerance."""
        return self.equal_tokens == self.tokens and self.max_logprob_difference <= self.atol


def probes(tokenizer, count: int, longest: int = LONGEST) -> list[list[int]]:
    """`count` token lists of different lengths, from 1 or 2 tokens up to `longest`."""
    out = []
    for i in range(count):
        ids = tokenizer(TEXTS[i % len(TEXTS)] * (1 + i))["input_ids"]
        out.append(ids[: max(2 if ids[0] == tokenizer.bos_token_id else 1, longest * i // max(1, count - 1))])
    return out


def load_reference(folder: Path) -> tuple[Any, Any]:
    """transformers' model of `folder` in fp32, ours for a ZAYA folder, and its tokenizer."""
    from transformers import AutoModelForCausalLM, AutoTokenizer
    from transformers.utils.logging import disable_progress_bar

    import zaya  # noqa: F401 - registers our class

    disable_progress_bar()
    with loading(folder):
        model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
        return model, text_only(AutoTokenizer.from_pretrained(folder))


def ask(url: str, name: str, prompt: Sequence[int], new_tokens: int) -> tuple[list[int], list[float]]:
    """Greedy continuation by the server, and log-probabilities of prompt (but its first token) and continuation."""
    body = {"model": name, "prompt": list(prompt), "max_tokens": new_tokens, "temperature": 0, "ignore_eos": True}
    body |= {"echo": True, "logprobs": 1, "return_tokens_as_token_ids": True, "add_special_tokens": False}
    found = request(f"{url}/v1/completions", body)["choices"][0]["logprobs"]
    ids = [int(t.removeprefix("token_id:")) for t in found["tokens"]]
    if ids[: len(prompt)] != list(prompt) or len(ids) != len(prompt) + new_tokens:
        raise CheckFailed(f"{url}: the server answered {len(ids)} tokens to a prompt of {len(prompt)}, not its echo")
    return ids[len(prompt) :], found["token_logprobs"][1:]


@torch.no_grad()
def expect(model, prompt: Sequence[int], served: Sequence[int]) -> tuple[list[int], list[float]]:
    """The reference's greedy continuation, and its log-probabilities of the tokens that the server gave."""
    ids = torch.tensor([list(prompt)], device=model.device)
    n = len(served)
    options = {"max_new_tokens": n, "min_new_tokens": n, "do_sample": False, "eos_token_id": None}
    own = model.generate(ids, attention_mask=torch.ones_like(ids), pad_token_id=0, **options)[0, len(prompt) :]
    whole = torch.tensor([[*prompt, *served]], device=model.device)
    logp = model(whole).logits[0, :-1].float().log_softmax(-1)
    return own.tolist(), logp.gather(1, whole[0, 1:, None])[:, 0].tolist()


def compare_server(
    url: str,
    model_dir: Path,
    prompts: Sequence[Sequence[int]] | int = 8,
    new_tokens: int = 32,
    atol: float = ATOL_NATS,
    name: str | None = None,
) -> Parity:
    """Compare a completions server with transformers on the folder that it serves, both in fp32.

    prompts: token lists, or how many probes to make; they are sent all at once, so that the server batches them.
    atol: largest allowed difference of a log-probability, nats. Raises UserError when the model cannot hold a prompt
    and its continuation, CheckFailed when the server refuses; look at `Parity.good`, or call `require`.
    """
    model, tokenizer = load_reference(model_dir)
    room = model.config.get_text_config().max_position_embeddings - new_tokens
    lists = probes(tokenizer, prompts, min(LONGEST, room)) if isinstance(prompts, int) else [list(p) for p in prompts]
    if not lists or min(map(len, lists)) < 1 or max(map(len, lists)) > room:
        raise UserError(f"{model_dir}: prompts must have 1 to {room} tokens, to leave room for {new_tokens} more")
    name = name or request(f"{url}/v1/models")["data"][0]["id"]
    with ThreadPoolExecutor(len(lists)) as pool:
        answers = list(pool.map(lambda p: ask(url, name, p, new_tokens), lists))
    report = Parity(len(lists), 0, 0, 0, 0.0, atol, f"{type(model).__module__}.{type(model).__name__}")
    for i, (prompt, (served, logprobs)) in enumerate(zip(lists, answers, strict=True), 1):
        _add(report, i, prompt, served, logprobs, *expect(model, prompt, served))
    print(describe(report), file=sys.stderr, flush=True)
    return report


def _add(report: Parity, number: int, prompt, served, logprobs, own, expected) -> None:
    """Count one prompt into the report."""
    same = [a == b for a, b in zip(served, own, strict=True)]
    worst = max(abs(a - b) for a, b in zip(logprobs, expected, strict=True))
    report.tokens += len(same)
    report.equal_tokens += sum(same)
    report.positions += len(logprobs)
    # NaN must not pass for a small difference
    report.max_logprob_difference = max(report.max_logprob_difference, worst if worst == worst else float("inf"))
    report.samples.append({"prompt": prompt, "served": served, "transformers": own})
    if not report.first_difference and (not all(same) or not worst <= report.atol):
        at = same.index(False) if not all(same) else None
        where = "log-probabilities" if at is None else f"token {at} after it"
        report.first_difference = f"prompt {number} ({len(prompt)} tokens): {where} differ, by up to {worst:.1e} nats"


def describe(report: Parity) -> str:
    """One line."""
    return (
        f"server against {report.reference.rsplit('.', 1)[1]} of transformers: {report.equal_tokens} of "
        f"{report.tokens} greedy tokens equal, {report.positions} log-probabilities within "
        f"{report.max_logprob_difference:.1e} nats (allowed {report.atol:.0e})"
    )


def require(report: Parity, model_dir: Path) -> Parity:
    """Return the report, or raise CheckFailed when it is not good."""
    if not report.good:
        raise CheckFailed(f"{model_dir}: {describe(report)}; {report.first_difference}")
    return report
