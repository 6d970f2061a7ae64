"""Checkpoint to Hugging Face folder: every tensor, the skip bias, the tokenizer, and what is refused."""

import json
import shutil
import subprocess
import sys

import pytest
import torch
from safetensors.torch import load_file, save_file

from tests.export.support import make_checkpoint
from zaya.errors import CheckFailed, UserError
from zaya.export.hf import export_checkpoint
from zaya.files import write_manifest


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    return make_checkpoint(tmp_path_factory.mktemp("run"))


def test_every_tensor_but_the_shifted_biases_is_the_checkpoints(checkpoint, tmp_path):
    out = export_checkpoint(checkpoint, tmp_path / "hf")
    was, now = load_file(checkpoint / "model.safetensors"), load_file(out / "model.safetensors")
    assert was.keys() == now.keys()
    for name, tensor in was.items():
        if name.endswith("balancing_biases"):
            assert now[name][-1] == -1
            torch.testing.assert_close(now[name] - now[name][-1], tensor - tensor[-1], atol=1e-6, rtol=0)
            assert tensor[-1] != -1
        else:
            assert torch.equal(now[name], tensor), name


def test_the_folder_is_complete_and_repeatable(checkpoint, tmp_path):
    one, two = (export_checkpoint(checkpoint, tmp_path / n) for n in ("one", "two"))
    names = {p.name for p in one.iterdir()}
    assert {"config.json", "generation_config.json", "model.safetensors", "tokenizer.json", "README.md"} <= names
    assert (one / "manifest.json").read_text() == (two / "manifest.json").read_text()
    config = json.loads((one / "config.json").read_text())
    assert config["architectures"] == ["ZayaForCausalLM"]
    assert "kernels" not in config


def test_both_classes_load_it_and_generate_the_same(checkpoint, tmp_path):
    out = export_checkpoint(checkpoint, tmp_path / "hf")
    script = """
import sys, torch
from transformers import AutoModelForCausalLM as A, AutoTokenizer
model, tokenizer = A.from_pretrained(sys.argv[1]), AutoTokenizer.from_pretrained(sys.argv[1])
ids = tokenizer("def f(x):", return_tensors="pt")
print(type(model).__module__, model.generate(**ids, max_new_tokens=12).tolist())
"""
    printed = []
    for first in ("", "import zaya\n"):
        done = subprocess.run([sys.executable, "-P", "-c", first + script, str(out)], capture_output=True, text=True)
        assert done.returncode == 0, done.stderr
        printed.append(done.stdout.split(" ", 1))
    assert printed[0][0] == "transformers.models.zaya.modeling_zaya"
    assert printed[1][0] == "zaya.modeling_zaya"
    assert printed[0][1] == printed[1][1]


def test_bfloat16_keeps_the_biases_in_float32(checkpoint, tmp_path):
    now = load_file(export_checkpoint(checkpoint, tmp_path / "hf", "bfloat16") / "model.safetensors")
    assert {t.dtype for n, t in now.items() if n.endswith("balancing_biases")} == {torch.float32}
    assert {t.dtype for n, t in now.items() if not n.endswith("balancing_biases")} == {torch.bfloat16}


def test_refusals_leave_nothing(checkpoint, tmp_path, monkeypatch):
    out = tmp_path / "hf"
    with pytest.raises(UserError, match="no checkpoint here"):
        export_checkpoint(tmp_path, out)
    with pytest.raises(UserError, match="float16.*float32, bfloat16"):
        export_checkpoint(checkpoint, out, "float16")
    monkeypatch.setenv("ZAYA_FREE_BYTES", "10")
    with pytest.raises(UserError, match="the export needs"):
        export_checkpoint(checkpoint, out)
    monkeypatch.delenv("ZAYA_FREE_BYTES")
    assert list(tmp_path.iterdir()) == []


def test_a_checkpoint_of_another_model_is_refused(checkpoint, tmp_path):
    bad = tmp_path / "bad"
    shutil.copytree(checkpoint, bad)
    tensors = load_file(bad / "model.safetensors")
    tensors["surprise"] = tensors.pop("model.norm.weight")
    save_file(tensors, bad / "model.safetensors", metadata={"format": "pt"})
    write_manifest(bad, "checkpoint", {})
    with pytest.raises(CheckFailed, match=r"model\.norm\.weight"):
        export_checkpoint(bad, tmp_path / "hf")
    assert not (tmp_path / "hf").exists()


def test_a_vocabulary_that_does_not_match_is_refused(checkpoint, tmp_path):
    bad = make_checkpoint(tmp_path / "run", vocab_size=64)
    with pytest.raises(CheckFailed, match="vocab_size is 64"):
        export_checkpoint(bad, tmp_path / "hf")
    assert not (tmp_path / "hf").exists()


@pytest.mark.parametrize(
    ("name", "content"),
    [("model.safetensors", b""), ("state.json", b"[1]"), ("config.json", b"{"), ("tokenizer/tokenizer.json", b"{")],
)
def test_a_damaged_checkpoint_is_not_exported(checkpoint, tmp_path, name, content):
    bad = tmp_path / "bad"
    shutil.copytree(checkpoint, bad)
    (bad / name).write_bytes(content)
    with pytest.raises(UserError, match="damaged"):
        export_checkpoint(bad, tmp_path / "hf")
    assert not (tmp_path / "hf").exists()


def test_an_export_onto_its_checkpoint_is_refused(checkpoint):
    before = sorted(p.name for p in checkpoint.iterdir())
    with pytest.raises(UserError, match="another stage made"):
        export_checkpoint(checkpoint, checkpoint)
    assert sorted(p.name for p in checkpoint.iterdir()) == before
