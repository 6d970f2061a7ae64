"""What vLLM needs beside a model folder: itself, a port, a cache."""

import importlib.util
import os
import socket
from pathlib import Path
from typing import Any

from zaya.errors import UserError

HOST = "127.0.0.1"


def is_zaya(config: dict[str, Any]) -> bool:
    """Whether the folder needs our plugin."""
    return config.get("model_type") == "zaya"


def require_vllm() -> None:
    """Raise UserError when vLLM is missing, or told not to load our plugin."""
    if importlib.util.find_spec("vllm") is None:
        raise UserError("vLLM is not installed; pip install 'zaya[serve]', or on a CPU `make env`")
    allowed = os.environ.get("VLLM_PLUGINS")
    if allowed is not None and "zaya" not in allowed.split(","):
        raise UserError(f"VLLM_PLUGINS is {allowed!r}, which hides our plugin from vLLM; unset it or add zaya to it")


def take_port(port: int | None) -> int:
    """`port` when it is free on loopback, else UserError; without one, a port that is free now."""
    with socket.socket() as s:
        s.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            s.bind((HOST, port or 0))
        except PermissionError:
            raise UserError(f"port {port} needs rights that this user does not have; use one above 1023") from None
        except (OSError, OverflowError) as e:
            if isinstance(e, OverflowError):
                raise UserError(f"port {port} does not exist; use one from 1024 to 65535") from None
            raise UserError(f"port {port} is in use; choose another with --port, or end what listens there") from None
        return s.getsockname()[1]


def cache_folder() -> Path:
    """Where vLLM keeps what it compiles: .cache/vllm of the checkout, or below the user's cache folder."""
    if os.environ.get("VLLM_CACHE_ROOT"):
        return Path(os.environ["VLLM_CACHE_ROOT"])
    root = Path(__file__).parents[2]
    if (root / "pyproject.toml").is_file():
        return root / ".cache" / "vllm"
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "zaya" / "vllm"
