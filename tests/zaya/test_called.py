"""Modules that are not what they look like: adapters, quantisers, offloading, FSDP, hooks and parametrisations.

Each of them works when the module is called; a fused op that read its weights would pass it by.
"""

import copy
import socket
import warnings

import peft
import pytest
import torch
from accelerate import cpu_offload
from torch import nn
from torch.nn.utils import parametrize, prune

import zaya
from tests.zaya.support import make, tokens
from zaya.plain import plain

READ = [  # what a fused op may take the weights of
    "self_attn.qkv_proj.q_proj",
    "self_attn.qkv_proj.v_proj_delayed",
    "self_attn.qkv_proj.conv_qk_depthwise",
    "self_attn.qkv_proj.conv_qk_grouped",
    "self_attn.qk_norm",
    "self_attn.o_proj",
    "input_layernorm",
    "post_attention_residual_scale",
    "mlp.gate.down_proj",
    "mlp.gate.router_mlp.norm",
    "mlp.gate.router_mlp.fc1",
    "mlp.gate.router_mlp.fc2",
    "mlp.gate.router_mlp.out_proj",
]
PACKED = torch.tensor([[*range(9), *range(3), *range(8)]] * 2)


@pytest.fixture
def model():
    return make()


def logits(model, packed=False, **kwargs):
    with torch.no_grad():
        return model(tokens(model, 2, 20), position_ids=PACKED if packed else None, **kwargs).logits


def child(model, name: str) -> nn.Module:
    return model.model.layers[1].get_submodule(name)


@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("name", READ)
def test_a_hook_is_heard(model, name, packed):
    before = logits(model, packed)
    handle = child(model, name).register_forward_hook(
        lambda m, args, out: tuple(o * 1.5 for o in out) if isinstance(out, tuple) else out * 1.5
    )
    assert (logits(model, packed) - before).abs().max() > 1e-5
    handle.remove()
    torch.testing.assert_close(logits(model, packed), before, atol=0, rtol=0)


@pytest.mark.parametrize("packed", [False, True])
def test_called_modules_compute_what_their_weights_say(model, packed):
    """Hooks that change nothing: every op takes the way of calling, and the numbers stay."""
    before, ids = logits(model, packed), tokens(model, 1, 9)
    generated = model.generate(ids, max_new_tokens=8, do_sample=False)
    for module in model.modules():
        if isinstance(module, nn.Linear | nn.Conv1d) or not list(module.children()):
            module.register_forward_hook(lambda m, args, out: None)
    assert not plain(child(model, "self_attn.qkv_proj.conv_qk_grouped"))
    torch.testing.assert_close(logits(model, packed), before, atol=2e-6, rtol=0)
    assert torch.equal(model.generate(ids, max_new_tokens=8, do_sample=False), generated)


class Replaced(nn.Module):
    """A Linear or convolution as weight quantisers leave it: another class, `weight` no parameter of that shape."""

    def __init__(self, inner: nn.Module):
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(1, dtype=torch.uint8), requires_grad=False)
        self.bias = inner.bias
        object.__setattr__(self, "inner", inner)

    def forward(self, x):
        return self.inner(x)


@pytest.mark.parametrize("base", [nn.Linear, nn.Conv1d])
def test_replaced_modules_are_called(model, base):
    before = logits(model, packed=True)
    for parent in list(model.model.modules()):
        for name, module in list(parent.named_children()):
            if type(module) is base:
                setattr(parent, name, Replaced(module))
    torch.testing.assert_close(logits(model, packed=True), before, atol=2e-6, rtol=0)


def test_dynamic_quantisation_moves_the_logits_a_little(model):
    before = logits(model)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        quantised = torch.ao.quantization.quantize_dynamic(model, {nn.Linear}, dtype=torch.qint8)
    moved = (logits(quantised) - before).abs().max() / before.abs().max()
    assert 1e-6 < moved < 0.5


@pytest.mark.parametrize("where", ["cpu", "disk"])
def test_offload_gives_the_same_logits(model, tmp_path, where):
    model.save_pretrained(tmp_path / "model")
    before = logits(model)
    if where == "cpu":
        offloaded = cpu_offload(copy.deepcopy(model), execution_device=torch.device("cpu"))
    else:
        kept = ("model.embed_tokens", "model.norm", "model.rotary_emb", "model.layers.0", "lm_head")
        kept += ("model.input_hidden_states_scale", "model.input_hidden_states_bias")
        places = dict.fromkeys(kept, "cpu") | {"model.layers.1": where, "model.layers.2": where}
        options = {"device_map": places, "offload_folder": tmp_path / "offload"}
        offloaded = zaya.ZayaForCausalLM.from_pretrained(tmp_path / "model", **options)
        assert any(p.is_meta for p in offloaded.parameters())
    torch.testing.assert_close(logits(offloaded.eval()), before, atol=2e-6, rtol=0)


def test_pruning_and_parametrisation_are_seen(model):
    before, ids = logits(model), tokens(model, 2, 20)
    other = copy.deepcopy(model)
    prune.random_unstructured(child(other, "mlp.gate.router_mlp.fc1"), "weight", amount=0.5)
    assert (logits(other) - before).abs().max() > 1e-5
    prune.remove(child(other, "mlp.gate.router_mlp.fc1"), "weight")
    assert plain(child(other, "mlp.gate.router_mlp.fc1"))

    class Half(nn.Module):
        def forward(self, x):
            return x / 2

    for name in (
        "self_attn.qkv_proj.conv_qk_grouped",
        "self_attn.qkv_proj.conv_qk_depthwise",
        "mlp.gate.router_mlp.fc2",
    ):
        other, plainly = copy.deepcopy(model), copy.deepcopy(model)
        parametrize.register_parametrization(child(other, name), "weight", Half())
        child(plainly, name).weight.data /= 2
        torch.testing.assert_close(logits(other), logits(plainly), atol=2e-6, rtol=0)
        other.train()(ids, labels=ids).loss.backward()
        assert child(other, name).parametrizations.weight.original.grad.abs().max() > 0


TARGETS = ["fc1", "fc2", "out_proj", "down_proj", "q_proj", "v_proj_delayed", "conv_qk_depthwise", "conv_qk_grouped"]


def test_an_adapter_on_every_module_trains_and_travels(model, tmp_path):
    before, ids = logits(model, packed=True), tokens(model, 2, 20)
    model.save_pretrained(tmp_path / "base")
    targets = [
        n for n, m in model.named_modules() if n.rpartition(".")[2] in TARGETS and isinstance(m, nn.Linear | nn.Conv1d)
    ]
    # a convolution with groups takes adapters whose rank its groups divide
    ranks = {n: model.get_submodule(n).groups for n in targets if "conv" in n}
    config = peft.LoraConfig(r=4, target_modules=targets, rank_pattern=ranks, init_lora_weights=True)
    adapted = peft.get_peft_model(model, config).train()
    optimizer = torch.optim.SGD([p for p in adapted.parameters() if p.requires_grad], lr=0.5)
    for _ in range(2):  # the first step moves B alone: A's gradient is zero while B is
        optimizer.zero_grad()
        adapted(ids, labels=ids, position_ids=PACKED).loss.backward()
        optimizer.step()
    still = [n for n, p in adapted.named_parameters() if p.requires_grad and not p.grad.abs().max() > 0]
    assert not still
    after = logits(adapted.eval(), packed=True)
    assert (after - before).abs().max() > 1e-4
    adapted.save_pretrained(tmp_path / "adapter")
    again = peft.PeftModel.from_pretrained(
        zaya.ZayaForCausalLM.from_pretrained(tmp_path / "base"), tmp_path / "adapter"
    )
    torch.testing.assert_close(logits(again.eval(), packed=True), after, atol=2e-6, rtol=0)


def test_a_head_with_an_adapter_is_called_for_the_loss(model):
    ids = tokens(model, 2, 20)
    adapted = peft.get_peft_model(model, peft.LoraConfig(r=4, target_modules=["lm_head"], init_lora_weights=False))
    with torch.no_grad():
        whole, without = (adapted(ids, labels=ids, skip_logits=skip) for skip in (False, True))
    assert without.logits is None
    torch.testing.assert_close(without.loss, whole.loss)


def test_fsdp_around_each_child(model):
    """FSDP2 gathers a child's weights while it is called, and only then."""
    before = logits(model)
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        port = s.getsockname()[1]
    torch.distributed.init_process_group("gloo", init_method=f"tcp://127.0.0.1:{port}", rank=0, world_size=1)
    try:
        from torch.distributed.device_mesh import init_device_mesh
        from torch.distributed.fsdp import fully_shard

        mesh = init_device_mesh("cpu", (1,))
        for layer in model.model.layers:
            for name in READ:
                fully_shard(layer.get_submodule(name), mesh=mesh)
            fully_shard(layer, mesh=mesh)
        fully_shard(model, mesh=mesh)
        torch.testing.assert_close(logits(model), before, atol=2e-6, rtol=0)
        ids = tokens(model, 2, 20)
        model.train()(ids, labels=ids).loss.backward()
        assert all(child(model, n).weight.grad is not None for n in READ if "proj" in n)
    finally:
        torch.distributed.destroy_process_group()


def test_the_plain_case_stays_fused(model, monkeypatch):
    assert all(plain(child(model, n)) for n in READ)
    monkeypatch.setattr("zaya.modeling_zaya.convolve_called", lambda *a: pytest.fail("called"))
    monkeypatch.setattr("zaya.modeling_zaya.choose", lambda *a: pytest.fail("called"))
    logits(model)
