import subprocess
import sys


def run(code: str) -> str:
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    return done.stdout.strip()


def test_import_is_light():
    heavy = "{'torch', 'transformers', 'triton', 'vllm', 'typer', 'numpy'}"
    assert run(f"import sys; import zaya; print(sorted({heavy} & sys.modules.keys()))") == "[]"


CHECK = """
from transformers import AutoConfig, AutoModel, AutoModelForCausalLM
import transformers.integrations.moe as moe
config = AutoConfig.for_model("zaya", vocab_size=64, hidden_size=16, num_hidden_layers=1, num_experts=2,
    moe_intermediate_size=8, router_hidden_size=8, num_attention_heads=2, num_key_value_heads=2, head_dim=4)
found = (type(config).__module__, type(AutoModel.from_config(config)).__module__,
         type(AutoModelForCausalLM.from_config(config)).__name__, "zaya" in moe.ALL_EXPERTS_FUNCTIONS)
"""
FOUND = ("zaya.configuration_zaya", "zaya.modeling_zaya", "ZayaForCausalLM", True)


def test_import_before_transformers_registers():
    import zaya

    names: dict = {}
    exec(CHECK, names)
    assert zaya.__version__
    assert names["found"] == FOUND


def test_import_after_transformers_registers():
    assert run(f"import transformers.models.auto, zaya{CHECK}print(found)") == str(FOUND)
