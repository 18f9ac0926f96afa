"""Time forwards of a model shape against the memory's bandwidth."""

from __future__ import annotations

from typing import Annotated

from typer import Option

from jobs.console import console, run
from jobs.options import sizes
from specdec_core.base.errors import UserError


def main(
    shape: Annotated[str, Option(help="llama-8b, llama-1b or tiny.")] = "llama-8b",
    dtype: Annotated[str, Option(help="bfloat16, float16 or float32.")] = "bfloat16",
    rows: Annotated[str, Option(help="Sequences of a forward.")] = "1,8,32",
    widths: Annotated[str, Option(help="Tokens of each sequence.")] = "1,4,8",
    contexts: Annotated[str, Option(help="Tokens in each sequence's KV cache.")] = "128,2048,8192",
    repeats: Annotated[int, Option(min=1, help="A time is the median of these.")] = 9,
    compile: Annotated[bool, Option(help="Captured or compiled graphs as well.")] = True,
) -> None:
    """Time forwards of a Llama shape with random weights, for each number of sequences, of tokens
    and of context, eager and compiled.

    A forward reads the weights and the KV cache at least once. `share` is the time that this takes
    at the bandwidth measured on the same device, divided by the time of the forward.
    """
    from rich.table import Table

    from dashboards.progress import ConsoleProgress
    from research.forwards.timing import SHAPES, bandwidth, random_model, time_shape

    if shape not in SHAPES:
        raise UserError(f"--shape {shape}: expected one of {', '.join(SHAPES)}")
    counts, tokens = sizes(rows, "--rows"), sizes(widths, "--widths")
    lengths = sizes(contexts, "--contexts")
    model = random_model(shape, dtype)
    rate = bandwidth(model.device)
    table = Table(title=f"{shape}, {dtype}, {model.device}: {rate / 1e9:,.0f} GB/s measured")
    for column in ("forwards", "rows", "tokens", "context", "ms", "GB read", "share"):
        table.add_column(column, justify="right")
    with ConsoleProgress(console) as progress:
        for compiled in (False, True)[: 1 + compile]:
            kind = "compiled" if compiled else "eager"
            for each in time_shape(model, counts, tokens, lengths, repeats, compiled, progress):
                table.add_row(
                    kind,
                    *map(str, (each.rows, each.width, each.context)),
                    f"{1e3 * each.seconds:.2f}",
                    f"{each.read / 1e9:.2f}",
                    f"{each.read / rate / each.seconds:.0%}",
                )
    console.print(table)


if __name__ == "__main__":
    run(main)
