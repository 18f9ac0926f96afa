"""Propose the best static token tree from a recording's acceptance rates."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated

from typer import Option

from jobs.console import console, deliver, run
from jobs.options import Name, ProfileFile
from specdec_core.base.errors import UserError
from specdec_core.base.names import check_name
from specdec_core.base.workspace import workspace
from specdec_core.config import MOST_NODES

MOST_DEPTH = 16  # deeper, there are hundreds of thousands of k-configurations


def main(
    traces: Annotated[str, Option(help="Greedy recording, a folder or a name.")],
    draft: Annotated[
        list[str] | None, Option(help="Draft to plan for; repeatable; unset, all.")
    ] = None,
    budget: Annotated[int, Option(help="Nodes of a tree at most.")] = 32,
    depth: Annotated[int, Option(help="Levels of a tree at most.")] = 10,
    profile: ProfileFile = None,
    name: Name = None,
) -> None:
    """Plan the best static trees for how often the target's token has each rank in the draft's
    distribution (in the manner of Sequoia), and compare them with every k-configuration under the
    budget, by replay.

    Times are modelled: counts of forwards times a profile's seconds (SpecDec++, Eq. 3.1).
    """
    for option, value, most in (("budget", budget, MOST_NODES), ("depth", depth, MOST_DEPTH)):
        if not 1 <= value <= most:
            raise UserError(f"--{option} {value}: expected 1 … {most}")
    check_name(name)

    # torch and MLflow take seconds to import.
    from dashboards.progress import ConsoleProgress
    from dashboards.sections import ReportOrigin
    from research.plan_tree.comparison import compare_trees
    from research.plan_tree.report import report
    from specdec_core.base.files import write_atomically
    from specdec_core.measure.forward_times import forward_times, origin
    from specdec_core.recordings.replay import Replay
    from specdec_core.search.replaying import find_named

    recording = find_named(traces, workspace())
    header = recording.header
    if not header.sampling.greedy:
        raise UserError(
            f"{recording.folder}: recorded with temperature {header.sampling.temperature:g}; ranks "
            "tell what a tree would do in greedy decoding only"
        )
    models = [name for name in header.pair.drafts if name not in header.eagle_heads]
    named: Sequence[str | None] = draft or models or [None]
    drafts = dict.fromkeys(map(recording.draft_name, named))
    with ConsoleProgress(console) as progress:
        times = forward_times(header.pair, [], profile, progress, header.fingerprints)
        replay = Replay(recording, hidden=False)
        comparisons = [compare_trees(replay, times, d, budget, depth, progress) for d in drafts]

    folder = workspace() / "trees" / (name or f"{recording.folder.name}-{budget}")
    trees = [
        write_atomically(folder / f"{each.draft}.yaml", each.configuration.to_yaml())
        for each in comparisons
    ]
    notes = [
        f"{header.prompts.count} prompts of {header.prompts.label}, {header.max_new_tokens} new "
        f"tokens ({recording.folder.name}); trees of at most {budget} nodes and {depth} levels",
        origin(times, profile),
    ]
    params = {"recording": recording.folder.name, "budget": budget, "depth": depth}
    measured = ReportOrigin(name=folder.name, pair=header.pair.name, notes=notes, params=params)
    deliver(report(comparisons, measured), folder, "trees", trees)


if __name__ == "__main__":
    run(main)
