"""Answers are found again by everything they depend on, and by nothing less."""

import json
from pathlib import Path

import pytest
import torch
from lm_eval.api.instance import Instance
from lm_eval.api.model import CachingLM
from transformers.models.zaya import ZayaForCausalLM

from tests.eval.quality_support import make_folder, make_heldout
from zaya.eval.quality import identity as identities
from zaya.eval.quality.backend import CheckedHF, build
from zaya.eval.quality.identity import Answers, identity
from zaya.eval.quality.run import SEEDS, score
from zaya.files import read_manifest
from zaya.results import load_all
from zaya.weights import weights_sha256

PAIRS = [("def f(x):", " return x"), ("import", " os"), ("x =", " 1")]


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    return make_folder(tmp_path_factory.mktemp("a"))


@pytest.fixture(scope="module")
def other(tmp_path_factory) -> Path:
    """The same shape and tokenizer, other weights."""
    folder = make_folder(tmp_path_factory.mktemp("b"))
    model = ZayaForCausalLM.from_pretrained(folder)
    with torch.no_grad():
        model.model.embed_tokens.weight.mul_(1.5)
    model.save_pretrained(folder)
    return folder


def requests() -> list[Instance]:
    return [Instance("loglikelihood", {}, pair, i, metadata=("t", i, 1)) for i, pair in enumerate(PAIRS)]


def test_the_harness_gives_one_models_answers_to_another_and_ours_does_not(folder, other, tmp_path):
    models = {f: build(f, "hf", "float32", 2, {}) for f in (folder, other)}
    truth = {f: lm.loglikelihood(requests(), disable_tqdm=True) for f, (lm, _) in models.items()}
    assert truth[folder] != truth[other]
    theirs = [CachingLM(models[f][0], str(tmp_path / "theirs.db")).loglikelihood(requests()) for f in (folder, other)]
    assert theirs[1] == theirs[0] == truth[folder]  # the fault: the second model is reported with the first one's
    for f, (lm, about) in models.items():
        lm.answers = Answers(tmp_path / "ours", identity(f, weights_sha256(f), about, SEEDS, None))
        assert lm.loglikelihood(requests(), disable_tqdm=True) == truth[f]
        assert lm.answers.reused == 0
    for f, (lm, _) in models.items():
        assert lm.loglikelihood(requests(), disable_tqdm=True) == truth[f]
        assert lm.answers.reused == len(PAIRS)


class Counter:
    """Stands for a model: counts what it is asked."""

    truncated = 0

    def __init__(self):
        self.asked = 0

    def ask(self, part):
        self.asked += len(part)
        return [(float(i), True) for i, _ in enumerate(part)]


BASE = {"weights": "w", "tokenizer": "t", "config": "c", "code": "z", "seeds": {"torch": 1}, "limit": None}
BACKEND = {"backend": "hf", "dtype": "float32", "bos": True, "batch_size": 8, "max_length": 64}


@pytest.mark.parametrize(
    "change",
    [
        {"weights": "other"},
        {"tokenizer": "other"},
        {"config": "other"},
        {"code": "other"},
        {"versions": {"transformers": "0"}},
        {"seeds": {"torch": 2}},
        {"limit": 100},
        *({"backend": BACKEND | {k: "other"}} for k in BACKEND),
    ],
    ids=str,
)
def test_every_part_of_the_key_counts(tmp_path, change):
    key, model = BASE | {"backend": BACKEND, "versions": {"transformers": "1"}}, Counter()
    for given, asked in ((key, 3), (key, 3), (key | change, 6)):
        Answers(tmp_path, given).through(model, "loglikelihood", requests(), model.ask)
        assert model.asked == asked


def test_the_tasks_repeats_and_arguments_of_a_request_count(tmp_path):
    model, answers = Counter(), Answers(tmp_path, BASE)
    ask = lambda kind, *of: answers.through(model, kind, list(of), model.ask)
    generate = lambda **k: Instance("generate_until", {}, ("x", k), 0, metadata=("t", 0, 1))
    ask("generate_until", generate(max_gen_toks=4))
    ask("generate_until", generate(max_gen_toks=5))
    ask("generate_until", Instance("generate_until", {}, ("x", {"max_gen_toks": 4}), 0, metadata=("u", 0, 1)))
    ask("loglikelihood", generate(max_gen_toks=4))
    assert (model.asked, answers.reused) == (4, 0)
    ask("generate_until", generate(max_gen_toks=4))
    assert (model.asked, answers.reused) == (4, 1)


def test_an_interrupted_run_goes_on_and_ends_as_one_that_was_not(folder, tmp_path, monkeypatch):
    heldout, asked, stop = make_heldout(tmp_path / "heldout.jsonl"), [], [3]
    monkeypatch.setattr(identities, "CHUNK", 5)
    real = CheckedHF._loglikelihood_tokens

    def counted(self, requests, **kwargs):
        if len(asked) == stop[0]:
            raise KeyboardInterrupt
        asked.append(len(requests))
        return real(self, requests, **kwargs)

    monkeypatch.setattr(CheckedHF, "_loglikelihood_tokens", counted)
    given = {"limit": 4, "heldout": heldout, "name": "tiny"}
    with pytest.raises(KeyboardInterrupt):
        score(folder, out=tmp_path / "out", **given)
    before = sum(asked)
    assert before > 0
    assert not (tmp_path / "out").exists()
    stop[0] = -1
    score(folder, out=tmp_path / "out", **given)
    total = sum(asked)
    asked.clear()
    score(folder, out=tmp_path / "straight", **given)
    assert sum(asked) == total  # nothing was asked twice
    assert read_manifest(tmp_path / "out") == read_manifest(tmp_path / "straight")
    assert {p.name for p in tmp_path.iterdir()} == {"heldout.jsonl", "out", "straight"}


def test_results_that_asked_the_same_share_a_digest_and_a_part_does_not(folder, other, tmp_path):
    heldout = make_heldout(tmp_path / "heldout.jsonl")
    for name, model, limit in (("a", folder, 2), ("b", other, 2), ("c", folder, 3)):
        score(model, out=tmp_path / name, name=name, limit=limit, heldout=heldout)
    asked = {
        n: {r.name: r.settings["protocol_sha256"] for r in load_all(tmp_path / n) if r.name != "heldout_python"}
        for n in ("a", "b", "c")
    }
    assert asked["a"] == asked["b"]
    assert all(asked["a"][task] != asked["c"][task] for task in asked["a"])
    assert all(r.settings["partial"] for r in load_all(tmp_path / "a") if r.name == "piqa")
    [piqa] = [r for r in load_all(tmp_path / "a") if r.name == "piqa"]
    assert (piqa.settings["suite_items"], piqa.settings["limit"]) == (100, 2)


def test_another_tokenizer_is_another_identity(folder, tmp_path):
    before = identities.tokenizer_sha256(folder)
    for p in folder.iterdir():
        (tmp_path / p.name).write_bytes(p.read_bytes())
    assert identities.tokenizer_sha256(tmp_path) == before
    text = json.loads((tmp_path / "tokenizer.json").read_text())
    (tmp_path / "tokenizer.json").write_text(json.dumps(text | {"post_processor": None}))
    assert identities.tokenizer_sha256(tmp_path) != before
