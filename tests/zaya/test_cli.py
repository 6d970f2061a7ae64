"""The command line: exit codes, one-line errors, help that lists only what exists."""

import errno
import os
import signal
import subprocess
import sys

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
    assert describe(KeyboardInterrupt())[1] == 130
    assert describe(ZeroDivisionError())[1] == 1


def test_ctrl_c_says_that_the_same_command_goes_on(tmp_path):
    os.mkfifo(tmp_path / "recipe.yaml")  # reading it waits for ever
    argv = [sys.executable, "-P", "-m", "zaya.cli", "train", "recipe.yaml", "--check"]
    heard = lambda: signal.signal(signal.SIGINT, signal.SIG_DFL)  # a shell's background jobs inherit a deaf ear
    process = subprocess.Popen(argv, cwd=tmp_path, stderr=subprocess.PIPE, text=True, preexec_fn=heard)
    fd = os.open(tmp_path / "recipe.yaml", os.O_WRONLY)  # waits until it is read
    process.send_signal(signal.SIGINT)
    os.close(fd)  # a signal just before the read began does not end it; the end of the file does
    error = process.communicate(timeout=60)[1]
    assert process.returncode == 130
    assert error.strip() == "error: interrupted; the same command goes on from what is finished"


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
