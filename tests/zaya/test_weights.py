"""One digest of weights, however they are spread over files; and shards that are missing or cut."""

import json

import pytest
import torch
from safetensors.torch import load_file, save_file

import zaya
from tests.zaya.support import make
from tests.zaya.test_cli import zaya as command_line
from zaya.errors import UserError
from zaya.weights import INDEX, weight_files, weights_sha256


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    """The same model in one file and in several."""
    root, model = tmp_path_factory.mktemp("weights"), make()
    model.save_pretrained(root / "one")
    model.save_pretrained(root / "shards", max_shard_size="60KB")
    assert len(weight_files(root / "shards")) > 3
    return root


def test_the_digest_is_of_the_weights_and_not_of_the_files(folders, tmp_path):
    digest = weights_sha256(folders / "one")
    assert weights_sha256(folders / "shards") == digest
    again = zaya.ZayaForCausalLM.from_pretrained(folders / "shards")
    again.save_pretrained(tmp_path / "again")
    assert weights_sha256(tmp_path / "again") == digest
    tensors = load_file(tmp_path / "again" / "model.safetensors")
    stored = tensors | {"lm_head.weight": tensors["model.embed_tokens.weight"].clone()}
    save_file(stored, tmp_path / "again" / "model.safetensors", metadata={"format": "pt", "more": "words"})
    assert weights_sha256(tmp_path / "again") == digest  # a tied head may be stored
    config = json.loads((tmp_path / "again" / "config.json").read_text())
    (tmp_path / "again" / "config.json").write_text(json.dumps(config | {"tie_word_embeddings": False}))
    assert weights_sha256(tmp_path / "again") != digest  # one of its own may not


@pytest.mark.parametrize("change", ["value", "dtype", "name", "shape"])
def test_any_change_of_a_tensor_changes_the_digest(folders, tmp_path, change):
    make().save_pretrained(tmp_path)
    tensors = load_file(tmp_path / "model.safetensors")
    name = "model.layers.1.mlp.gate.balancing_biases"
    if change == "value":
        tensors[name][0] += 1e-6
    elif change == "dtype":
        tensors[name] = tensors[name].to(torch.float64).view(torch.float64)
    elif change == "shape":
        tensors[name] = tensors[name][None]
    else:
        tensors[name + "2"] = tensors.pop(name)
    save_file(tensors, tmp_path / "model.safetensors", metadata={"format": "pt"})
    assert weights_sha256(tmp_path) != weights_sha256(folders / "one")


def break_one(folder, how: str) -> str:
    index = json.loads((folder / INDEX).read_text())
    name = sorted(set(index["weight_map"].values()))[1]
    if how == "missing":
        (folder / name).unlink()
        return f"shard {name} of"
    if how == "cut":
        (folder / name).write_bytes((folder / name).read_bytes()[:-5])
        return "damaged or cut short"
    if how == "swapped":
        other = sorted(set(index["weight_map"].values()))[0]
        (folder / name).write_bytes((folder / other).read_bytes())
        return f"{name}: lacks model."
    if how == "no index":
        (folder / INDEX).unlink()
        return "neither model.safetensors nor model.safetensors.index.json"
    (folder / INDEX).write_text("{}")
    return "weight_map"


@pytest.mark.parametrize("how", ["missing", "cut", "swapped", "no index", "empty index"])
def test_what_is_missing_is_named(tmp_path, how):
    make().save_pretrained(tmp_path, max_shard_size="60KB")
    says = break_one(tmp_path, how)
    with pytest.raises(UserError, match=says):
        weights_sha256(tmp_path)


@pytest.mark.parametrize("command", [["verify"], ["eval", "--suite", "heldout"], ["serve"], ["latency"]])
def test_every_command_names_a_missing_shard(tmp_path, command):
    make().save_pretrained(tmp_path, max_shard_size="60KB")
    (tmp_path / "tokenizer.json").write_text("{}")
    says = break_one(tmp_path, "missing")
    done = command_line(command[0], str(tmp_path), *command[1:])
    assert (done.returncode, done.stderr.count("\n")) == (2, 1)
    assert says in done.stderr
