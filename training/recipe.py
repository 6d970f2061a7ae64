"""The recipe: one YAML file that says everything about a release.

Importing this module needs neither torch nor transformers, so that a recipe can be checked in a moment. Every field is
documented by the string under it; keys that do not exist are refused with the nearest one that does.
"""

import difflib
from pathlib import Path
from typing import Annotated, Any, Literal, get_args

from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

from zaya import plainyaml
from zaya.errors import UserError

PositiveInt = Annotated[int, Field(ge=1, strict=True)]
Fraction = Annotated[float, Field(gt=0, lt=1)]
Rate = Annotated[float, Field(ge=0, lt=1)]
Positive = Annotated[float, Field(gt=0)]
NonNegative = Annotated[float, Field(ge=0)]


class Section(BaseModel):
    """A part of a recipe: unknown keys and numbers that are not finite are refused.

    The string under a field is its documentation.
    """

    model_config = ConfigDict(extra="forbid", use_attribute_docstrings=True, frozen=True, allow_inf_nan=False)


class Corpus(Section):
    """Where the text comes from and how it is split."""

    sources: Annotated[list[str], Field(min_length=1)]
    """`python-stdlib` (sources of this Python), `pydoc-topics` (its language help), or paths and globs of text files,
    relative to the recipe."""
    heldout_fraction: Fraction = 0.05
    """Share of the files that is never trained on; whole files, chosen by the seed and the file's name."""
    max_bytes: PositiveInt | None = None
    """Stop taking files, in a seeded order, when this many bytes of text are reached; unset takes all."""


class Tokenizer(Section):
    """The byte-level BPE tokenizer that is trained on the training files."""

    vocab_size: Annotated[int, Field(ge=300, le=1 << 24, strict=True)] = 4096
    """Entries, with the 256 bytes and <pad>, <bos>, <eos>."""


class Model(Section):
    """Fields of ZayaConfig; what is left out is as in ZAYA1-8B."""

    vocab_size: PositiveInt | None = None
    """Rows of the embedding; unset takes the tokenizer's."""
    hidden_size: PositiveInt = 2048
    """Width of the residual stream, D."""
    num_hidden_layers: PositiveInt = 40
    """Layers, each attention and mixture of experts."""
    num_attention_heads: PositiveInt = 8
    """Query heads, H."""
    num_key_value_heads: PositiveInt = 2
    """Key and value heads, G; divides the query heads."""
    head_dim: PositiveInt = 128
    """Channels per head, d."""
    moe_intermediate_size: PositiveInt = 2048
    """Inner width of one expert, F."""
    num_experts: PositiveInt = 16
    """Experts, E, not counting the skip class."""
    router_hidden_size: PositiveInt = 256
    """Width of the router, R."""
    cca_time0: PositiveInt = 2
    """Kernel of the depthwise convolution over queries and keys, tokens."""
    cca_time1: PositiveInt = 2
    """Kernel of the grouped convolution over queries and keys, tokens."""
    max_position_embeddings: PositiveInt = 131072
    """Longest sequence that the exported config allows, tokens."""
    rope_theta: Positive = 5e6
    """Base of the rotary embedding of layers with full attention."""
    partial_rotary_factor: Annotated[float, Field(gt=0, le=1)] = 0.5
    """Share of each head's channels that is rotated."""
    layer_types: list[Literal["hybrid", "hybrid_sliding"]] | None = None
    """Kind of attention per layer; unset is full attention (`hybrid`) everywhere."""
    sliding_window: PositiveInt | None = None
    """Window of `hybrid_sliding` layers, tokens, the current one included."""
    rms_norm_eps: Positive = 1e-5
    """Added to the mean square in RMSNorm."""
    initializer_range: Positive = 0.02
    """Standard deviation of initial weights."""
    tie_word_embeddings: bool = True
    """The head is the embedding."""

    @model_validator(mode="after")
    def _consistent(self) -> "Model":
        if self.num_attention_heads % self.num_key_value_heads:
            raise ValueError("num_attention_heads must be a multiple of num_key_value_heads")
        if self.num_key_value_heads * self.head_dim % 2:
            raise ValueError("num_key_value_heads x head_dim must be even: half the value is the token before")
        rotated = self.head_dim * self.partial_rotary_factor
        if rotated < 2 or rotated % 2:
            raise ValueError(f"head_dim x partial_rotary_factor is {rotated:g}; it must be an even number of channels")
        if self.layer_types is not None and len(self.layer_types) != self.num_hidden_layers:
            raise ValueError(f"layer_types needs num_hidden_layers = {self.num_hidden_layers} entries")
        if "hybrid_sliding" in (self.layer_types or []) and self.sliding_window is None:
            raise ValueError("sliding_window must be set where layer_types has hybrid_sliding")
        return self


class Baseline(Section):
    """A dense model of another architecture, trained on the same tokens by the same trainer."""

    architecture: Literal["qwen3"] = "qwen3"
    """Its transformers model type."""
    hidden_size: PositiveInt
    """Width of the residual stream."""
    intermediate_size: PositiveInt
    """Inner width of the MLP."""
    num_hidden_layers: PositiveInt
    """Layers."""
    num_attention_heads: PositiveInt
    """Query heads."""
    num_key_value_heads: PositiveInt
    """Key and value heads."""
    head_dim: PositiveInt
    """Channels per head."""
    rope_theta: Positive = 1e6
    """Base of the rotary embedding."""
    rms_norm_eps: Positive = 1e-6
    """Added to the mean square in RMSNorm."""
    active_parameters_tolerance: Fraction = 0.02
    """Largest relative difference of active parameters from the ZAYA model; training refuses more."""

    @model_validator(mode="after")
    def _consistent(self) -> "Baseline":
        if self.num_attention_heads % self.num_key_value_heads:
            raise ValueError("num_attention_heads must be a multiple of num_key_value_heads")
        if self.head_dim % 2:
            raise ValueError("head_dim must be even: all of its channels are rotated, in pairs")
        return self


class Schedule(Section):
    """Learning rate by step: linear warm-up, constant, linear decay to the last step."""

    warmup_steps: Annotated[int, Field(ge=0, strict=True)] = 20
    """Steps of linear warm-up."""
    decay_fraction: Annotated[float, Field(ge=0, le=1)] = 0.5
    """Share of all steps, at the end, over which the rate falls."""
    final_fraction: Annotated[float, Field(ge=0, le=1)] = 0.02
    """Rate at the last step as a share of the peak."""


class Muon(Section):
    """Muon, for matrices."""

    learning_rate: Positive = 0.01
    """Peak rate; scaled by 0.2 sqrt(max(rows, columns)), so that an update's RMS is like AdamW's."""
    momentum: Rate = 0.95
    """Nesterov momentum."""
    weight_decay: NonNegative = 0.01
    """Decoupled decay, times the rate."""
    ns_steps: Annotated[int, Field(ge=1, le=20, strict=True)] = 5
    """Newton-Schulz iterations."""
    ns_dtype: Literal["bfloat16", "float32"] = "bfloat16"
    """Precision of the Newton-Schulz products: bfloat16 as in torch, or float32 for processors without it."""


class AdamW(Section):
    """AdamW, for everything that is not a matrix, and for the embedding."""

    learning_rate: Positive = 3e-3
    """Peak rate."""
    beta1: Rate = 0.9
    """Decay of the mean of gradients."""
    beta2: Rate = 0.95
    """Decay of the mean of squared gradients."""
    eps: Positive = 1e-8
    """Added to the root of the mean of squares."""
    weight_decay: NonNegative = 0.0
    """Decoupled decay, times the rate."""


class Balance(Section):
    """The update of the router's balancing biases, once per step from the whole batch's expert counts."""

    learning_rate: NonNegative = 1e-3
    """Rate of the bias update; not scheduled. 0 leaves the biases as they start."""
    beta1: Rate = 0.9
    """Decay of the mean of load errors."""
    beta2: Rate = 0.999
    """Decay of the mean of squared load errors."""
    eps: Positive = 1e-8
    """Added to the root of the mean of squares."""
    initial_skip_bias: float = -1.0
    """Where the skip class's bias starts. -1, as in ZAYA1, keeps skipping out until the update has raised it by
    nearly 1, about 1 / learning_rate steps: short runs start nearer to 0."""
    skip_target: Rate | None = None
    """Share of tokens that the skip class is steered to; the experts share the rest evenly. Unset treats it like one
    more expert: 1 / (num_experts + 1)."""


class Train(Section):
    """How both arms are trained."""

    steps: PositiveInt
    """Optimizer steps."""
    sequence_length: Annotated[int, Field(ge=2, strict=True)] = 256
    """Tokens per sequence."""
    batch_sequences: PositiveInt = 8
    """Sequences per step, over all ranks."""
    microbatch_sequences: PositiveInt | None = None
    """Sequences per forward pass of a rank; unset takes its whole share of the batch at once."""
    ranks: PositiveInt = 1
    """Processes that `zaya train` starts. Under torchrun or accelerate launch their number must be this."""
    threads_per_rank: Annotated[int, Field(ge=1, le=1024, strict=True)] = 1
    """Threads of each process."""
    precision: Literal["float32", "bfloat16"] = "float32"
    """Precision of the model's products; weights and optimizer state are float32."""
    schedule: Schedule = Field(default_factory=Schedule)
    """Learning rate by step."""
    muon: Muon = Field(default_factory=Muon)
    """For matrices."""
    adamw: AdamW = Field(default_factory=AdamW)
    """For the rest."""
    balance: Balance = Field(default_factory=Balance)
    """For the balancing biases."""
    clip_norm: Positive = 1.0
    """Largest norm of the whole gradient."""
    checkpoint_every: PositiveInt = 100
    """Steps between checkpoints; the first and the last step always have one."""
    keep: PositiveInt = 2
    """Newest checkpoints kept, beside the untrained model's."""
    log_every: PositiveInt = 10
    """Steps between lines of the log."""
    heldout_every: PositiveInt = 100
    """Steps between held-out losses; the last step always has one."""
    heldout_tokens: PositiveInt = 51200
    """Held-out tokens scored each time, spread evenly over the held-out text."""

    @model_validator(mode="after")
    def _consistent(self) -> "Train":
        if self.batch_sequences % self.ranks:
            raise ValueError("batch_sequences must be a multiple of ranks")
        share = self.batch_sequences // self.ranks
        if self.microbatch_sequences is not None and share % self.microbatch_sequences:
            raise ValueError(f"microbatch_sequences must divide batch_sequences / ranks = {share}")
        if self.schedule.warmup_steps + self.schedule.decay_fraction * self.steps > self.steps:
            raise ValueError("schedule: warm-up and decay together are longer than steps")
        return self


class Bench(Section):
    """Training throughput beside a plain loop over stock's class."""

    seconds: Positive = 10.0
    """Time of each of the four turns: ours, the plain loop, and both again."""


class Export(Section):
    """The Hugging Face folders."""

    dtype: Literal["float32", "bfloat16"] = "float32"
    """Type of the weights on disk."""


class Verify(Section):
    """Comparison of the exported folder with stock transformers."""

    atol: Positive = 1e-4
    """Largest absolute difference of logits, fp32."""
    prompts: PositiveInt = 8
    """Prompts from held-out text."""
    new_tokens: PositiveInt = 32
    """Tokens generated greedily for each."""


class Serve(Section):
    """The vLLM server: parity, then load."""

    concurrency: Annotated[list[PositiveInt], Field(min_length=1)] = [1, 4]
    """Requests in flight, one measurement each."""
    num_prompts: PositiveInt = 32
    """Requests per measurement."""
    input_len: PositiveInt = 128
    """Tokens per prompt."""
    output_len: PositiveInt = 32
    """Tokens generated per request."""
    parity_prompts: PositiveInt = 8
    """Prompts whose greedy tokens and log-probabilities are compared with transformers."""

    @model_validator(mode="after")
    def _consistent(self) -> "Serve":
        if len(set(self.concurrency)) != len(self.concurrency):
            raise ValueError(f"concurrency {self.concurrency}: use different numbers")
        return self


class Score(Section):
    """lm-eval."""

    suite: str = "demo"
    """Name of the suite of tasks."""
    limit: PositiveInt | None = 100
    """Items per task; unset takes all."""


class Board(Section):
    """The result page."""

    title: str = "ZAYA"
    """Heading of the page."""


class Recipe(Section):
    """One release."""

    name: Annotated[str, Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]*$")]
    """Name of the release: letters, digits, dot, dash and underscore."""
    seed: Annotated[int, Field(ge=0, lt=1 << 63, strict=True)] = 0
    """Seed of the split, the initial weights and the order of data."""
    out: str | None = None
    """Folder of everything that the release writes, relative to where the command runs; unset is runs/<name>."""
    corpus: Corpus
    """Text."""
    tokenizer: Tokenizer = Field(default_factory=Tokenizer)
    """Tokenizer."""
    model: Model = Field(default_factory=Model)
    """Our model."""
    baseline: Baseline | None = None
    """The model to compare with; unset trains none."""
    train: Train
    """Training."""
    bench: Bench = Field(default_factory=Bench)
    """Training throughput."""
    export: Export = Field(default_factory=Export)
    """Export."""
    verify: Verify = Field(default_factory=Verify)
    """Verification."""
    serve: Serve = Field(default_factory=Serve)
    """Serving."""
    score: Score = Field(default_factory=Score)
    """Scores."""
    board: Board = Field(default_factory=Board)
    """Result page."""

    @model_validator(mode="after")
    def _consistent(self) -> "Recipe":
        if self.model.vocab_size not in (None, self.tokenizer.vocab_size):
            raise ValueError(
                f"model.vocab_size {self.model.vocab_size} and tokenizer.vocab_size {self.tokenizer.vocab_size} "
                "do not match; leave model.vocab_size out"
            )
        if self.train.sequence_length > self.model.max_position_embeddings:
            raise ValueError("train.sequence_length is longer than model.max_position_embeddings")
        return self

    @property
    def out_dir(self) -> Path:
        """Folder of everything that the release writes."""
        return Path(self.out or f"runs/{self.name}")


def load_recipe(path: str | Path, overrides: list[str] | tuple[str, ...] = ()) -> Recipe:
    """Read a recipe and apply `key=value` overrides, whose keys are dotted paths and whose values are YAML.

    Relative corpus paths become relative to the recipe's folder. Raises UserError, in one line, for a missing file,
    YAML that does not parse, an unknown key (with the nearest known one) and a value that does not fit.
    """
    path = Path(path)
    values = plainyaml.read(path, "recipe", "training/recipes/demo.yaml")
    for override in overrides:
        _apply_override(values, override)
    try:
        recipe = Recipe.model_validate(values)
    except ValidationError as e:
        raise UserError(f"{path}: {explain(e)}") from None
    return recipe.model_copy(update={"corpus": _resolve_sources(recipe.corpus, path.parent)})


def explain(error: ValidationError) -> str:
    """The first error of a validation in one line: which key, what is wrong, the nearest known key.

    An unknown key goes first: it is often the misspelling of one that is then missing.
    """
    first = min(error.errors(), key=lambda e: e["type"] != "extra_forbidden")
    where = ".".join(str(x) for x in first["loc"])
    if first["type"] == "extra_forbidden":
        known = _fields_at(first["loc"][:-1])
        near = difflib.get_close_matches(str(first["loc"][-1]), known, n=1, cutoff=0.4)
        hint = f"did you mean {near[0]}?" if near else f"known keys: {', '.join(known)}"
        return f"unknown key {where}; {hint}"
    message = first["msg"].removeprefix("Value error, ")
    if first["type"] == "missing":
        return f"{where} is missing; add it"
    shown = not isinstance(first["input"], dict) and first["type"] != "value_error"
    got = f" (got {first['input']!r:.80})" if shown else ""
    return f"{where}: {message}{got}" if where else f"{message}{got}"


def _fields_at(location: tuple[int | str, ...]) -> list[str]:
    """Known keys of the section at `location`."""
    section: type[BaseModel] = Recipe
    for part in location:
        annotation = section.model_fields[str(part)].annotation
        options = [a for a in (annotation, *get_args(annotation)) if isinstance(a, type) and issubclass(a, BaseModel)]
        section = options[0]
    return list(section.model_fields)


def _apply_override(values: dict[str, Any], override: str) -> None:
    key, equals, text = override.partition("=")
    if not equals or not key:
        raise UserError(f"override {override!r} is not key=value; for example train.steps=100")
    *parents, last = key.split(".")
    at = values
    for parent in parents:
        if at.get(parent) is None:
            at[parent] = {}
        at = at[parent]
        if not isinstance(at, dict):
            raise UserError(f"override {override!r}: {parent} holds a value, not keys")
    try:
        at[last] = plainyaml.parse(text)
    except UserError:
        raise UserError(f"override {override!r}: the value is not valid YAML; quote it") from None


def _resolve_sources(corpus: Corpus, folder: Path) -> Corpus:
    named = ("python-stdlib", "pydoc-topics")
    sources = [s if s in named else str(folder / Path(s).expanduser()) for s in corpus.sources]
    return corpus.model_copy(update={"sources": sources})
