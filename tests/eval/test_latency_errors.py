"""`zaya serve` and `zaya latency`: every mistake is one line and exit code 2, and leaves nothing behind."""

import importlib.util
import json
import os
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from zaya.errors import CheckFailed, UserError
from zaya.eval.latency import cli, folder, server
from zaya.folder import read_config
from zaya.vllm import LOADED_LINE


@pytest.fixture
def model(tmp_path) -> Path:
    """What looks like a model folder from outside."""
    at = tmp_path / "model"
    at.mkdir()
    config = {"architectures": ["ZayaForCausalLM"], "model_type": "zaya", "max_position_embeddings": 256}
    (at / "config.json").write_text(json.dumps(config))
    (at / "model.safetensors").write_bytes((2).to_bytes(8, "little") + b"{}")
    (at / "tokenizer.json").write_text("{}")
    return at


def one_line(error) -> str:
    text = str(error.value)
    assert "\n" not in text
    return text


@pytest.mark.parametrize(
    ("gone", "told"),
    [("config.json", "no config.json"), ("model.safetensors", "no weights"), ("tokenizer.json", "no tokenizer")],
)
def test_half_a_model_folder(model, gone, told):
    (model / gone).unlink()
    with pytest.raises(UserError) as e:
        read_config(model)
    assert told in one_line(e)
    assert str(model) in one_line(e)


def test_no_folder_at_all(tmp_path):
    with pytest.raises(UserError, match=r"nothing: no such model folder; make one with `zaya export`"):
        cli.latency(tmp_path / "nothing")


def test_a_broken_config_names_the_file(model):
    (model / "config.json").write_text("{")
    with pytest.raises(UserError, match=r"config\.json: not a valid model config"):
        read_config(model)


def test_a_port_in_use_is_named(model):
    with socket.socket() as taken:
        taken.bind((folder.HOST, 0))
        taken.listen()
        port = taken.getsockname()[1]
        with pytest.raises(UserError, match=rf"port {port} is in use; choose another with --port"):
            cli.serve(model, port=port)


def test_an_unknown_dtype_is_refused_before_a_server_starts(model):
    with pytest.raises(UserError, match="--dtype int3: use one of auto, float32"):
        cli.serve(model, dtype="int3")


def test_a_port_that_does_not_exist(model):
    with pytest.raises(UserError, match="port 70000 does not exist"):
        cli.serve(model, port=70000)


def test_vllm_missing(model, monkeypatch):
    real = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda n, *a: None if n == "vllm" else real(n, *a))
    with pytest.raises(UserError, match=r"vLLM is not installed; pip install 'zaya\[serve\]'"):
        cli.latency(model)


def test_a_plugin_that_vllm_is_told_not_to_load(model, monkeypatch):
    monkeypatch.setenv("VLLM_PLUGINS", "other")
    with pytest.raises(UserError, match="hides our plugin"):
        cli.latency(model)


def test_no_disk_space(model, monkeypatch):
    pytest.importorskip("vllm")
    monkeypatch.setenv("ZAYA_FREE_BYTES", "1000")
    with pytest.raises(UserError, match=r"vLLM's cache needs about 0\.50 GB"):
        cli.latency(model)


@pytest.mark.parametrize(
    ("options", "told"),
    [
        ({"dtype": "bfloat16"}, "needs float32; add --no-parity"),
        ({"concurrency": [2, 2]}, "use different numbers"),
        ({"concurrency": [0]}, "at least 1"),
        ({"parity": False, "parity_only": True}, "nothing to do"),
        ({"input_len": 250}, "more than the 256 tokens"),
    ],
)
def test_options_that_cannot_be(model, options, told):
    with pytest.raises(UserError) as e:
        cli.latency(model, **options)
    assert told in one_line(e)


def test_the_command_exits_with_2_and_one_line(tmp_path):
    out = tmp_path / "out"
    argv = [sys.executable, "-P", "-m", "zaya.cli", "latency", str(tmp_path), "--out", str(out)]
    done = subprocess.run(argv, capture_output=True, text=True)
    assert done.returncode == 2
    assert done.stderr.startswith(f"error: {tmp_path}: not a model folder")
    assert done.stderr.count("\n") == 1
    assert not out.exists()


FALLBACK = "INFO [model.py:733] Resolved architecture: TransformersMoEForCausalLM\n"
OURS = f"INFO [model.py:733] Resolved architecture: ZayaForCausalLM\nINFO [model.py:1] {LOADED_LINE}\n"


def test_the_class_is_proven_from_what_the_engine_logged(model, tmp_path):
    log, config = tmp_path / "log", read_config(model)
    log.write_text(OURS)
    assert server.prove(model, config, log) == "zaya.vllm.model:ZayaForCausalLM"
    log.write_text(FALLBACK)
    with pytest.raises(CheckFailed, match="serves it as TransformersMoEForCausalLM and not through our plugin"):
        server.prove(model, config, log)
    log.write_text("ERROR Failed to load plugin zaya\n" + FALLBACK)
    with pytest.raises(CheckFailed, match="failed to load our plugin"):
        server.prove(model, config, log)
    # another class under our name, as a later vLLM may bring, is not ours
    log.write_text(FALLBACK.replace("TransformersMoEForCausalLM", "ZayaForCausalLM"))
    with pytest.raises(CheckFailed, match="not through our plugin"):
        server.prove(model, config, log)
    assert server.prove(model, {"model_type": "qwen3"}, log) == "ZayaForCausalLM"


def test_a_server_that_ends_says_why(model, tmp_path, monkeypatch):
    said = "import sys; print('ValueError: head_dim is wrong'); sys.exit(3)"
    monkeypatch.setattr(server, "arguments", lambda *a: [sys.executable, "-c", said])
    with (
        pytest.raises(CheckFailed, match=r"cannot serve it: ValueError: head_dim is wrong; log: .*log\.txt"),
        server.serve_folder(model, log=tmp_path / "log.txt"),
    ):
        pass
    said = "print('OSError: [Errno 28] No space left on device'); exit(1)"
    monkeypatch.setattr(server, "arguments", lambda *a: [sys.executable, "-c", said])
    with pytest.raises(UserError, match="the disk is full"), server.serve_folder(model, log=tmp_path / "log.txt"):
        pass


def test_a_server_that_never_answers_is_stopped(model, tmp_path, monkeypatch):
    monkeypatch.setattr(server, "arguments", lambda *a: [sys.executable, "-c", "import time; time.sleep(600)"])
    began = os.times().elapsed
    with (
        pytest.raises(CheckFailed, match="no answer from vLLM within 1 s"),
        server.serve_folder(model, log=tmp_path / "log.txt", timeout_s=1),
    ):
        pass
    assert os.times().elapsed - began < 60
