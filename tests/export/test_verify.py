"""Verification against stock: it passes on what we export, and notices what it is there to notice."""

import json
import shutil

import pytest
import torch
from safetensors.torch import load_file, save_file

from tests.export.support import make_checkpoint, make_model
from zaya.errors import CheckFailed, UserError
from zaya.export.hf import export_checkpoint
from zaya.export.verify import compare, verify_folder
from zaya.results import load_all


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    at = tmp_path_factory.mktemp("verify")
    return export_checkpoint(make_checkpoint(at / "run"), at / "hf")


def test_an_exported_folder_agrees_and_uses_the_skip_class(folder, tmp_path):
    report = verify_folder(folder, out=tmp_path / "out", new_tokens=8, prompts=4)
    assert report["max_logit_difference"] < 1e-4
    assert report["equal_tokens"] == report["tokens"] == 32
    assert report["stock_class"] == "transformers.models.zaya.modeling_zaya.ZayaForCausalLM"
    assert min(report["classes_used_per_layer"]) >= 3
    assert 0 < report["skip_share"] < 1
    (result,) = load_all(tmp_path / "out")
    assert result.kind == "verify"
    assert len(result.subject_sha256) == 64


def test_a_lost_skip_bias_is_noticed(folder, tmp_path):
    """A folder whose skip bias is not -1: stock resets it at load, so it computes something else."""
    broken = tmp_path / "broken"
    broken.mkdir()
    for file in folder.iterdir():
        (broken / file.name).write_bytes(file.read_bytes())
    tensors = load_file(broken / "model.safetensors")
    for name in tensors:
        if name.endswith("balancing_biases"):
            tensors[name] += 1.0
    save_file(tensors, broken / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(CheckFailed, match="skip"):
        verify_folder(broken, out=tmp_path / "out", new_tokens=4, prompts=4)
    assert (tmp_path / "out" / "manifest.json").exists(), "a failed comparison is a result too"


def test_hostile_input(folder, tmp_path):
    with pytest.raises(UserError, match="not a model folder"):
        verify_folder(tmp_path)
    with pytest.raises(UserError, match="no such file of probe texts"):
        verify_folder(folder, text=tmp_path / "none.jsonl")
    empty = tmp_path / "empty.jsonl"
    empty.write_text(json.dumps({"text": " "}) + "\n")
    with pytest.raises(UserError, match="no text to probe with"):
        verify_folder(folder, text=empty)
    assert make_model().config.model_type == "zaya"


@pytest.mark.parametrize(
    ("name", "content", "told"),
    [
        ("model.safetensors", b"", "damaged or cut short"),
        ("config.json", b"[]", "no JSON object"),
        ("config.json", b"\xff", "not a valid model config"),
        ("tokenizer.json", b"{", "not a valid tokenizer"),
        ("README.md", None, "no README.md to probe with"),
    ],
)
def test_a_damaged_folder_is_named(folder, tmp_path, name, content, told):
    bad = tmp_path / "bad"
    shutil.copytree(folder, bad)
    (bad / name).unlink() if content is None else (bad / name).write_bytes(content)
    with pytest.raises(UserError, match=told) as error:
        verify_folder(bad)
    assert "\n" not in str(error.value)


def test_weights_that_are_not_the_configs_are_refused(folder, tmp_path):
    """transformers fills what is missing with noise, and only logs it."""
    bad = tmp_path / "bad"
    shutil.copytree(folder, bad)
    tensors = load_file(bad / "model.safetensors")
    wrong = tensors | {"model.norm.weight": torch.ones(3)}
    del tensors["model.norm.weight"]
    for given, told in ((tensors, "lack model.norm.weight"), (wrong, "not of the sizes")):
        save_file(given, bad / "model.safetensors", metadata={"format": "pt"})
        with pytest.raises(UserError, match=told):
            verify_folder(bad)


def test_not_a_number_is_no_agreement():
    good, bad = torch.zeros(2), torch.tensor([0.0, float("nan")])
    found = compare({"logits.0": good, "logits.1": bad}, {"logits.0": good, "logits.1": bad})
    assert not found["max_logit_difference"] <= 1.0


def test_the_target_is_looked_at_first(folder, tmp_path, monkeypatch):
    monkeypatch.setattr("zaya.export.verify.run_ours", lambda *a: pytest.fail("computed before it looked"))
    with pytest.raises(UserError, match="another stage made"):
        verify_folder(folder, out=folder)
    with pytest.raises(UserError, match="ask for fewer"):
        verify_folder(folder, new_tokens=100_000)
