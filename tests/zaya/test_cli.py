"""The command line: exit codes, one-line errors, help that lists only what exists."""

import errno
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from zaya.cli import COMMANDS, PATH_ERRORS, describe, load_command
from zaya.errors import CheckFailed, UserError


def zaya(*argv, cwd=None, env=None):
    return subprocess.run(
        [sys.executable, "-P", "-m", "zaya.cli", *argv], capture_output=True, text=True, cwd=cwd, env=env
    )


def leaves(table, prefix=()):
    for name, (target, _) in table.items():
        if isinstance(target, dict):
            yield from leaves(target, (*prefix, name))
        else:
            yield (*prefix, name), target


@pytest.mark.parametrize(
    ("words", "target"), list(leaves(COMMANDS)), ids=lambda x: " ".join(x) if isinstance(x, tuple) else ""
)
def test_every_command_exists_and_documents_its_parameters(words, target):
    command = load_command(words[-1], target)
    assert command.help
    for parameter in command.params:
        if parameter.param_type_name == "option" and parameter.name != "help":
            assert parameter.help, f"{' '.join(words)} --{parameter.name} has no help"


@pytest.mark.parametrize(
    ("argv", "expected"),
    [
        (["traain"], "did you mean 'train'"),
        (["board", "buld"], "did you mean 'build'"),
        (["--nope"], "No such option"),
        (["release"], "Missing argument"),
        (["release", "no/such.yaml"], "no/such.yaml"),
        (["export", "no/such", "out"], "no/such"),
        (["train", "/dev/null/x", "--check"], "/dev/null/x"),
        (["train", "x" * 5000, "--check"], "name is too long"),
        (["verify", "no/such"], "no/such"),
        (["verify", "no/such", "--prompts", "0"], "--prompts"),
        (["verify", "no/such", "--new-tokens", "-3"], "--new-tokens"),
    ],
)
def test_a_mistake_is_one_line_and_exit_code_2(tmp_path, argv, expected):
    done = zaya(*argv, cwd=tmp_path)
    assert done.returncode == 2, done.stderr
    assert expected in done.stderr
    assert len(done.stderr.strip().splitlines()) == 1, done.stderr
    assert done.stdout == ""
    assert list(tmp_path.iterdir()) == []


def test_help_of_groups_and_root_exit_0():
    for argv in ([], ["--help"], ["board"], ["data", "--help"]):
        done = zaya(*argv)
        assert done.returncode == 0
        assert "Commands:" in done.stdout


def test_exceptions_map_to_exit_codes():
    assert describe(UserError("x"))[1] == 2
    assert describe(CheckFailed("x"))[1] == 1
    assert describe(OSError(28, "No space left on device", "f"))[1] == 2
    assert describe(ZeroDivisionError())[1] == 1


def heard() -> None:
    """In a child: Ctrl-C as in a terminal. A shell's background jobs inherit a deaf ear."""
    signal.signal(signal.SIGINT, signal.SIG_DFL)


LINES = {
    signal.SIGINT: "error: interrupted; the same command goes on from what is finished",
    signal.SIGTERM: "error: ended by SIGTERM; the same command goes on from what is finished",
}


@pytest.mark.parametrize("module", ["zaya", "zaya.cli"])
@pytest.mark.parametrize("number", LINES)
def test_a_signal_is_one_line_that_says_that_the_same_command_goes_on(tmp_path, number, module):
    os.mkfifo(tmp_path / "recipe.yaml")  # reading it waits for ever
    argv = [sys.executable, "-P", "-m", module, "train", "recipe.yaml", "--check"]
    process = subprocess.Popen(argv, cwd=tmp_path, stderr=subprocess.PIPE, text=True, preexec_fn=heard)
    fd = os.open(tmp_path / "recipe.yaml", os.O_WRONLY)  # waits until it is read
    process.send_signal(number)
    os.close(fd)  # a signal just before the read began does not end it; the end of the file does
    error = process.communicate(timeout=60)[1]
    assert process.returncode == 128 + number
    assert error.strip() == LINES[number]


@pytest.mark.parametrize("number", LINES)
@pytest.mark.parametrize("start", [["zaya"], ["python", "-P", "-m", "zaya"]], ids=lambda x: x[0])
@pytest.mark.parametrize("loaded", ["threading", "typer._click.core", "typer.main", "zaya.errors", "numpy"])
def test_a_signal_at_any_time_of_the_start_is_no_traceback(tmp_path, start, number, loaded):
    """Sent as soon as Python says that it has loaded a module, so at the same place on every machine."""
    argv = [str(Path(sys.executable).with_name(start[0])), *start[1:], "verify", str(tmp_path)]
    env = os.environ | {"PYTHONPROFILEIMPORTTIME": "1"}
    process = subprocess.Popen(argv, env=env, stderr=subprocess.PIPE, text=True, preexec_fn=heard)
    assert process.stderr is not None
    told = ""
    for line in process.stderr:
        if told or line.split("|")[-1].strip() == loaded:
            process.send_signal(number) if not told else None
            told += line
    assert process.wait(60) == 128 + number, told
    said = [line for line in told.splitlines() if not line.startswith("import time:")]
    assert said == [LINES[number]], told


def test_a_command_whose_main_thread_is_inside_a_library_ends_as_well():
    code = """
import ctypes, os
from zaya import interrupts
interrupts.REACT_S = 0.2
interrupts.listen()
interrupts.begin()
lock, mutex = ctypes.CDLL(None).pthread_mutex_lock, ctypes.create_string_buffer(64)
lock(mutex)
os.write(1, b"x")
lock(mutex)  # never returns, and goes on waiting after a signal
"""
    process = subprocess.Popen(
        [sys.executable, "-c", code], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, preexec_fn=heard
    )
    assert process.stdout is not None
    process.stdout.read(1)
    time.sleep(0.5)  # until it is there
    process.send_signal(signal.SIGTERM)
    assert process.communicate(timeout=30)[1].strip() == LINES[signal.SIGTERM]
    assert process.returncode == 143


def test_a_signal_that_a_destructor_swallowed_comes_again():
    code = """
import signal, time
from zaya import interrupts
class Slow:
    def __del__(self):
        signal.raise_signal(signal.SIGTERM)
interrupts.listen()
interrupts.begin()
try:
    slow = Slow()
    del slow
    time.sleep(30)
except interrupts.Terminated:
    raise SystemExit(interrupts.say())
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=25)
    assert (done.returncode, done.stderr.strip()) == (143, LINES[signal.SIGTERM])


def test_a_folder_named_eval_in_the_working_directory_is_not_picked_up(tmp_path):
    (tmp_path / "eval").mkdir()
    (tmp_path / "eval" / "__init__.py").write_text("raise SystemExit('picked up')")
    assert zaya("eval", "--help", cwd=tmp_path).returncode == 0


def test_what_the_system_says_about_a_path_is_one_line_and_exit_code_2():
    for number in PATH_ERRORS:
        text, code = describe(OSError(number, os.strerror(number), "a/path"))
        assert code == 2
        assert text.startswith("a/path: ")
    assert describe(OSError(errno.ENAMETOOLONG, "too long", "a" * 5000))[0].count("a") < 300
    assert describe(OSError(errno.EIO, "broken", "f"))[1] == 1
    assert describe(RuntimeError("DefaultCPUAllocator: can't allocate memory: you tried"))[1] == 2
