"""Special tokens that are written in a scored text, a prompt or a probe are text."""

import json

import pytest

from tests.eval.quality_support import TEXTS, log_probabilities, make_folder, stock
from zaya.eval.latency.parity import load_reference
from zaya.eval.quality.backend import build
from zaya.export.verify import read_prompts

TEXT = '<bos>html = "<pad>"  # <eos> ends a document\n'


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return make_folder(tmp_path_factory.mktemp("folder"))


def test_prompts_and_documents_that_are_scored(folder):
    lm, _ = build(folder, "hf", "float32", 1, {})
    assert lm.tok_encode(TEXT, add_special_tokens=False) == lm.tokenizer(TEXT, add_special_tokens=False)["input_ids"]
    ids = lm.tok_encode(TEXT)
    assert ids[0] == 1
    assert not {0, 1, 2} & set(ids[1:])
    assert lm.tokenizer.decode(ids[1:]) == TEXT


def test_a_prompt_that_begins_with_the_characters_of_bos_is_scored_after_bos(folder):
    from lm_eval.api.instance import Instance

    lm, _ = build(folder, "hf", "float32", 1, {})
    request = Instance("loglikelihood", {}, (TEXT[:-1], "\nx = 1"), 0, metadata=("t", 0, 1))
    [(got, _)] = lm.loglikelihood([request])
    context = lm.tokenizer(TEXT[:-1])["input_ids"]
    scored = lm.tokenizer(TEXT + "x = 1")["input_ids"][len(context) :]
    want = log_probabilities(stock(folder), [*context, *scored])[-len(scored) :]
    assert got == pytest.approx(sum(want), abs=1e-4)


def test_a_batch_of_prompts_to_go_on_from_keeps_each_bos(folder):
    lm, _ = build(folder, "hf", "float32", 1, {})
    texts = [TEXT, "def f(x):", "x"]  # the first begins with the characters of <bos>
    ids, mask = lm.tok_batch_encode(texts)
    for row, kept, text in zip(ids.tolist(), mask.tolist(), texts, strict=True):
        real = [t for t, m in zip(row, kept, strict=True) if m]
        assert real == lm.tok_encode(text)
        assert (real[0], real.count(1)) == (1, 1)
        assert kept == sorted(kept)  # padded on the left
    whole = lm.tok_encode(TEXT)
    short, _ = lm.tok_batch_encode(texts, left_truncate_len=8)
    assert short[0].tolist() == [1, *whole[-7:]]
    assert lm.truncated == sum(len(lm.tok_encode(t)) > 8 for t in texts) >= 1


def test_a_prompt_that_begins_with_the_characters_of_bos_is_gone_on_from_after_bos(folder):
    from lm_eval.api.instance import Instance

    lm, _ = build(folder, "hf", "float32", 2, {})
    kwargs = {"until": ["\n\n\n"], "max_gen_toks": 6, "do_sample": False}
    requests = [
        Instance("generate_until", {}, (t, kwargs), i, metadata=("t", i, 1)) for i, t in enumerate([TEXT, "x"])
    ]
    answers = lm.generate_until(requests, disable_tqdm=True)
    model = stock(folder)
    for text, answer in zip([TEXT, "x"], answers, strict=True):
        ids = lm.tokenizer(text, return_tensors="pt")["input_ids"]
        want = model.generate(ids, max_new_tokens=6, do_sample=False)[0, ids.shape[1] :]
        assert answer == lm.tokenizer.decode(want, skip_special_tokens=True).split("\n\n\n")[0]


def test_probes_of_verify_and_of_the_server(folder, tmp_path):
    file = tmp_path / "texts.jsonl"
    file.write_text("".join(json.dumps({"text": t}) + "\n" for t in (TEXT, *TEXTS)))
    [ids] = read_prompts(folder, file, 1, 32)
    assert ids[0] == 1
    assert not {0, 1, 2} & set(ids[1:])
    _, tokenizer = load_reference(folder)
    assert not {0, 1, 2} & set(tokenizer(TEXT)["input_ids"][1:])
