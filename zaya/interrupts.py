"""How Ctrl-C and SIGTERM end a command: one line, exit code 130 or 143, and nothing left running.

Before a command begins and after it is done nothing has to be undone, and the process ends where it stands: an
exception would meet imports half done, and be shown or lost. In between, the signal is an exception that unwinds the
command, which ends its children and removes what is half written. A rank of a training ends where it stands at any
time, as if it were killed. When the main thread is so long inside a library that Python cannot tell it, a thread ends
the process.

Imported before anything else (zaya/__main__.py), so from the standard library only, and little of that.
"""

import os
import signal
import sys
import time

REACT_S = 5.0  # how long the main thread may take to hear a signal
AGAIN_S = 1.0  # SIGTERM twice within this is one: `timeout` sends it to the process and to its group
WORDS: dict[int, str] = {
    signal.SIGINT: "interrupted; the same command goes on from what is finished",
    signal.SIGTERM: "ended by SIGTERM; the same command goes on from what is finished",
}
CHILD = ("ZAYA_STAGE", "ZAYA_TRAIN_PARENT")  # set for what another zaya command started


class Terminated(KeyboardInterrupt):
    """SIGTERM came: like Ctrl-C, so that what lets that pass lets this pass."""


_state: dict = {"running": False, "heard": None, "at": 0.0, "said": False}


def listen() -> None:
    """From now on hear both signals, where they are not ignored (as a shell's background jobs ignore Ctrl-C)."""
    for number in WORDS:
        waiting = signal.default_int_handler if number == signal.SIGINT else signal.SIG_DFL
        if signal.getsignal(number) == waiting and not (number == signal.SIGTERM and _is_rank() and _is_silent()):
            signal.signal(number, _hear)
    import threading

    reading, writing = os.pipe()
    os.set_blocking(writing, False)
    signal.set_wakeup_fd(writing, warn_on_full_buffer=False)
    _state["reacted"] = threading.Event()
    threading.Thread(target=_watch, args=(reading,), name="zaya-interrupts", daemon=True).start()
    sys.unraisablehook = _send_again
    os.register_at_fork(after_in_child=_forget)


def begin() -> None:
    """From now on a signal is an exception."""
    _state["running"] = True


def done() -> None:
    """From now on a signal ends the process where it stands, again."""
    if sys.stdout is not None:
        try:  # noqa: SIM105
            sys.stdout.flush()
        except (OSError, ValueError):
            pass  # Python says so as it ends
    _state["running"] = False


def caused(error: BaseException | None) -> bool:
    """Whether `error` is one of these signals, or came of one: libraries turn exceptions into their own."""
    while error is not None and not isinstance(error, KeyboardInterrupt):
        error = error.__cause__ or error.__context__
    return error is not None


def say() -> int:
    """Say the line once, unless the command that started this one does. Returns the exit code."""
    number = _state["heard"] or signal.SIGINT
    if not _is_silent() and not _state["said"]:
        _state["said"] = True
        try:  # noqa: SIM105 (contextlib is slow to import)
            os.write(2, f"error: {WORDS[number]}\n".encode())
        except OSError:
            pass
    return 128 + number


def _end(number: int) -> None:
    _state["heard"] = _state["heard"] or number
    os._exit(say())


def _is_rank() -> bool:
    return "ZAYA_TRAIN_PARENT" in os.environ or "RANK" in os.environ


def _is_silent() -> bool:
    return any(name in os.environ for name in CHILD) or os.environ.get("RANK", "0") != "0"


def _hear(number: int, frame: object) -> None:
    if not _state["running"] or _is_rank():
        _end(number)
    _state["reacted"].set()
    again = _state["heard"] == number == signal.SIGTERM and time.monotonic() - _state["at"] < AGAIN_S
    _state["heard"] = _state["heard"] or number
    if not again:
        _state["at"] = time.monotonic()
        raise KeyboardInterrupt if number == signal.SIGINT else Terminated


def _watch(reading: int) -> None:
    """Wait for the first signal; end the process when the main thread has not heard of it after REACT_S."""
    number = 0
    while number not in WORDS:
        number = os.read(reading, 1)[0]
    if not _state["reacted"].wait(REACT_S):
        _end(number)


def _send_again(unraisable) -> None:
    """A destructor or callback swallowed the exception: the signal comes once more, a moment later."""
    if not issubclass(unraisable.exc_type, KeyboardInterrupt):
        sys.__unraisablehook__(unraisable)
        return
    import threading

    _state["at"] = 0.0
    threading.Timer(0.05, os.kill, (os.getpid(), _state["heard"] or signal.SIGINT)).start()


def _forget() -> None:
    """In a forked child, which a library manages: everything as Python has it."""
    signal.set_wakeup_fd(-1)
    sys.unraisablehook = sys.__unraisablehook__
    for number in WORDS:
        if signal.getsignal(number) is _hear:
            signal.signal(number, signal.default_int_handler if number == signal.SIGINT else signal.SIG_DFL)
