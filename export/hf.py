"""Checkpoint to a Hugging Face folder that stock transformers and vLLM load as it is."""

import json
from pathlib import Path

import torch
from transformers.utils.logging import disable_progress_bar

from zaya.errors import CheckFailed, UserError
from zaya.files import check_target, require_free_space, stage_dir
from zaya.training.checkpoint.reader import Checkpoint, open_checkpoint

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}


def build_model(checkpoint: Checkpoint):
    """The model that a checkpoint holds, on the CPU, fp32, in eval mode.

    Raises CheckFailed when the checkpoint's tensors are not exactly the model's.
    """
    from transformers import MODEL_FOR_CAUSAL_LM_MAPPING

    import zaya  # noqa: F401  registers the class

    config = make_config(checkpoint.config)
    tensors = dict(checkpoint.tensors())
    model, info = MODEL_FOR_CAUSAL_LM_MAPPING[type(config)].from_pretrained(
        None, config=config, state_dict=tensors, output_loading_info=True
    )
    wrong = {k: sorted(map(str, v)) for k, v in info.items() if v}
    if wrong:
        raise CheckFailed(f"{checkpoint.path}: its tensors are not this model's: {wrong}")
    return model


def make_config(config: dict):
    """A transformers config from a checkpoint's dictionary."""
    from transformers import AutoConfig

    fields = {k: v for k, v in config.items() if k != "model_type"}
    return AutoConfig.for_model(config["model_type"], **fields)


def export_checkpoint(source: Path, out: Path, dtype: str = "float32") -> Path:
    """Write `source` (a checkpoint, or a run folder: its newest checkpoint) to the folder `out`.

    The folder holds safetensors, config, generation_config, tokenizer and a README. Balancing biases stay fp32; those
    of ZAYA are shifted so that the skip class has -1, which changes no choice (stock transformers resets that entry).
    Raises UserError for a source that is no checkpoint, an unknown dtype, or no disk space.
    """
    if dtype not in DTYPES:
        raise UserError(f"--dtype: {dtype!r} is not known; use one of {', '.join(DTYPES)}")
    disable_progress_bar()
    check_target(out, "export")
    checkpoint = open_checkpoint(source)
    if checkpoint.tokenizer is None:
        raise UserError(f"{checkpoint.path}: holds no tokenizer, which an export needs; train again with this version")
    require_free_space(out, int(checkpoint.weight_bytes() * 1.2) + 10_000_000, "the export")
    model = build_model(checkpoint)
    if checkpoint.config["model_type"] == "zaya":
        from zaya import pin_skip_bias

        pin_skip_bias(model)
    cast(model, DTYPES[dtype])
    check_tokenizer(checkpoint.tokenizer, model.config)
    set_generation(model)
    inputs = {"checkpoint": checkpoint.digest(), "dtype": dtype}
    with stage_dir(out, "export", inputs) as folder:
        model.save_pretrained(folder)
        copy_tokenizer(checkpoint.tokenizer, folder)
        (folder / "README.md").write_text(card(checkpoint, model, dtype), encoding="utf-8")
    return out


def cast(model, dtype: torch.dtype) -> None:
    """Cast parameters to `dtype`, keep buffers (balancing biases) as they are, and write the dtype in the config."""
    for p in model.parameters():
        p.data = p.data.to(dtype)
    model.config.dtype = dtype


def check_tokenizer(tokenizer: Path, config) -> None:
    """Raise CheckFailed when the tokenizer's ids and the config's do not go together."""
    from transformers import AutoTokenizer

    loaded = AutoTokenizer.from_pretrained(tokenizer)
    if len(loaded) > config.vocab_size:
        raise CheckFailed(
            f"{tokenizer}: the tokenizer has {len(loaded)} entries and the model's vocab_size is {config.vocab_size}"
        )
    for name in ("bos_token_id", "eos_token_id", "pad_token_id"):
        ours, theirs = getattr(config, name), getattr(loaded, name)
        if ours != theirs:
            raise CheckFailed(f"{tokenizer}: {name} is {theirs} in the tokenizer and {ours} in the model's config")


def set_generation(model) -> None:
    """Greedy by default, with the config's special tokens."""
    from transformers import GenerationConfig

    ids = {k: getattr(model.config, k) for k in ("bos_token_id", "eos_token_id", "pad_token_id")}
    model.generation_config = GenerationConfig(do_sample=False, **ids)


def copy_tokenizer(source: Path, folder: Path) -> None:
    """Copy the tokenizer's files byte for byte."""
    for file in sorted(source.iterdir()):
        if file.is_file():
            (folder / file.name).write_bytes(file.read_bytes())


def card(checkpoint: Checkpoint, model, dtype: str) -> str:
    """README of the exported folder: what it is, how it was made, how to load it."""
    total = sum(p.numel() for p in model.parameters())
    lines = [
        "---",
        "library_name: transformers",
        "pipeline_tag: text-generation",
        "---",
        f"# {checkpoint.config['model_type']}, {total / 1e6:.2f} M parameters",
        "",
        f"Exported from step {checkpoint.step} ({checkpoint.tokens:,} training tokens) as {dtype}.",
        "",
        "```python",
        "from transformers import AutoModelForCausalLM, AutoTokenizer",
        'model, tokenizer = (c.from_pretrained("PATH") for c in (AutoModelForCausalLM, AutoTokenizer))',
        "```",
        "",
    ]
    if checkpoint.config["model_type"] == "zaya":
        lines += [
            "Stock transformers (5.13 or newer) loads this folder with no remote code; `import zaya` first gives the",
            "faster class. vLLM needs the plugin that `pip install zaya` brings: without it vLLM starts, and answers",
            "wrongly.",
            "",
        ]
    lines += ["```json", json.dumps(checkpoint.config, indent=1, sort_keys=True, default=str), "```", ""]
    return "\n".join(lines)
