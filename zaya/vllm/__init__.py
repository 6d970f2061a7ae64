"""ZAYA1 as a plugin of stock vLLM (0.26 to 0.34): `pip install` is all that it takes, vLLM finds the entry point.

Importing this package loads neither vLLM nor torch; vLLM calls `register` in each of its processes.
"""

ARCHITECTURE = "ZayaForCausalLM"
MODEL_CLASS = "zaya.vllm.model:ZayaForCausalLM"
STATE_OP = "zaya_cca_state"
# What the engine logs as it builds our class. Without the plugin vLLM falls back to its transformers backend, which
# starts and answers wrongly; whoever starts a server waits for this line.
LOADED_LINE = f"ZAYA1 is served by {MODEL_CLASS}"


def register() -> None:
    """Entry point of the group `vllm.general_plugins`. Cheap and idempotent: the class is imported when it is used."""
    from vllm import ModelRegistry
    from vllm.config import CompilationConfig

    import zaya  # noqa: F401 - registers our config with transformers' Auto classes

    known = ModelRegistry.models.get(ARCHITECTURE)
    if getattr(known, "module_name", None) != MODEL_CLASS.split(":")[0]:
        ModelRegistry.register_model(ARCHITECTURE, MODEL_CLASS)
    # piecewise CUDA graphs are cut at this op, which reads and writes the state of each request
    if f"vllm::{STATE_OP}" not in CompilationConfig._attention_ops:
        CompilationConfig._attention_ops.append(f"vllm::{STATE_OP}")
