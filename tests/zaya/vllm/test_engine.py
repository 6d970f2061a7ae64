"""vLLM's engine with our model, in this process, against stock transformers: tokens and every log-probability.

Tokens alone would not do: they can agree while a request's state is wrong (see the negative controls).
"""

import os
import shutil

import pytest
import torch

pytest.importorskip("vllm")
os.environ["HF_HUB_OFFLINE"] = "1"

from tests.zaya.vllm import support

ATOL = 1e-4
pytestmark = pytest.mark.timeout(600)


def worst(model, got, prompts, new_tokens) -> float:
    """Largest difference of a log-probability from stock's, after checking that greedy tokens agree."""
    found = 0.0
    for prompt, (tokens, logprobs, _) in zip(prompts, got, strict=True):
        expected_tokens, expected = support.reference(model, prompt, new_tokens)
        assert tokens == expected_tokens, f"prompt of {len(prompt)} tokens"
        expected = expected[-len(logprobs) :]
        found = max(found, *(abs(a - b) for a, b in zip(logprobs, expected, strict=True)))
    return found


def difference(model, got, prompts) -> float:
    """Largest difference from stock's log-probabilities of the tokens that vLLM itself chose."""
    pairs = []
    for prompt, (tokens, logprobs, _) in zip(prompts, got, strict=True):
        pairs += zip(logprobs, support.score(model, [*prompt, *tokens])[-len(logprobs) :], strict=True)
    return max(abs(a - b) for a, b in pairs)


@pytest.fixture(scope="module")
def plain(tmp_path_factory):
    """Full attention, an output head of its own; prefill in chunks of 32 tokens, no prefix cache."""
    folder = support.make_folder(tmp_path_factory.mktemp("plain"), tie_word_embeddings=False)
    llm = support.engine(folder, enable_prefix_caching=False, max_num_batched_tokens=32, max_num_seqs=4)
    yield llm, support.stock(folder)
    support.close(llm)


def test_mixed_lengths_in_chunks(plain):
    llm, model = plain
    prompts = support.prompts((1, 2, 3, 7, 31, 32, 33, 65, 150))  # more than the four slots: they are used again
    got = support.generate(llm, prompts, 12)
    assert len({t for tokens, _, _ in got for t in tokens}) > 10, "the probe's text is too dull to show a mistake"
    assert worst(model, got, prompts, 12) < ATOL


BROKEN = {
    "a chunk forgets its request's convolution columns": "conv",
    "a chunk forgets its request's delayed value": "value",
    "a new request sees its slot's old state": "stale",
    "skipped tokens get an expert": "skip",
}


@pytest.mark.parametrize("what", BROKEN)
def test_a_mistake_on_purpose_is_seen(plain, monkeypatch, what):
    llm, model = plain
    make_mistake(monkeypatch, BROKEN[what])
    prompts = support.prompts((70, 40))
    assert difference(model, support.generate(llm, prompts, 4), prompts) > 100 * ATOL


def make_mistake(monkeypatch, how: str) -> None:
    from zaya.vllm import model, state

    mix, requests_of, choose = state.mix, state.requests_of, model.ZayaRouter.choose

    def forgetful(qk, delayed, first, weights, conv, value, requests):
        (conv if how == "conv" else value)[requests.slots] = 0
        return mix(qk, delayed, first, weights, conv, value, requests)

    def stale(metadata, device):
        found = requests_of(metadata, device)
        return found._replace(resumed=torch.ones_like(found.resumed))

    def never_skip(self, logits):
        chosen, weight = choose(self, logits)
        return chosen.clamp(max=self.skip - 1), weight

    if how == "skip":
        monkeypatch.setattr(model.ZayaRouter, "choose", never_skip)
    elif how == "stale":
        monkeypatch.setattr(state, "requests_of", stale)
    else:
        monkeypatch.setattr(state, "mix", forgetful)


@pytest.fixture(scope="module")
def sliding(tmp_path_factory):
    """Sliding windows in every second layer, tied embeddings, prefix cache; prefill in chunks of one block."""
    types = ["hybrid_sliding", "hybrid", "hybrid_sliding", "hybrid"]
    folder = support.make_folder(tmp_path_factory.mktemp("sliding"), seed=1, layer_types=types, sliding_window=16)
    llm = support.engine(folder, enable_prefix_caching=True, max_num_batched_tokens=160)
    yield llm, support.stock(folder)
    support.close(llm)


def test_a_cached_prefix_brings_keys_values_and_state(sliding):
    llm, model = sliding
    [shared] = support.prompts((400,))
    prompts = [shared + tail for tail in support.prompts((1, 30, 90), seed=2)]
    assert difference(model, support.generate(llm, [shared], 4), [shared]) < ATOL
    got = support.generate(llm, prompts, 8, whole=False)
    assert min(cached for _, _, cached in got) >= 128, [cached for _, _, cached in got]
    assert worst(model, got, prompts, 8) < ATOL


def test_a_prefix_without_its_state_is_seen(sliding, monkeypatch):
    llm, model = sliding
    [shared] = support.prompts((400,), seed=3)
    support.generate(llm, [shared], 1)
    make_mistake(monkeypatch, "value")
    got = support.generate(llm, [[*shared, 5]], 4, whole=False)
    assert got[0][2] >= 128
    assert difference(model, got, [[*shared, 5]]) > 10 * ATOL


@pytest.mark.skipif(shutil.which("g++") is None, reason="vLLM compiles with g++, which is not here")
def test_compiled(tmp_path):
    """torch.compile around the state op, which it must not look into."""
    types = ["hybrid", "hybrid_sliding"]
    fields = {"num_hidden_layers": 2, "layer_types": types, "sliding_window": 16, "tie_word_embeddings": False}
    folder = support.make_folder(tmp_path, seed=2, **fields)
    llm = support.engine(folder, enforce_eager=False, enable_prefix_caching=False, max_num_batched_tokens=32)
    try:
        assert llm.llm_engine.vllm_config.compilation_config.mode, "nothing was compiled"
        prompts = support.prompts((1, 40, 70))
        assert worst(support.stock(folder), support.generate(llm, prompts, 6), prompts, 6) < ATOL
    finally:
        support.close(llm)
