"""Folders between ours and stock transformers. Also run under other transformers versions."""

import json

import pytest
import torch
from transformers import AutoModel, AutoModelForCausalLM

import zaya
from tests.zaya.support import Stock, make, mixed_config, tokens, twin
from zaya.errors import UserError


def equal_tensors(a, b):
    a, b = a.state_dict(), b.state_dict()
    assert a.keys() == b.keys()
    for name in a:
        assert torch.equal(a[name], b[name]), name


@torch.no_grad()
def test_our_folder_in_stock(tmp_path):
    model = make()
    zaya.pin_skip_bias(model)
    model.save_pretrained(tmp_path)
    stock = Stock.from_pretrained(tmp_path)
    equal_tensors(model, stock)
    ids = tokens(model, 2, 16)
    torch.testing.assert_close(model(ids).logits, stock(ids).logits, atol=1e-5, rtol=0)


@torch.no_grad()
def test_stock_folder_in_ours_and_learned_biases_are_kept(tmp_path):
    stock = twin(make())
    stock.save_pretrained(tmp_path, max_shard_size="20KB")
    assert len(list(tmp_path.glob("*.safetensors"))) > 1
    for options in ({}, {"low_cpu_mem_usage": True}, {"device_map": "auto"}, {"device_map": "cpu"}):
        ours = AutoModelForCausalLM.from_pretrained(tmp_path, **options)
        assert type(ours) is zaya.ZayaForCausalLM
        equal_tensors(ours, stock)
    skip = ours.model.layers[0].mlp.gate.balancing_biases[-1]
    assert skip != -1
    ids = tokens(ours, 2, 16)
    torch.testing.assert_close(ours(ids).logits, stock(ids).logits, atol=1e-5, rtol=0)
    base = AutoModel.from_pretrained(tmp_path)
    assert type(base) is zaya.ZayaModel
    torch.testing.assert_close(base(ids).last_hidden_state, ours.model(ids).last_hidden_state)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_dtype_leaves_the_biases_in_fp32(tmp_path, dtype):
    model = make()
    model.save_pretrained(tmp_path)
    low = zaya.ZayaForCausalLM.from_pretrained(tmp_path, dtype=dtype)
    for name, tensor in low.state_dict().items():
        exact = name.endswith("balancing_biases")
        assert tensor.dtype == (torch.float32 if exact else dtype)
        assert torch.equal(tensor, model.state_dict()[name].to(tensor.dtype))


def test_pinning_the_skip_bias_changes_no_choice():
    model = make()
    ids = tokens(model, 2, 32)
    before = model(ids, output_router_logits=True)
    zaya.pin_skip_bias(model)
    after = model(ids, output_router_logits=True)
    assert all(layer.mlp.gate.balancing_biases[-1] == -1 for layer in model.model.layers)
    torch.testing.assert_close(after.logits, before.logits)
    state = {"model.layers.0.mlp.gate.balancing_biases": torch.tensor([0.25, 0.5, -0.5])}
    zaya.pin_skip_bias(state)
    assert state.popitem()[1].tolist() == [-0.25, 0.0, -1.0]
    with pytest.raises(UserError, match="balancing_biases"):
        zaya.pin_skip_bias({"x": torch.ones(1)})


@torch.no_grad()
def test_input_skip_semantics_round_trip_and_stop_stock(tmp_path):
    model = make(mixed_config(skip_semantics="input"))
    model.save_pretrained(tmp_path)
    assert json.loads((tmp_path / "config.json").read_text())["skip_semantics"] == "input"
    again = AutoModelForCausalLM.from_pretrained(tmp_path)
    ids = tokens(model, 2, 16)
    equal_tensors(model, again)
    torch.testing.assert_close(model(ids).logits, again(ids).logits, atol=1e-5, rtol=0)
    with pytest.raises(Exception, match="needs the zaya package"):
        Stock.from_pretrained(tmp_path)


@torch.no_grad()
def test_experts_implementation_for_the_stock_class(tmp_path, monkeypatch):
    model = make()
    zaya.pin_skip_bias(model)
    model.save_pretrained(tmp_path)
    ids = tokens(model, 2, 32)
    plain, ours = Stock.from_pretrained(tmp_path), Stock.from_pretrained(tmp_path, experts_implementation="zaya")
    seen = []
    import zaya.kernels.experts as experts

    kernel = experts.moe
    monkeypatch.setattr(experts, "moe", lambda *a, **k: seen.append(a[3]) or kernel(*a, **k))
    torch.testing.assert_close(ours(ids).logits, plain(ids).logits, atol=1e-5, rtol=0)
    assert len(seen) == 3
    assert any((ids == 4).any() for ids in seen)  # skipped tokens get no rows
