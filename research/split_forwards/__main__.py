"""Time forwards of a target, whole and split over CPU cores."""

from __future__ import annotations

from contextlib import ExitStack
from itertools import product
from typing import Annotated

from typer import Option

from jobs.console import console, run
from jobs.options import sizes


def main(
    target: Annotated[str, Option(help="The model.")] = "bundled:target",
    dtype: Annotated[str, Option(help="bfloat16 or float32.")] = "float32",
    devices: Annotated[int, Option(min=2, help="CPU cores that it is split over.")] = 2,
    rows: Annotated[str, Option(help="Sequences of a forward.")] = "1,2,4,8",
    tokens: Annotated[str, Option(help="Tokens of each sequence.")] = "1,6",
    context: Annotated[int, Option(min=1, help="Tokens in each sequence's KV cache.")] = 128,
    repeats: Annotated[int, Option(min=1, help="A time is the median of these.")] = 31,
    compile: Annotated[bool, Option(help="Compiled graphs as well.")] = True,
) -> None:
    """Time forwards of a target on one CPU core and split over several, by heads, by layers, and by
    layers with its rows pipelined, eager and compiled.

    All run in Ray actors, one core each, and are timed interleaved. A time ends when the most
    likely tokens are known.
    """
    from rich.table import Table

    from cluster.session import ray_session
    from cluster.sharded_target.sharded_runner import ShardedRunner
    from dashboards.progress import ConsoleProgress
    from research.split_forwards.timing import HOW, Size, opened, time_sizes
    from specdec_core.config import PairSpec, parse

    asked = [Size(*size) for size in product(sizes(rows, "--rows"), sizes(tokens, "--tokens"))]
    slots = max(size.rows for size in asked)
    kinds = ("eager", "compiled")[: 1 + compile]
    runners: dict[tuple[str, str], ShardedRunner] = {}
    with ExitStack() as held:
        held.enter_context(ray_session())
        progress = held.enter_context(ConsoleProgress(console))
        for kind in kinds:
            settings = {"target_dtype": dtype, "device": "cpu", "compile": kind == "compiled"}
            content = {"target": target, "drafts": {}, "runner": settings}
            spec = parse(PairSpec, content, "split-forwards")
            own = held.enter_context(opened(spec, devices, slots, progress))
            runners |= {(kind, how): runner for how, runner in own.items()}
        timed = time_sizes(runners, asked, context, repeats, progress)
    table = Table(title=f"{target}, {dtype}: milliseconds of a forward on {devices} cores")
    for column in ("forwards", "rows", "tokens", *HOW):
        table.add_column(column, justify="right")
    for kind, (size, medians) in product(kinds, timed.items()):
        times = (f"{1e3 * medians[kind, how]:.2f}" for how in HOW)
        table.add_row(kind, *map(str, size), *times)
    console.print(table)


if __name__ == "__main__":
    run(main)
