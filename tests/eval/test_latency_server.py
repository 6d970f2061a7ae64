"""A real vLLM server of a small random model: started once, compared, measured, stopped."""

import datetime
import json
import shutil

import psutil
import pytest

pytest.importorskip("vllm")

from tests.zaya.vllm import support
from zaya.errors import CheckFailed, UserError
from zaya.eval.latency import bench, parity, run
from zaya.eval.latency.folder import take_port
from zaya.eval.latency.server import Options, serve_folder
from zaya.files import read_manifest
from zaya.results import load_all, provenance

pytestmark = pytest.mark.timeout(900)
LOADS = [bench.Load(1, 3, 12, 4), bench.Load(3, 6, 12, 4)]


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return support.make_folder(tmp_path_factory.mktemp("served"), tie_word_embeddings=False)


@pytest.fixture(scope="module")
def server(model, tmp_path_factory):
    log = tmp_path_factory.mktemp("log") / "server.log"
    before = {p.pid for p in psutil.process_iter()}
    with serve_folder(model, Options(max_model_len=512), log) as running:
        yield running
        group = [p for p in psutil.process_iter(["cmdline"]) if p.pid not in before and str(model) in str(p.info)]
        assert len(group) >= 2, "guard and server"
    _, alive = psutil.wait_procs(group, timeout=10)
    assert alive == []
    assert take_port(int(running.url.rsplit(":", 1)[1]))


def test_our_class_answers(server):
    assert server.model_class == "zaya.vllm.model:ZayaForCausalLM"


def test_its_port_is_taken(server, model):
    port = int(server.url.rsplit(":", 1)[1])
    with pytest.raises(UserError, match=f"port {port} is in use"), serve_folder(model, Options(port=port)):
        pass


def test_tokens_and_log_probabilities_are_those_of_stock_transformers(server, model):
    stock = support.stock(model)
    prompts = support.prompts((1, 5, 40, 200), seed=4)
    for prompt in prompts:
        tokens, logprobs = parity.ask(server.url, server.model, prompt, 8)
        expected_tokens, expected = support.reference(stock, prompt, 8)
        assert tokens == expected_tokens
        assert max(abs(a - b) for a, b in zip(logprobs, expected, strict=True)) < 1e-4


def test_the_comparison_passes_and_counts(server, model):
    report = parity.require(parity.compare_server(server.url, model, 8, new_tokens=8), model)
    assert (report.prompts, report.tokens, report.equal_tokens) == (8, 64, 64)
    lengths = [len(s["prompt"]) for s in report.samples]
    assert report.positions == sum(lengths) - 8 + 64
    assert min(lengths) <= 2
    assert max(lengths) >= 100


def test_the_comparison_fails_for_other_weights(server, model, tmp_path):
    other = support.make_folder(tmp_path / "other", seed=5, tie_word_embeddings=False)
    report = parity.compare_server(server.url, other, 2, new_tokens=4)
    assert not report.good
    with pytest.raises(CheckFailed, match=r"prompt 1 \(2 tokens\)"):
        parity.require(report, other)


def test_a_small_difference_fails_while_tokens_agree(server, model, tmp_path):
    """A log-probability that is off by a thousandth of a nat is seen."""
    from safetensors.torch import load_file, save_file

    other = shutil.copytree(model, tmp_path / "other")
    weights = load_file(other / "model.safetensors")
    weights["lm_head.weight"] = weights["lm_head.weight"] * 1.001
    save_file(weights, other / "model.safetensors", {"format": "pt"})
    report = parity.compare_server(server.url, other, 2, new_tokens=4)
    assert report.equal_tokens == report.tokens
    assert not report.good


def test_the_benchmark_gives_results_that_load(server, model, tmp_path):
    reports = bench.run(server, model, LOADS)
    assert [r["completed"] for r in reports] == [3, 6]
    compared = parity.compare_server(server.url, model, 1, new_tokens=2)
    settings = run._settings(server)
    results = run.build(model, "tiny", datetime.datetime.now(datetime.UTC), compared, LOADS, reports, settings)
    run.write(tmp_path / "out", results, compared)
    found = {(r.name, r.settings.get("concurrency")): r for r in load_all(tmp_path / "out")}
    assert set(found) == {("parity", None), ("serving", 1), ("serving", 3)}
    values = {m.name: m for m in found["serving", 3].metrics}
    assert values["failed_requests"].value == 0
    assert values["failed_requests"].n == 6
    for what in ("ttft", "tpot", "itl"):
        low, mid, high = (values[f"{what}_ms_{q}"].value for q in ("p50", "p90", "p99"))
        assert 0 < low <= mid <= high
    # by hand: 6 requests of 4 tokens in the time that they took
    assert values["output_tokens_per_s"].value == pytest.approx(24 / reports[1]["duration"], rel=1e-3)
    assert values["requests_per_s"].value == pytest.approx(6 / reports[1]["duration"], rel=1e-3)
    manifest = read_manifest(tmp_path / "out")
    assert set(manifest["outputs"]) == {"tokens.json"}
    assert len(manifest["timings"]) == 3
    assert json.loads((tmp_path / "out" / "tokens.json").read_text())[0]["served"]
    assert found["serving", 1].provenance.versions == provenance(datetime.datetime.now(datetime.UTC)).versions


def test_requests_that_fail_are_a_failed_check(server, model):
    with pytest.raises(CheckFailed, match="2 of 2 requests failed with 1 in flight|benchmark ended"):
        bench.run(server, model, [bench.Load(1, 2, 600, 4)])
