"""Weights given to a running engine, as trainers by reinforcement do every step: it then answers as a fresh one does.

The first test is the control: stock vLLM with Qwen3 through the same call.
"""

import os
import shutil

import pytest
import torch

pytest.importorskip("vllm")
os.environ["HF_HUB_OFFLINE"] = "1"

from safetensors.torch import load_file, save_file
from transformers import Qwen3Config, Qwen3ForCausalLM

from tests.zaya.vllm import support
from zaya.errors import UserError

ATOL = 1e-5
PROMPTS = support.prompts((3, 40, 70))
OPTIONS = {"enable_prefix_caching": True, "max_num_batched_tokens": 160}
FIELDS = {"num_hidden_layers": 2, "attention_bias": True}
pytestmark = pytest.mark.timeout(600)


def answers(llm) -> list[tuple[list[int], list[float]]]:
    """Greedy tokens and every log-probability, with nothing left from other weights in the prefix cache."""
    assert llm.reset_prefix_cache()
    return [got[:2] for got in support.generate(llm, PROMPTS, 6)]


def apart(got, expected) -> float:
    """Largest difference of a log-probability, where all tokens are equal."""
    assert [tokens for tokens, _ in got] == [tokens for tokens, _ in expected]
    pairs = zip(got, expected, strict=True)
    return max(abs(x - y) for (_, a), (_, b) in pairs for x, y in zip(a, b, strict=True))


def from_transformers(model) -> list[tuple[list[int], list[float]]]:
    return [support.reference(model, prompt, 6) for prompt in PROMPTS]


def reload_weights(llm, weights: dict | None = None, **kwargs) -> None:
    if weights is not None:
        kwargs["weights_iterator"] = iter(weights.items())
    llm.collective_rpc("reload_weights", kwargs=kwargs)


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    """Two checkpoints of one architecture, embeddings tied."""
    root = tmp_path_factory.mktemp("reload")
    return [support.make_folder(root / str(seed), seed=seed, **FIELDS) for seed in (3, 4)]


@pytest.fixture(scope="module")
def fresh(folders):
    """What an engine started on each of the two answers."""
    found = []
    for folder in folders:
        llm = support.engine(folder, **OPTIONS)
        found.append(answers(llm))
        support.close(llm)
    assert found[0] != found[1]
    return found


@pytest.fixture(scope="module")
def llm(folders, fresh):
    llm = support.engine(folders[0], **OPTIONS)
    yield llm
    support.close(llm)


@pytest.fixture
def served(llm, folders):
    """The engine, with the first checkpoint's weights again."""
    reload_weights(llm, load_file(folders[0] / "model.safetensors"))
    return llm


@torch.no_grad()
def test_control_stock_qwen3(tmp_path):
    models = []
    for seed in range(2):
        torch.manual_seed(seed)
        shape = {k: v for k, v in support.SHAPE.items() if "expert" not in k and "router" not in k}
        shape |= {"intermediate_size": 64, "num_hidden_layers": 2, "tie_word_embeddings": False}
        model = Qwen3ForCausalLM(Qwen3Config(**shape)).eval()
        for p in model.parameters():
            p.normal_(0, p.shape[-1] ** -0.5) if p.ndim > 1 else p.add_(0.1 * torch.randn_like(p))
        model.save_pretrained(tmp_path / str(seed))
        support.save_tokenizer(tmp_path / str(seed))
        models.append(model)
    llm = support.engine(tmp_path / "0", **OPTIONS)
    try:
        assert apart(answers(llm), from_transformers(models[0])) < ATOL
        reload_weights(llm, weights_path=str(tmp_path / "1"))
        assert apart(answers(llm), from_transformers(models[1])) < ATOL
    finally:
        support.close(llm)


def test_another_checkpoint_once_and_twice(served, folders, fresh):
    assert apart(answers(served), fresh[0]) < ATOL
    for _ in range(2):
        reload_weights(served, weights_path=str(folders[1]))
        assert apart(answers(served), fresh[1]) < ATOL
    assert apart(fresh[1], from_transformers(support.stock(folders[1]))) < 1e-4


def test_one_tensor_at_a_time(served, folders, fresh):
    """As trainers send them that keep a reload open over many calls."""
    from vllm.config import set_current_vllm_config
    from vllm.model_executor.model_loader.reload import finalize_layerwise_reload, initialize_layerwise_reload

    config = served.llm_engine.vllm_config

    def send(model):
        initialize_layerwise_reload(model)
        for item in load_file(folders[1] / "model.safetensors").items():
            model.load_weights([item])
        finalize_layerwise_reload(model, config.model_config)

    with set_current_vllm_config(config):
        served.apply_model(send)
    assert apart(answers(served), fresh[1]) < ATOL


def test_weights_that_sleep_discarded(served, folders, fresh):
    """Level 2 leaves the storage of every parameter, and nothing in it: whatever was derived must be made again."""
    served.apply_model(lambda model: [p.data.fill_(float("nan")) for p in model.parameters()] and None)
    reload_weights(served, weights_path=str(folders[1]))
    assert apart(answers(served), fresh[1]) < ATOL


ALONE = (
    "embed_tokens.weight",
    "balancing_biases",
    "temp",
    "hidden_states_scale",
    "residual_bias",
    "depthwise.weight",
    "grouped.bias",
    "norm.weight",
)


@pytest.mark.parametrize("end", ALONE)
def test_some_weights_leave_the_others(served, folders, tmp_path, end):
    a, b = (load_file(folder / "model.safetensors") for folder in folders)
    some = {name: tensor for name, tensor in b.items() if name.endswith(end)}
    assert some
    mixed = shutil.copytree(folders[0], tmp_path / "mixed")
    save_file(a | some, mixed / "model.safetensors", {"format": "pt"})
    reload_weights(served, some)
    assert apart(answers(served), from_transformers(support.stock(mixed))) < 1e-4


def test_load_weights_of_packed_weights_is_refused(served, folders, fresh):
    """On a CPU, where stock models end in an assertion halfway."""
    weights = list(load_file(folders[1] / "model.safetensors").items())
    with pytest.raises(UserError, match="reload_weights"):
        served.apply_model(lambda model: model.load_weights(weights))
    assert apart(answers(served), fresh[0]) < ATOL


def test_a_partial_reload_leaves_no_loader_that_drops(served):
    from zaya.vllm.compat import unwrap_loaders

    def left(model):
        loaders = [getattr(p, "weight_loader", None) for p in model.parameters()]
        return sum(getattr(loader, "__name__", "") == "online_process_loader" for loader in loaders)

    reload_weights(served, {})
    assert served.apply_model(left)[0] > 0, "vLLM takes them off itself now"
    served.apply_model(unwrap_loaders)
    assert served.apply_model(left) == [0]


def test_sleep_is_refused_on_a_cpu(folders):
    with pytest.raises(ValueError, match="Sleep mode is not supported"):
        support.engine(folders[0], enable_sleep_mode=True)
