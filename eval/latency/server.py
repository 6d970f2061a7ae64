"""A vLLM OpenAI server of one model folder: started, waited for, proven to run our class, and stopped in any case."""

import contextlib
import json
import os
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NoReturn

from zaya.errors import CheckFailed, UserError
from zaya.eval.latency import folder as folders
from zaya.files import require_free_space
from zaya.folder import read_config
from zaya.vllm import LOADED_LINE

GUARD = Path(__file__).with_name("guard.py")
CACHE_BYTES = 500_000_000  # assumed: compiled code and logs stay well under this
DTYPES = ("auto", "float32", "bfloat16", "float16", "float", "half")  # what vLLM's server takes
START_TIMEOUT_S = 600.0
STOP_TIMEOUT_S = 20.0
# what the log says, and the mend, where a person can do something about it
MENDS = (
    ("No space left on device", "the disk is full; free some space"),
    ("address already in use", "the port was taken while the server started; choose another with --port"),
    ("No available memory for the cache", "no memory is left for the cache; lower --max-model-len"),
    ("larger than the available KV cache memory", "the cache is too small; lower --max-model-len"),
    ("greater than the derived max_model_len", "--max-model-len is more than the model was made for; lower it"),
    ("Unsupported CPU attention configuration", "vLLM's attention for CPUs takes no such head_dim; 32 and 64 work"),
    ("Available memory on node", "not enough memory is free; end other programs, or lower VLLM_CPU_KVCACHE_SPACE"),
    ("Free memory on device", "not enough memory is free on the GPU; end other programs on it"),
)

# errors of one process that only say that another failed
FOLLOW_UPS = ("Engine core initialization failed", "EngineDeadError", "WorkerProc initialization failed")


@dataclass(frozen=True)
class Options:
    """How to serve. eager: no compilation, which starts sooner. extra: more arguments for vLLM's server."""

    port: int | None = None
    dtype: str = "float32"
    eager: bool = True
    max_model_len: int | None = None
    extra: tuple[str, ...] = ()


@dataclass
class Server:
    """A server that answers. `model` is the name to ask for, `model_class` the class that the engine built."""

    url: str
    model: str
    model_class: str
    log: Path
    options: Options
    start_s: float
    process: subprocess.Popen = field(repr=False)

    def check_alive(self) -> None:
        """Raise CheckFailed when the server has ended."""
        if self.process.poll() is not None:
            raise CheckFailed(f"the vLLM server of {self.model} ended by itself: {reason(self.log)}; log: {self.log}")


def arguments(folder: Path, port: int, options: Options) -> list[str]:
    """Command line of the server. Started as a module: the `vllm` command of vllm-cpu does not work."""
    argv = [sys.executable, "-P", "-m", "vllm.entrypoints.openai.api_server", "--model", str(folder)]
    argv += ["--host", folders.HOST, "--port", str(port), "--dtype", options.dtype]
    argv += ["--enforce-eager"] if options.eager else []
    argv += ["--max-model-len", str(options.max_model_len)] if options.max_model_len else []
    return [*argv, *options.extra]


def environment() -> dict[str, str]:
    """The child's environment: nothing is sent or fetched, and the log has the lines that prove what runs."""
    env = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"}
    env |= {"VLLM_NO_USAGE_STATS": "1", "DO_NOT_TRACK": "1", "HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false"}
    env |= {"VLLM_CONFIGURE_LOGGING": "1", "VLLM_LOGGING_LEVEL": "INFO"}
    env |= {"VLLM_CACHE_ROOT": str(folders.cache_folder())}
    return {"VLLM_CPU_KVCACHE_SPACE": "1"} | env


@contextlib.contextmanager
def serve_folder(
    folder: Path,
    options: Options = Options(),
    log: Path | None = None,
    timeout_s: float = START_TIMEOUT_S,
) -> Iterator[Server]:
    """Serve `folder` on loopback while the context lasts; the whole process group ends with it, or with this process.

    log: file for the server's output; without one a temporary file, removed unless the server failed.

    Raises UserError for a folder that is no model, a port in use, missing vLLM or disk space; CheckFailed when the
    server ends or does not answer within `timeout_s` seconds, or runs another class than ours for a ZAYA folder.
    """
    config = read_config(folder)
    if options.dtype not in DTYPES:
        raise UserError(f"--dtype {options.dtype}: use one of {', '.join(DTYPES)}")
    folders.require_vllm()
    port = folders.take_port(options.port)
    require_free_space(folders.cache_folder(), CACHE_BYTES, "vLLM's cache")
    own_log = log is None
    if log is None:
        handle, name = tempfile.mkstemp(prefix="zaya-serve-", suffix=".log")
        os.close(handle)
        log = Path(name)
    process = _launch(arguments(folder, port, options), log)
    try:
        began = time.monotonic()
        _wait(process, f"http://{folders.HOST}:{port}/health", folder, log, timeout_s)
        built = prove(folder, config, log)
        url = f"http://{folders.HOST}:{port}"
        name = _served_name(url, folder)
        _first_answer(url, name, folder, log)
        yield Server(url, name, built, log, options, time.monotonic() - began, process)
    finally:
        _stop(process)
    if own_log:
        log.unlink()


def _launch(argv: list[str], log: Path) -> subprocess.Popen:
    with open(log, "w", encoding="utf-8") as out:
        return subprocess.Popen(
            [sys.executable, "-P", str(GUARD), *argv],
            stdin=subprocess.PIPE,
            stdout=out,
            stderr=subprocess.STDOUT,
            env=environment(),
            start_new_session=True,
        )


def _stop(process: subprocess.Popen) -> None:
    """Let go of the guard's leash; it ends its group. Not interrupted by a second Ctrl-C."""
    assert process.stdin is not None
    process.stdin.close()
    while True:
        try:
            process.wait(STOP_TIMEOUT_S)
            return
        except KeyboardInterrupt:
            continue
        except subprocess.TimeoutExpired:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, 9)


def _wait(process: subprocess.Popen, health: str, folder: Path, log: Path, timeout_s: float) -> None:
    """Return when the server answers; say every few seconds how far it is."""
    began = said = time.monotonic()
    while True:
        now = time.monotonic()
        if process.poll() is not None:
            _explain(folder, log)
        with contextlib.suppress(OSError):
            urllib.request.urlopen(health, timeout=2).close()
            print(f"vLLM serves {folder} after {now - began:.0f} s", file=sys.stderr, flush=True)
            return
        if now - began > timeout_s:
            raise CheckFailed(f"{folder}: no answer from vLLM within {timeout_s:.0f} s ({reason(log)}); log: {log}")
        if now - said >= 10:
            said = now
            print(f"vLLM is starting, {now - began:.0f} s: {last_line(log)}", file=sys.stderr, flush=True)
        time.sleep(0.3)


def _explain(folder: Path, log: Path) -> NoReturn:
    """Raise for a server that failed: UserError where the log has a sign that a person can act on."""
    text = log.read_text(encoding="utf-8", errors="replace")
    for sign, mend in MENDS:
        if sign in text:
            raise UserError(f"{folder}: {mend}; vLLM's log is {log}")
    raise CheckFailed(f"{folder}: vLLM cannot serve it: {reason(log)}; log: {log}")


def last_line(log: Path) -> str:
    """The newest message of a log, without its stamp, shortened."""
    lines = [x.strip() for x in log.read_text(encoding="utf-8", errors="replace").splitlines() if x.strip()]
    told = [x.split("] ", 1)[1].strip() for x in lines if "] " in x and (" INFO " in x or " WARNING " in x)]
    return (told or lines or ["no output yet"])[-1][:100]


def reason(log: Path) -> str:
    """The line of a log that says best why it ends: the first one of the last kind of error in it."""
    lines = log.read_text(encoding="utf-8", errors="replace").splitlines()
    errors = [x.strip() for x in lines if "Error: " in x or "Exception: " in x]
    told = [x for x in errors if not any(sign in x for sign in FOLLOW_UPS)]
    return (told or errors or [last_line(log)])[-1][-300:]


def prove(folder: Path, config: dict[str, Any], log: Path) -> str:
    """The class that the engine built for `folder`, from what the engine logged.

    Raises CheckFailed when a ZAYA folder is served by another class than ours: vLLM without the plugin falls back to
    its transformers backend, which answers, and wrongly.
    """
    text = log.read_text(encoding="utf-8", errors="replace")
    resolved = [x.split("Resolved architecture: ")[1].split()[0] for x in text.splitlines() if "Resolved arch" in x]
    if not folders.is_zaya(config):
        return resolved[0] if resolved else config["architectures"][0]
    if LOADED_LINE in text:
        return LOADED_LINE.split()[-1]
    why = "; it failed to load our plugin" if "Failed to load plugin zaya" in text else ""
    raise CheckFailed(
        f"{folder}: vLLM serves it as {resolved[0] if resolved else 'another class'} and not through our plugin{why}, "
        f"so its answers would be wrong; pip install the zaya package into vLLM's environment (log: {log})"
    )


def _served_name(url: str, folder: Path) -> str:
    """The model name that the server answers to, once it is sure that it serves `folder`."""
    card = request(f"{url}/v1/models")["data"][0]
    root = Path(str(card.get("root") or card["id"]))
    if not (root.is_dir() and root.samefile(folder)):
        raise CheckFailed(f"{url} serves {root} and not {folder}; another server took the port")
    return card["id"]


def _first_answer(url: str, name: str, folder: Path, log: Path) -> None:
    """Ask for one token: an engine can start, and end at its first request."""
    try:
        request(f"{url}/v1/completions", {"model": name, "prompt": [1], "max_tokens": 1, "temperature": 0})
    except CheckFailed:
        _explain(folder, log)


def request(url: str, body: dict[str, Any] | None = None, timeout_s: float = 300.0) -> dict[str, Any]:
    """One JSON request, a POST when there is a body. Raises CheckFailed with the server's words when it refuses."""
    data = None if body is None else json.dumps(body).encode()
    call = urllib.request.Request(url, data, {"Content-Type": "application/json"})
    try:
        with urllib.request.urlopen(call, timeout=timeout_s) as answer:
            return json.load(answer)
    except urllib.error.HTTPError as e:
        raise CheckFailed(f"{url}: HTTP {e.code}: {e.read(500).decode(errors='replace')}") from None
    except OSError as e:
        raise CheckFailed(f"{url}: no answer ({e})") from None
