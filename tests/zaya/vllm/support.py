"""A small random ZAYA folder, and what stock transformers makes of it: the oracle of the vLLM tests."""

import os
from pathlib import Path

import torch
from safetensors.torch import load_file
from tokenizers import Tokenizer, models, pre_tokenizers
from tokenizers.decoders import ByteLevel
from tokenizers.processors import TemplateProcessing
from transformers import PreTrainedTokenizerFast
from transformers.models.zaya import ZayaForCausalLM as Stock

from zaya import ZayaConfig, ZayaForCausalLM

VOCABULARY = 259
SHAPE = {
    "vocab_size": VOCABULARY,
    "hidden_size": 128,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "moe_intermediate_size": 64,
    "num_experts": 4,
    "router_hidden_size": 32,
    "max_position_embeddings": 1024,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}


def save_tokenizer(folder: Path) -> None:
    """A tokenizer of bytes, with <bos> in front."""
    specials = ["<pad>", "<bos>", "<eos>"]
    names = specials + sorted(pre_tokenizers.ByteLevel.alphabet())
    core = Tokenizer(models.BPE(vocab={n: i for i, n in enumerate(names)}, merges=[]))
    core.add_special_tokens(specials)
    core.pre_tokenizer, core.decoder = pre_tokenizers.ByteLevel(add_prefix_space=False), ByteLevel()
    core.post_processor = TemplateProcessing(single="<bos> $A", special_tokens=[("<bos>", 1)])
    PreTrainedTokenizerFast(
        tokenizer_object=core, bos_token="<bos>", eos_token="<eos>", pad_token="<pad>"
    ).save_pretrained(folder)


@torch.no_grad()
def make_folder(folder: Path, seed: int = 0, **fields) -> Path:
    """Save a model whose every mechanism matters: weights large enough that greedy text does not loop at once, every
    class of every layer in use, norms, scales and biases away from their initial values."""
    torch.manual_seed(seed)
    model = ZayaForCausalLM(ZayaConfig(**(SHAPE | fields)))
    for name, p in model.named_parameters():
        if name.endswith("temp"):
            p.copy_(1 + 0.3 * torch.randn_like(p))
        elif p.ndim >= 2:
            fan_in = p[0].numel() if "conv" in name else p.shape[-1]
            # an embedding that is no output head may be large, and then the text does not loop
            loud = 12 if "embed" in name and not model.config.tie_word_embeddings else 1
            p.normal_(0, fan_in**-0.5 * (4 if "router_mlp.out_proj" in name else loud))
        else:
            p.add_(torch.randn_like(p) * (0.05 if name.endswith("bias") else 0.1))
    counts = balance(model, torch.tensor(prompts((150,))))
    assert (counts > 0).all(), counts
    model.save_pretrained(folder)
    save_tokenizer(folder)
    return folder


@torch.enable_grad()  # our class counts where it could be trained
def balance(model, ids: torch.Tensor) -> torch.Tensor:
    """Move the balancing biases until every class of every layer gets tokens of `ids`; tokens per layer and class."""
    model.train()
    for step in range(120):
        model(ids)
        counts = model.pop_expert_counts()
        if (counts >= 6).all():
            break
        for layer, row in zip(model.model.layers, counts, strict=True):
            layer.mlp.gate.balancing_biases -= 0.95**step * (row / row.sum() - 1 / len(row))
    return counts


@torch.no_grad()
def stock(folder: Path) -> Stock:
    """Stock transformers' model of the folder, with the skip biases that its loader resets put back."""
    model = Stock.from_pretrained(folder, dtype=torch.float32, attn_implementation="eager").eval()
    saved = load_file(folder / "model.safetensors")
    for i, layer in enumerate(model.model.layers):
        layer.mlp.gate.balancing_biases.copy_(saved[f"model.layers.{i}.mlp.gate.balancing_biases"])
    return model


@torch.no_grad()
def reference(model, prompt: list[int], new_tokens: int) -> tuple[list[int], list[float]]:
    """Greedy tokens after `prompt`, and the log-probability of every token but the first, prompt and continuation."""
    ids = torch.tensor([prompt])
    whole = model.generate(ids, max_new_tokens=new_tokens, min_new_tokens=new_tokens, do_sample=False)
    return whole[0, len(prompt) :].tolist(), score(model, whole[0].tolist())


@torch.no_grad()
def score(model, tokens: list[int]) -> list[float]:
    """Log-probability of every token but the first, from one pass over all of them."""
    ids = torch.tensor([tokens])
    logp = model(ids).logits[0, :-1].log_softmax(-1)
    return logp.gather(1, ids[0, 1:, None])[:, 0].tolist()


def engine(folder: Path, **options):
    """A vLLM engine inside this process, fp32."""
    os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
    os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", "1")
    os.environ["VLLM_NO_USAGE_STATS"] = "1"
    from vllm import LLM

    defaults = {"dtype": "float32", "max_model_len": 768, "max_num_seqs": 8, "enforce_eager": True, "seed": 0}
    return LLM(model=str(folder), **(defaults | options))


def prompts(lengths: tuple[int, ...], seed: int = 1) -> list[list[int]]:
    """Random token lists of these lengths."""
    generator = torch.Generator().manual_seed(seed)
    return [torch.randint(3, VOCABULARY, (n,), generator=generator).tolist() for n in lengths]


def close(llm) -> None:
    """End an engine, so that the process can make another."""
    from vllm.distributed import cleanup_dist_env_and_memory

    llm.llm_engine.engine_core.shutdown()
    cleanup_dist_env_and_memory()


def generate(llm, token_lists: list[list[int]], new_tokens: int, whole: bool = True):
    """For each prompt: greedy tokens, log-probabilities, and how many prompt tokens came from the prefix cache.

    whole: log-probabilities of the prompt too (but its first token); vLLM then does not read its prefix cache.
    """
    from vllm import SamplingParams

    scored = 0 if whole else None
    params = SamplingParams(temperature=0, max_tokens=new_tokens, ignore_eos=True, logprobs=0, prompt_logprobs=scored)
    return [unpack(o) for o in llm.generate([{"prompt_token_ids": p} for p in token_lists], params, use_tqdm=False)]


def unpack(output) -> tuple[list[int], list[float], int]:
    done = output.outputs[0]
    tokens = list(done.token_ids)
    entries = [*(output.prompt_logprobs or [])[1:], *done.logprobs]
    scored = [*output.prompt_token_ids, *tokens][-len(entries) :]
    return tokens, [e[t].logprob for e, t in zip(entries, scored, strict=True)], output.num_cached_tokens or 0
