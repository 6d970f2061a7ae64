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


def test_probes_of_verify_and_of_the_server(folder, tmp_path):
    file = tmp_path / "texts.jsonl"
    file.write_text("".join(json.dumps({"text": t}) + "\n" for t in (TEXT, *TEXTS)))
    [ids] = read_prompts(folder, file, 1, 32)
    assert ids[0] == 1
    assert not {0, 1, 2} & set(ids[1:])
    _, tokenizer = load_reference(folder)
    assert not {0, 1, 2} & set(tokenizer(TEXT)["input_ids"][1:])
