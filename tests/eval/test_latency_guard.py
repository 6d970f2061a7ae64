"""A server's processes never outlive who started them, however that ends."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest

# A server that starts another process, neither of which minds SIGTERM; both write their ids.
STUBBORN = """
import os, signal, subprocess, sys, time
signal.signal(signal.SIGTERM, signal.SIG_IGN)
if len(sys.argv) == 2:
    subprocess.Popen([sys.executable, "-c", os.environ["SOURCE"], sys.argv[1], "inner"])
with open(sys.argv[1], "a") as f:
    f.write(f"{os.getpid()} ")
time.sleep(600)
"""
STARTER = """
import os, signal, sys, time
from pathlib import Path
signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell's background job starts with Ctrl-C ignored
from zaya.eval.latency.server import _launch
os.environ["SOURCE"] = sys.argv[2]
process = _launch([sys.executable, "-c", sys.argv[2], sys.argv[1]], Path(sys.argv[1] + ".log"))
print(process.pid, flush=True)
time.sleep(600)
"""


def wait_for(what, seconds: float = 30):
    deadline = time.monotonic() + seconds
    while not what() and time.monotonic() < deadline:
        time.sleep(0.05)
    assert what()


@pytest.fixture
def started(tmp_path):
    """A process that has started a server, and the ids of guard, server and the server's own child."""
    ids = tmp_path / "ids"
    starter = subprocess.Popen(
        [sys.executable, "-c", STARTER, str(ids), STUBBORN],
        stdout=subprocess.PIPE,
        text=True,
        cwd=Path(__file__).parents[2],
    )
    assert starter.stdout is not None
    guard = int(starter.stdout.readline())
    wait_for(lambda: ids.exists() and len(ids.read_text().split()) == 2)
    yield starter, [guard, *map(int, ids.read_text().split())]
    starter.kill()
    starter.wait()


def gone(pids: list[int]) -> bool:
    return not any(psutil.pid_exists(p) and psutil.Process(p).status() != psutil.STATUS_ZOMBIE for p in pids)


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM, signal.SIGINT])
def test_everything_ends_with_who_started_it(started, number):
    starter, pids = started
    assert not gone(pids)
    os.kill(starter.pid, number)
    wait_for(lambda: gone(pids))


def test_what_a_server_leaves_behind_ends_with_it(started):
    _, (guard, *servers) = started
    os.kill(servers[0], signal.SIGKILL)
    wait_for(lambda: gone([guard, *servers]))
