"""Commands of this folder: `zaya export`, `zaya verify`."""

import json
import sys
from pathlib import Path
from typing import Annotated

import typer


def export(
    checkpoint: Annotated[Path, typer.Argument(help="Checkpoint folder, or a run folder: its newest checkpoint.")],
    out: Annotated[Path, typer.Argument(help="Folder to write; replaced whole when it exists.")],
    dtype: Annotated[str, typer.Option(help="float32 or bfloat16.")] = "float32",
    as_json: Annotated[bool, typer.Option("--json", help="One JSON object on standard output.")] = False,
) -> None:
    """Write a checkpoint as a Hugging Face folder that stock transformers and vLLM load."""
    from zaya.export.hf import export_checkpoint

    folder = export_checkpoint(checkpoint, out, dtype)
    if as_json:
        print(json.dumps({"folder": str(folder)}))
    print(f"exported to {folder}", file=sys.stderr)


def verify(
    model: Annotated[Path, typer.Argument(help="Exported folder.")],
    out: Annotated[Path | None, typer.Option(help="Folder for the result files; none: print only.")] = None,
    text: Annotated[Path | None, typer.Option(help="JSON lines with a field `text` to probe with.")] = None,
    prompts: Annotated[int, typer.Option(min=1, help="Number of probe prompts.")] = 8,
    new_tokens: Annotated[int, typer.Option(min=1, help="Greedy tokens to generate for each prompt.")] = 32,
    atol: Annotated[float, typer.Option(min=0, help="Largest allowed difference of logits, fp32.")] = 1e-4,
    vllm: Annotated[bool, typer.Option("--vllm", help="Compare with a vLLM server too.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="One JSON object on standard output.")] = False,
) -> None:
    """Compare our class with stock transformers on an exported folder: logits, greedy tokens, routing.

    Exit code 1 when they differ by more than --atol.
    """
    from zaya.export.verify import verify_folder

    report = verify_folder(model, out=out, text=text, prompts=prompts, new_tokens=new_tokens, atol=atol, vllm=vllm)
    if as_json:
        print(json.dumps(report))
    print(
        f"{model}: loads as {report['stock_class']} without our package; logits within "
        f"{report['max_logit_difference']:.1e}, {report['equal_tokens']} of {report['tokens']} greedy tokens equal",
        file=sys.stderr,
    )
