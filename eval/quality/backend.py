"""lm-eval's two backends, with the checks and the windows that its own classes leave to the user.

What differs from lm-eval: every scored request is checked to begin with exactly one <bos>; requests that do not fit
the model are counted; and held-out text is scored in overlapping windows that all begin with <bos>, where lm-eval
gives the first window two and the others none.
"""

import json
import logging
import sys
import urllib.error
import urllib.request
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from lm_eval.models.huggingface import HFLM
from lm_eval.models.openai_completions import LocalCompletionsAPI

from zaya.errors import CheckFailed, UserError
from zaya.eval.quality.identity import Answers
from zaya.eval.quality.suite import Text
from zaya.folder import loading
from zaya.text import text_only

log = logging.getLogger(__name__)
EXTRA_ROWS = 1024  # assumed: no vocabulary is padded by more; a larger gap is a tokenizer of another model


def windows(tokens: Sequence[int], first: int, size: int, overlap: int) -> list[tuple[list[int], list[int]]]:
    """(context, scored) token lists that score every one of `tokens` once. Each context begins with `first`.

    size: most tokens of a window, context and scored together. overlap: tokens before the scored ones that every
    window but the first sees again.
    """
    tokens, out, done = list(tokens), [], 0
    while done < len(tokens):
        context = tokens[max(0, done - overlap) : done]
        end = done + size - 1 - len(context)
        out.append(([first, *context], tokens[done:end]))
        done = min(end, len(tokens))
    return out


class _Checked:
    """Mixed into an lm-eval model. `texts`: how each held-out task is windowed; `truncated`: requests cut short."""

    texts: dict[str, Text] = {}
    room: int  # most tokens of a request, context and scored together
    truncated = 0
    answers = Answers()  # nothing is stored until a run says where

    def loglikelihood(self, requests, disable_tqdm: bool = False):
        """(log-likelihood, whether greedy decoding gives it) of each request's answer."""
        return self.answers.through(self, "loglikelihood", requests, lambda part: self._score(part, disable_tqdm))

    def _score(self, requests, disable_tqdm: bool):
        self.checking = True
        try:
            quiet = disable_tqdm or not sys.stderr.isatty()
            return super().loglikelihood(requests, disable_tqdm=quiet)  # type: ignore[misc]
        finally:
            self.checking = False

    def _loglikelihood_tokens(self, requests, **kwargs):
        bos = self.tokenizer.bos_token_id  # type: ignore[attr-defined]
        if not sys.stderr.isatty():
            print(f"scoring {len(requests)} requests", file=sys.stderr, flush=True)
        for names, context, scored in requests:
            if not scored:
                raise CheckFailed(f"a token spans the end of the prompt and the answer {names!r}; it cannot be scored")
            if self.checking and bos is not None and (context[0] != bos or (context + scored).count(bos) != 1):
                raise CheckFailed(f"a prompt does not begin with exactly one <bos>: {context[:8]}... of {names!r}")
            if len(scored) >= self.room:
                raise UserError(
                    f"an answer has {len(scored)} tokens and the model takes {self.room - 1}: {names!r:.80}"
                )
            self.truncated += len(context) + len(scored) > self.room
        return super()._loglikelihood_tokens(requests, **kwargs)  # type: ignore[misc]

    checking = False

    def loglikelihood_rolling(self, requests, disable_tqdm: bool = False) -> list[float]:
        """Sum of log-probabilities, nats, of each request's text."""
        return self.answers.through(self, "loglikelihood_rolling", requests, self._roll)

    def _roll(self, requests) -> list[float]:
        cut: list[tuple[None, list[int], list[int]]] = []
        owner: list[int] = []
        for i, request in enumerate(requests):
            text = self.texts[request.task_name]
            tokens = self.tokenizer(request.args[0], add_special_tokens=False, verbose=False)["input_ids"]  # type: ignore[attr-defined]
            size = min(text.window_tokens, self.room)
            parts = windows(tokens, self.prefix_token_id, size, min(text.context_tokens, size // 2))  # type: ignore[attr-defined]
            cut += [(None, *part) for part in parts]
            owner += [i] * len(parts)
        sums = [0.0] * len(requests)
        for i, (log_likelihood, _) in zip(
            owner, self._loglikelihood_tokens(cut, disable_tqdm=not sys.stderr.isatty()), strict=True
        ):
            sums[i] += log_likelihood
        return sums


class CheckedHF(_Checked, HFLM):
    """A model folder in this process."""

    def tok_encode(self, string, add_special_tokens=None, **kwargs):
        """<bos> and the text's ids. lm-eval's own leaves <bos> out where the text begins with those characters."""
        add = self.add_bos_token if add_special_tokens is None else add_special_tokens
        return super().tok_encode(string, add_special_tokens=add, **kwargs)

    def tok_batch_encode(self, strings, padding_side="left", left_truncate_len=None, truncation=False):
        """Ids and attention mask of prompts to go on from, each with its <bos>, which a cut on the left leaves.

        lm-eval's own leaves <bos> out of the whole batch where the first text begins with those characters, and cuts
        it off first.
        """
        rows = [self.tok_encode(s) for s in strings]
        if left_truncate_len:
            first = 1 if self.add_bos_token else 0
            self.truncated += sum(len(ids) > left_truncate_len for ids in rows)
            keep = lambda ids: ids[:first] + ids[len(ids) - left_truncate_len + first :]
            rows = [keep(ids) if len(ids) > left_truncate_len else ids for ids in rows]
        batch = self.tokenizer.pad({"input_ids": rows}, padding_side=padding_side, return_tensors="pt")
        return batch["input_ids"], batch["attention_mask"]


class CheckedServer(_Checked, LocalCompletionsAPI):
    """A model behind an OpenAI completions server."""


def load_tokenizer(folder: Path):
    """A folder's config and tokenizer. Raises UserError unless they belong together and <bos> comes first, once."""
    from transformers import AutoConfig, AutoTokenizer

    with loading(folder):
        config = AutoConfig.from_pretrained(folder)
        tokenizer = AutoTokenizer.from_pretrained(folder)
    rows, entries = config.get_text_config().vocab_size, len(tokenizer)
    if not 0 <= rows - entries < EXTRA_ROWS:
        raise UserError(
            f"{folder}: the tokenizer has {entries} entries and the model {rows} (vocab_size); they do not match"
        )
    bos = tokenizer.bos_token_id
    ids = tokenizer("def f(x): return x", add_special_tokens=True)["input_ids"]
    if bos is None:
        log.warning("%s: the tokenizer has no <bos>; text is scored from <eos> on", folder)
    elif ids[0] != bos or ids.count(bos) != 1:
        raise UserError(
            f"{folder}: the tokenizer must put <bos> first, once, and gives {ids[:4]}...; set its post-processor"
        )
    return config, tokenizer


def build(
    folder: Path, backend: str, dtype: str, batch_size: int, texts: dict[str, Text]
) -> tuple[Any, dict[str, Any]]:
    """An lm-eval model for `folder`, and the settings that a result records.

    backend: "hf", or the address of a completions server that serves this folder. Raises UserError for a folder that
    is not a model, a vocabulary that does not match, and a server that is not there or serves something else.
    """
    config, tokenizer = load_tokenizer(folder)
    bos = tokenizer.bos_token_id is not None
    if backend == "hf":
        lm, about = _in_process(folder, config, dtype, batch_size, bos)
    else:
        lm, about = _served(folder, config, backend, batch_size, bos)
    lm.texts = texts
    text_only(lm.tokenizer)
    return lm, {**about, "bos": bos, "batch_size": batch_size, "max_length": lm.max_length}


def _in_process(folder: Path, config, dtype: str, batch_size: int, bos: bool) -> tuple[Any, dict[str, Any]]:
    import torch

    import zaya  # noqa: F401 - registers our class with transformers

    longest = config.get_text_config().max_position_embeddings
    with loading(folder):
        lm = CheckedHF(
            pretrained=str(folder),
            dtype=dtype,
            device="cuda" if torch.cuda.is_available() else "cpu",
            batch_size=batch_size,
            max_length=longest,
            softmax_dtype="float32",
            add_bos_token=bos,
        )
    lm.room = longest + 1  # the last scored token is not an input
    kind = type(lm.model)
    if config.model_type == "zaya" and not kind.__module__.startswith("zaya."):
        raise CheckFailed(f"{folder}: loaded as {kind.__module__}.{kind.__name__}, not as our class")
    return lm, {"backend": "hf", "class": kind.__name__, "dtype": str(lm.model.dtype).removeprefix("torch.")}


def _served(folder: Path, config, url: str, batch_size: int, bos: bool) -> tuple[Any, dict[str, Any]]:
    base = url.rstrip("/").removesuffix("/v1")
    try:
        with urllib.request.urlopen(f"{base}/v1/models", timeout=10) as answer:
            card = json.load(answer)["data"][0]
    except (OSError, ValueError, LookupError) as e:
        raise UserError(
            f"--backend {url}: no completions server answers there ({e}); `zaya serve` starts one"
        ) from None
    root = Path(str(card.get("root") or ""))
    if root.is_dir() and not root.samefile(folder):
        raise UserError(f"--backend {url}: serves {root}, and {folder} was to be scored; name the folder it serves")
    longest = min(config.get_text_config().max_position_embeddings, card.get("max_model_len") or 1 << 30)
    lm = CheckedServer(
        base_url=f"{base}/v1/completions",
        model=card["id"],
        tokenizer=str(folder),
        tokenizer_backend="huggingface",
        add_bos_token=bos,
        max_length=longest,
        batch_size=batch_size,
    )
    lm.room = lm.max_length
    return lm, {"backend": "completions server", "class": None, "dtype": None}
