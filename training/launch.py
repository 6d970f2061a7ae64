"""Starting the ranks of a run on this machine, when nothing else has.

The parent holds the rendezvous store on a port that the system chose, starts the same command once per rank, and ends
all of them when one fails. Under torchrun or accelerate launch none of this runs: the command is a rank already.
"""

import contextlib
import ctypes
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from datetime import timedelta
from typing import Any

import typer

from zaya.children import ending
from zaya.errors import CheckFailed, UserError

_PARENT = "ZAYA_TRAIN_PARENT"


def is_rank() -> bool:
    """Whether this process was started as one of several ranks, by us or by a launcher.

    Raises UserError for launcher's variables that are no numbers.
    """
    given = {name: os.environ[name] for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", _PARENT) if name in os.environ}
    for name, value in given.items():
        if not value.isdecimal():
            raise UserError(f"{name} is {value!r}, and a launcher sets it to a number; unset it")
    return "RANK" in given and "WORLD_SIZE" in given


def is_child() -> bool:
    """Whether this process is a rank that `launch` started."""
    return _PARENT in os.environ


def die_with_parent() -> None:
    """In a rank that `launch` started: be killed when the parent is, so that no orphan goes on. Linux only."""
    parent = os.environ.get(_PARENT)
    if parent is None or not parent.isdecimal() or not sys.platform.startswith("linux"):
        return
    ctypes.CDLL(None).prctl(1, signal.SIGKILL)  # PR_SET_PDEATHSIG
    if os.getppid() != int(parent):
        os._exit(1)


def launch(argv: list[str], ranks: int, threads: int) -> None:
    """Run the `zaya` command `argv` as `ranks` processes and wait for them.

    Their standard output goes to standard error, except rank 0's. Raises typer.Exit when a rank ended with code 2:
    it has said why in its one line. Raises CheckFailed when one ended otherwise.
    """
    with started([sys.executable, "-P", "-m", "zaya", *argv], ranks, threads) as children:
        code = _wait(children)
    if code == 2:
        raise typer.Exit(2)
    if code:
        raise CheckFailed(f"a rank ended with code {code}; the same command goes on from the last checkpoint")


@contextlib.contextmanager
def started(command: list[str], ranks: int, threads: int, **first: Any) -> Iterator[list[subprocess.Popen]]:
    """The ranks of `command`, which are ended on leaving. first: further arguments of rank 0's Popen."""
    from torch.distributed import TCPStore

    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False, timeout=timedelta(seconds=300))
    shared = {
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(store.port),
        "TORCHELASTIC_USE_AGENT_STORE": "True",
        "WORLD_SIZE": str(ranks),
        "LOCAL_WORLD_SIZE": str(ranks),
        "OMP_NUM_THREADS": str(threads),
        "ACCELERATE_USE_CPU": "true",
        _PARENT: str(os.getpid()),
    }
    children: list[subprocess.Popen] = []
    with ending(children):
        for rank in range(ranks):
            env = os.environ | shared | {"RANK": str(rank), "LOCAL_RANK": str(rank)}
            options: dict[str, Any] = first if rank == 0 else {"stdout": sys.stderr, "stdin": subprocess.DEVNULL}
            children.append(subprocess.Popen(command, env=env, **options))
        yield children


def _wait(children: list[subprocess.Popen]) -> int:
    """0 when all ended well, else the code of the first that did not: a usage error before what it brought about."""
    while True:
        codes = [child.poll() for child in children]
        failed = [c for c in codes if c]
        if failed:
            time.sleep(0.5)  # the other ranks fail of the first one's end: let them say so, and prefer its own code
            codes = [child.poll() for child in children]
            return 2 if 2 in codes else failed[0]
        if all(c == 0 for c in codes):
            return 0
        time.sleep(0.05)
