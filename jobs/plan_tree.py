"""Propose the best static token tree from a recording's acceptance rates."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from jobs.console import console, run
from jobs.times import forward_times
from specdec_core.base.errors import UserError
from specdec_core.base.workspace import workspace
from specdec_core.config import MOST_NODES

MOST_DEPTH = 16  # deeper, there are hundreds of thousands of k-configurations


def main(
    traces: Annotated[str, typer.Option(help="greedy recording, a folder or a name")],
    draft: Annotated[
        list[str] | None, typer.Option(help="draft to plan for; may be repeated; unset, all")
    ] = None,
    budget: Annotated[int, typer.Option(help="nodes of a tree at most")] = 32,
    depth: Annotated[int, typer.Option(help="levels of a tree at most")] = 10,
    hardware: Annotated[
        Path | None, typer.Option(help="forward times of another machine (YAML)")
    ] = None,
    profile: Annotated[
        Path | None,
        typer.Option(help="the pair's forward times; unset, the workspace's, measured if missing"),
    ] = None,
    name: Annotated[str | None, typer.Option(help="name of the result's folder")] = None,
) -> None:
    """Plan the best static trees for how often the target's token has each rank in the draft's
    distribution (in the manner of Sequoia), and compare them with every k-configuration under the
    budget, by replay.

    Times are modelled: counts of forwards times a profile's seconds (SpecDec++, Eq. 3.1).
    """
    if hardware is not None and profile is not None:
        raise UserError("--hardware and --profile both give forward times: give one")
    for option, value, most in (("budget", budget, MOST_NODES), ("depth", depth, MOST_DEPTH)):
        if not 1 <= value <= most:
            raise UserError(f"--{option} {value}: expected 1 … {most}")
    if name is not None and (name in ("", "..") or Path(name).name != name):
        raise UserError(f"--name {name}: expected a folder's name, not a path")

    # torch and MLflow take seconds to import.
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn

    from dashboards import trees as shown
    from specdec_core.base.files import write_atomically
    from specdec_core.recordings.replay import Replay
    from specdec_core.search.replaying import find_named
    from specdec_core.studies.trees import compare_trees

    recording = find_named(traces, workspace())
    header = recording.header
    if not header.sampling.greedy:
        raise UserError(
            f"{recording.folder}: recorded with temperature {header.sampling.temperature:g}; ranks "
            "tell what a tree would do in greedy decoding only"
        )
    drafts = [recording.draft_name(own) for own in draft or list(header.pair.drafts)]
    times = forward_times(header.pair, [], hardware, profile)
    replay = Replay(recording, hidden=False)
    comparisons = []
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn())
    with Progress(*columns, console=console, transient=True) as progress:
        for own in dict.fromkeys(drafts):
            task = progress.add_task(f"replaying trees of {own}")

            def step(done: int, total: int, task: int = task) -> None:
                progress.update(task, completed=done, total=total)

            comparisons.append(compare_trees(replay, times, own, budget, depth, step))

    notes = [
        f"{header.prompts.count} prompts of {header.prompts.source}, {header.max_new_tokens} new "
        f"tokens ({recording.folder.name}); trees of at most {budget} nodes and {depth} levels",
        f"forward times: {times.device}"
        + (f", target in {times.target_dtype}" if hardware is None else " (not this machine)"),
    ]
    console.print(shown.acceptance_table(comparisons))
    for own in comparisons:
        console.print(shown.budgets_table(own))
    for line in (*map(shown.headline, comparisons), *notes):
        console.print(line, soft_wrap=True)

    folder = workspace() / "trees" / (name or f"{recording.folder.name}-{budget}")
    drawn = shown.drawings(comparisons)
    files = [
        write_atomically(folder / "budgets.csv", shown.frame(comparisons).to_csv(index=False)),
        write_atomically(folder / "grid.csv", shown.grids(comparisons).to_csv(index=False)),
        write_atomically(folder / "trees.md", shown.markdown(comparisons, notes)),
        write_atomically(folder / "trees.html", shown.page(drawn, comparisons, folder.name, notes)),
        *(
            write_atomically(folder / f"{own.draft}.yaml", own.configuration.to_yaml())
            for own in comparisons
        ),
    ]
    params = {"recording": recording.folder.name, "budget": budget, "depth": depth}
    shown.log_trees(header.pair.name, f"trees {folder.name}", params, comparisons, drawn, files)
    console.print(f"figures   {folder / 'trees.html'}", soft_wrap=True)


if __name__ == "__main__":
    run(main)
