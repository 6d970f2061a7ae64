"""The entry point: found, cheap, idempotent."""

import importlib.metadata
import subprocess
import sys

import pytest

pytest.importorskip("vllm")


def test_vllm_finds_the_entry_point():
    [found] = [e for e in importlib.metadata.entry_points(group="vllm.general_plugins") if e.name == "zaya"]
    from zaya.vllm import register

    assert found.load() is register


def test_registering_twice_registers_once_and_imports_no_model():
    code = (
        "import sys; from zaya.vllm import register, STATE_OP, ARCHITECTURE\n"
        "assert 'vllm' not in sys.modules and 'torch' not in sys.modules\n"
        "register(); register()\n"
        "from vllm import ModelRegistry; from vllm.config import CompilationConfig\n"
        "assert ModelRegistry.models[ARCHITECTURE].module_name == 'zaya.vllm.model'\n"
        "assert CompilationConfig._attention_ops.count('vllm::' + STATE_OP) == 1\n"
        "assert 'zaya.vllm.model' not in sys.modules"
    )
    subprocess.run([sys.executable, "-P", "-c", code], check=True)
