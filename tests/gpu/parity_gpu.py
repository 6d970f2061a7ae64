"""bf16 at the true 8B shape on a GPU: ours and stock against fp32, and the whole model side by side.

    python -m tests.gpu.parity_gpu OUT.jsonl [--tiny]

Prints and writes one JSON line per figure. Per layer, both implementations get the fp32 reference's input; the error
of the experts is measured with the routing forced to the fp32 choice, and the share of tokens that chose otherwise is
reported apart. `--tiny` runs everything at a small shape, on a CPU too, to check the script.
"""

import argparse
import gc
import json
import time

import torch
from transformers import StaticCache, __version__
from transformers.cache_utils import DynamicCache
from transformers.models.zaya import ZayaConfig as StockConfig
from transformers.models.zaya import ZayaForCausalLM as Stock

import zaya
from zaya.masking import Layout
from zaya.modeling_zaya import ZayaDecoderLayer, ZayaRotaryEmbedding

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


class Report:
    """Prints JSON lines and keeps them in a file."""

    def __init__(self, path: str):
        self.file = open(path, "w")  # noqa: SIM115

    def __call__(self, **row):
        line = json.dumps({k: round(v, 8) if isinstance(v, float) else v for k, v in row.items()})
        print(line, flush=True)
        self.file.write(line + "\n")
        self.file.flush()


def spread_(module, seed: int) -> None:
    """Random weights that send tokens to every expert and to the skip class."""
    generator = torch.Generator(DEVICE).manual_seed(seed)
    for name, p in module.named_parameters():
        if name.endswith(("norm.weight", "layernorm.weight", "scale", "temp")):
            p.data.normal_(1.0, 0.1, generator=generator)
        elif name.endswith("bias"):
            p.data.normal_(0.0, 0.02, generator=generator)
        else:
            p.data.normal_(0.0, p.shape[-1] ** -0.5, generator=generator)
        if name.endswith("gate.router_mlp.out_proj.weight"):
            p.data.mul_(6.0)
    for name, buffer in module.named_buffers():
        if name.endswith("balancing_biases"):
            buffer.zero_()


def relative(x, ref) -> float:
    return ((x.float() - ref.float()).norm() / ref.float().norm()).item()


def stock_attention(layer, h, rope, length):
    cos, sin = (torch.cat([x, x], dim=-1).to(h.dtype) for x in rope)
    return layer.self_attn(hidden_states=h, attention_mask={}, position_embeddings=(cos, sin))[0]


def layer_rows(config, report, length, layers):
    """One row per layer: relative errors of attention, router state and forced experts, and the share of flips."""
    rope = ZayaRotaryEmbedding(config).to(DEVICE)(torch.arange(length, device=DEVICE)[None], "hybrid")
    layout = Layout({"hybrid": None}, None, None, {})
    from transformers.models.zaya.modeling_zaya import ZayaDecoderLayer as StockLayer

    stock_config = StockConfig(**{**config.to_dict(), "_attn_implementation": "sdpa"})
    stock_config._attn_implementation, stock_config._experts_implementation = "sdpa", "grouped_mm"
    residual = torch.randn(1, length, config.hidden_size, device=DEVICE)
    state = None
    for index in range(layers):
        with torch.device(DEVICE):
            wide = ZayaDecoderLayer(config, index).eval()
            ours = ZayaDecoderLayer(config, index).eval()
            stock = StockLayer(stock_config, index).eval()
        spread_(wide, index)
        wide.load_state_dict({k: v.bfloat16().to(v.dtype) for k, v in wide.state_dict().items()})
        ours.bfloat16().load_state_dict(wide.state_dict())
        stock.bfloat16().load_state_dict(wide.state_dict())
        stock.mlp.gate.balancing_biases.data = wide.mlp.gate.balancing_biases.clone()
        config.kernels = "reference"
        ref = reference_layer(wide, residual, state, layout, rope)
        config.kernels = "auto"
        low = None if state is None else state.bfloat16()
        row = {
            "what": "layer",
            "layer": index,
            "tokens": length,
            "skipped": (ref["ids"] == config.num_experts).sum().item(),
        }
        row["experts_used"] = ref["ids"].unique().numel()
        row |= {f"ours_{k}": v for k, v in our_errors(ours, ref, residual, low, layout, rope).items()}
        row |= {f"stock_{k}": v for k, v in stock_errors(stock, ref, residual, low, rope, length).items()}
        report(**row)
        residual, state = ref["out"], ref["state"]
        del wide, ours, stock
        gc.collect()


def reference_layer(layer, residual, state, layout, rope):
    """fp32 through our reference path, which the fp32 parity table holds against stock."""
    ref = {}
    ref["a"], _ = layer.self_attn(layer.input_layernorm(residual), layout, rope)
    ref["mid"] = layer.post_attention_residual_scale(ref["a"], residual)
    ref["h"] = layer.post_attention_layernorm(ref["mid"])
    ref["m"], routing = layer.mlp(ref["h"], state)
    ref["ids"], ref["state"] = routing.expert_ids, routing.state
    ref["out"] = layer.post_mlp_residual_scale(ref["m"], ref["mid"])
    return ref


def our_errors(layer, ref, residual, state, layout, rope):
    a, _ = layer.self_attn(layer.input_layernorm(residual), layout, rope)
    h = layer.post_attention_layernorm(ref["mid"]).flatten(0, 1)
    own = layer.mlp.gate(h, state)
    logits = layer.mlp.gate(h, state, keep_logits=True).logits
    weights = logits.softmax(-1).gather(1, ref["ids"][:, None]).squeeze(1)
    m = layer.mlp.experts(h, ref["ids"], weights)
    return errors(a, own.state, m, own.expert_ids, ref)


def stock_errors(layer, ref, residual, state, rope, length):
    a = stock_attention(layer, layer.input_layernorm(residual.bfloat16()), rope, length)
    h = layer.post_attention_layernorm(ref["mid"].bfloat16())
    gate = layer.mlp.gate
    logits, probs, ids, new_state = gate(h, None if state is None else state[None])
    ids = torch.where(probs[:, 0] == 0, gate.num_experts, ids[:, 0])
    skip = ref["ids"] == gate.num_experts
    weights = torch.softmax(logits, -1).gather(1, ref["ids"][:, None]).masked_fill(skip[:, None], 0)
    m = layer.mlp.experts(h.flatten(0, 1), ref["ids"].masked_fill(skip, 0)[:, None], weights)
    return errors(a, new_state, m, ids, ref)


def errors(a, state, m, ids, ref):
    return {
        "attention": relative(a, ref["a"]),
        "state": relative(state.reshape(ref["state"].shape), ref["state"]),
        "experts_forced": relative(m.reshape(ref["m"].shape), ref["m"]),
        "flipped_share": (ids != ref["ids"]).float().mean().item(),
    }


def synchronised_ms(f, repeats=1):
    if DEVICE == "cuda":
        torch.cuda.synchronize()
    start = time.perf_counter()
    for _ in range(repeats):
        out = f()
    if DEVICE == "cuda":
        torch.cuda.synchronize()
    return (time.perf_counter() - start) * 1e3 / repeats, out


def peak_gb():
    return torch.cuda.max_memory_allocated() / 1e9 if DEVICE == "cuda" else float("nan")


def whole_model(config, report, batches, steps):
    """Forward and cached decode of the whole model, ours and stock on the same weight tensors."""
    torch.set_default_dtype(torch.bfloat16)
    with torch.device("meta"):
        ours = zaya.ZayaForCausalLM(config).eval()
    ours.to_empty(device=DEVICE)
    for module in ours.modules():
        if isinstance(module, ZayaRotaryEmbedding):
            for layer_type in module.scaling:
                setattr(module, f"{layer_type}_inv_freq", module.frequencies(layer_type)[0].to(DEVICE))
    spread_(ours, 0)
    ours.tie_weights()
    stock_config = StockConfig(**config.to_dict())
    with torch.device(DEVICE):
        stock = Stock._from_config(stock_config, dtype=torch.bfloat16).eval()
    stock.load_state_dict(ours.state_dict(), assign=True)
    stock.tie_weights()
    torch.set_default_dtype(torch.float32)
    gc.collect()
    if DEVICE == "cuda":
        torch.cuda.empty_cache()
    for batch, prompt in batches:
        ids = torch.randint(0, config.vocab_size, (batch, prompt), device=DEVICE)
        for name, model, cache in (
            ("stock", stock, lambda: DynamicCache(config=stock_config)),
            ("ours", ours, lambda: zaya.ZayaCache(config)),
            ("ours static", ours, lambda n=prompt: StaticCache(config=config, max_cache_len=n + steps + 8)),
        ):
            model_rows(report, name, model, ids, cache, steps)
        if DEVICE == "cuda":
            graph_row(report, ours, ids, StaticCache(config=config, max_cache_len=prompt + steps + 8), steps)


def model_rows(report, name, model, ids, make_cache, steps):
    if DEVICE == "cuda":
        torch.cuda.reset_peak_memory_stats()
    for _ in range(2):  # the first compiles kernels
        cache = make_cache()
        prefill, out = synchronised_ms(lambda c=cache: model(ids, past_key_values=c, use_cache=True, logits_to_keep=1))
    nxt, chosen = out.logits[:, -1].argmax(-1, keepdim=True), []

    def step():
        nonlocal nxt
        nxt = model(nxt, past_key_values=cache, use_cache=True).logits[:, -1].argmax(-1, keepdim=True)
        chosen.append(nxt)

    step()
    decode, _ = synchronised_ms(step, steps)
    report(
        what="model",
        implementation=name,
        batch=ids.shape[0],
        prompt_tokens=ids.shape[1],
        prefill_ms=prefill,
        decode_ms_per_token=decode,
        peak_gb=peak_gb(),
        first_tokens=torch.cat(chosen, 1)[0, :8].tolist(),
    )


def graph_row(report, model, ids, cache, steps):
    """Decode with one step captured as a CUDA graph: what the model costs without Python's launches."""
    row = {
        "what": "model",
        "implementation": "ours static, CUDA graph",
        "batch": ids.shape[0],
        "prompt_tokens": ids.shape[1],
    }
    nxt = model(ids, past_key_values=cache, use_cache=True, logits_to_keep=1).logits[:, -1].argmax(-1, keepdim=True)
    chosen = []

    def step():
        nxt.copy_(model(nxt, past_key_values=cache, use_cache=True).logits[:, -1].argmax(-1, keepdim=True))

    try:
        step()
        chosen.append(nxt.clone())
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            step()
        for _ in range(2):
            graph.replay()
            chosen.append(nxt.clone())
        row["decode_ms_per_token"], _ = synchronised_ms(graph.replay, steps)
        row["first_tokens"] = torch.cat(chosen, 1)[0].tolist()
    except RuntimeError as e:
        row["failed"] = str(e).splitlines()[0]
    report(**row, peak_gb=peak_gb())


@torch.no_grad()
def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", help="JSON lines are written here")
    parser.add_argument("--tiny", action="store_true", help="a small shape, to check the script")
    args = parser.parse_args()
    report = Report(args.out)
    torch.backends.cuda.matmul.allow_tf32 = False
    torch.manual_seed(0)
    config = zaya.ZayaConfig.tiny() if args.tiny else zaya.ZayaConfig.zaya1_8b()
    config._attn_implementation = "sdpa"
    device = torch.cuda.get_device_name() if DEVICE == "cuda" else "cpu"
    report(what="versions", torch=torch.__version__, transformers=__version__, device=device)
    layer_rows(config, report, 64 if args.tiny else 2048, 3 if args.tiny else 4)
    batches = [(1, 16), (3, 16)] if args.tiny else [(1, 512), (16, 512)]
    whole_model(config, report, batches, 4 if args.tiny else 24)


if __name__ == "__main__":
    main()
