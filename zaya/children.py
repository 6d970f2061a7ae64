"""Child processes that never outlive the command that started them, however that ends short of SIGKILL."""

import contextlib
import subprocess
import time
from collections.abc import Iterator, Sequence
from typing import Any

GRACE_S = 10.0


@contextlib.contextmanager
def ending(children: Sequence[subprocess.Popen], grace_s: float = GRACE_S) -> Iterator[None]:
    """Leave no child behind, whatever happens: asked first, killed after `grace_s` or at a second Ctrl-C."""
    try:
        yield
    finally:
        alive = [c for c in children if c.poll() is None]
        try:
            for child in alive:
                child.terminate()
            deadline = time.monotonic() + grace_s
            for child in alive:
                with contextlib.suppress(subprocess.TimeoutExpired):
                    child.wait(max(0.0, deadline - time.monotonic()))
        finally:
            for child in alive:
                child.kill()
            for child in alive:
                child.wait()


def run(argv: list[str], grace_s: float = 3 * GRACE_S, **options: Any) -> subprocess.CompletedProcess:
    """`subprocess.run` that gives the child time to clean up (and to end its own) when this process is interrupted.

    subprocess.run itself kills after a quarter of a second.
    """
    with subprocess.Popen(argv, **options) as process, ending([process], grace_s):
        out, err = process.communicate()
    return subprocess.CompletedProcess(argv, process.returncode, out, err)
