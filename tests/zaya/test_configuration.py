import json

import pytest
import torch

import zaya
from tests.zaya.support import StockConfig, mixed_config
from zaya.errors import UserError


@pytest.mark.parametrize("preset", ["zaya1_8b", "zaya1_base", "nano", "tiny"])
def test_presets_are_read_by_stock(preset, tmp_path):
    config = getattr(zaya.ZayaConfig, preset)()
    config.save_pretrained(tmp_path)
    written = json.loads((tmp_path / "config.json").read_text())
    assert not {"kernels", "skip_semantics"} & written.keys()
    stock = StockConfig.from_pretrained(tmp_path)
    for field in ("hidden_size", "layer_types", "rope_parameters", "num_experts", "eos_token_id"):
        assert getattr(stock, field) == getattr(config, field)
    assert zaya.ZayaConfig.from_pretrained(tmp_path).to_dict() == config.to_dict()


def test_total_and_active_parameters_of_the_default():
    with torch.device("meta"):
        model = zaya.ZayaForCausalLM(zaya.ZayaConfig.zaya1_8b())
    one_expert = 3 * 2048 * 2048
    assert model.count_parameters() == (8_840_488_784, 8_840_488_784 - 40 * 15 * one_expert)


def test_rope_nested_flat_and_with_a_stray_key():
    theta = {"rope_type": "default", "rope_theta": 7.0, "partial_rotary_factor": 0.25}
    nested = zaya.ZayaConfig(rope_parameters={"rope_type": "default", "hybrid": theta})
    flat = zaya.ZayaConfig(rope_parameters=dict(theta))
    assert nested.rope_parameters["hybrid"] == flat.rope_parameters["hybrid"] == theta
    assert nested.rope_parameters["hybrid_sliding"]["rope_theta"] == 10_000.0
    assert zaya.ZayaConfig(rope_theta=7.0).rope_parameters["hybrid"]["rope_theta"] == 7.0


def test_input_skip_semantics_survive_and_stop_stock(tmp_path):
    mixed_config(skip_semantics="input").save_pretrained(tmp_path)
    assert zaya.ZayaConfig.from_pretrained(tmp_path).skip_semantics == "input"
    with pytest.raises(Exception, match="needs the zaya package"):
        StockConfig.from_pretrained(tmp_path)


@pytest.mark.parametrize(
    ("wrong", "named"),
    [
        ({"num_attention_heads": 7}, "num_attention_heads"),
        ({"layer_types": ["full_attention"] * 40}, "layer_types"),
        ({"layer_types": ["hybrid"] * 3}, "num_hidden_layers"),
        ({"layer_types": ["hybrid_sliding"] * 40}, "sliding_window"),
        ({"num_experts_per_tok": 2}, "num_experts_per_tok"),
        ({"num_key_value_heads": 1, "head_dim": 3}, "head_dim"),
        ({"hidden_size": 0}, "hidden_size"),
        ({"kernels": "cuda"}, "kernels"),
        ({"skip_semantics": "none"}, "skip_semantics"),
        ({"hidden_act": "gelu"}, "hidden_act"),
        ({"ffn_hidden_size": 4096, "num_query_groups": 2}, "native layout"),
        (
            {"head_dim": 10, "rope_parameters": {"rope_theta": 1e4, "partial_rotary_factor": 0.5}},
            "partial_rotary_factor",
        ),
        ({"rope_parameters": {"rope_type": "dynamic", "rope_theta": 1e4, "factor": 2.0}}, "rope_type"),
    ],
)
def test_wrong_values_name_the_field(wrong, named):
    with pytest.raises(UserError, match=named) as error:
        zaya.ZayaConfig(**wrong)
    assert "\n" not in str(error.value)


def test_a_legacy_folder_is_refused(tmp_path):
    legacy = {"model_type": "zaya", "num_hidden_layers": 80, "cca_num_q_heads": [8, 0], "rope_scaling": False}
    (tmp_path / "config.json").write_text(json.dumps(legacy))
    with pytest.raises(UserError, match="native layout"):
        zaya.ZayaConfig.from_pretrained(tmp_path)
