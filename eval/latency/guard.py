"""Runs a command in this process's group and ends the whole group when the parent goes away or says so.

Standard input is the leash: the parent holds the other end of the pipe and writes nothing. The kernel closes it when
the parent ends in any way, SIGKILL included, so a server never outlives who started it. Standard library only, because
it is started by path: `python -P guard.py COMMAND...`, as the leader of a new session.
"""

import os
import select
import signal
import subprocess
import sys
import time

GRACE_S = 5.0  # between asking the group to end and killing it


def watch(argv: list[str]) -> int | None:
    """Run `argv` until it ends (its exit code) or the leash is let go (None)."""
    child = subprocess.Popen(argv, stdin=subprocess.DEVNULL)
    while child.poll() is None:
        readable, _, _ = select.select([sys.stdin], [], [], 0.2)
        if readable and not os.read(sys.stdin.fileno(), 1):
            os.killpg(0, signal.SIGTERM)
            deadline = time.monotonic() + GRACE_S
            while child.poll() is None and time.monotonic() < deadline:
                time.sleep(0.05)
            return None
    return child.returncode


if __name__ == "__main__":
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
        signal.signal(number, lambda *_: None)  # only the leash ends the group
    code = watch(sys.argv[1:])
    if code is not None:
        print(f"server ended by itself with exit code {code}", flush=True)
    os.killpg(0, signal.SIGKILL)  # whatever the command left behind, and this process
