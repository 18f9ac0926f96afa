"""Time a draft that drafts on while the target verifies, against the chains of one process."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated

from typer import Option

from jobs.console import console, deliver, run
from jobs.options import (
    ChatTemplate,
    Drafts,
    DType,
    Limit,
    MaxLength,
    Name,
    Prompts,
    Repeats,
    Target,
    check_name,
    chosen_pair,
    given,
    sizes,
    with_draft,
)
from specdec_core.base.workspace import workspace
from specdec_core.config import PairSpec, Placement, Sampling, Temperature, parse
from specdec_core.prompts.chat import AUTO

PLACEMENT = Path(__file__).parents[2] / "cluster" / "local-2.yaml"


def main(
    cluster: Annotated[
        Path, Option(help="Placement (YAML): the devices that draft and target are on.")
    ] = PLACEMENT,
    target: Target = None,
    draft: Drafts = None,
    prompts: Prompts = "bundled:held_out",
    chat_template: ChatTemplate = AUTO,
    limit: Limit = 8,
    max_new_tokens: Annotated[int, Option(min=2, help="New tokens for each prompt.")] = 128,
    max_length: MaxLength = None,
    repeats: Repeats = 3,
    temperature: Annotated[float, Option(min=0, help="0 is greedy.")] = 0.0,
    lengths: Annotated[str, Option(help="K of the chains of one process.")] = "2,3,4,5,6,8",
    window: Annotated[int, Option(min=1, help="Candidates verified at once at most.")] = 12,
    compile: Annotated[bool, Option("--compile/--no-compile", help="Run compiled graphs.")] = True,
    dtype: DType = None,
    lookups: Annotated[
        bool,
        Option("--lookups", help="Also time drafts that lookups speed up, with PEARL and without."),
    ] = False,
    name: Name = None,
) -> None:
    """Decode the same prompts in turns: with chains of each K in a process of one thread and in one
    of two, and with the draft on a device of its own (PEARL). Draw when the draft and the target
    work and wait. Run it on an otherwise idle machine."""
    check_name(name)
    spec = with_draft(chosen_pair(PairSpec(), target, draft, max_length))
    types = given(compile=compile, target_dtype=dtype, draft_dtype=dtype)
    spec = spec.model_copy(update={"runner": spec.runner.model_copy(update=types)})
    sampling = Sampling(temperature=parse(Temperature, temperature, "--temperature"))
    chosen_lengths = sizes(lengths, "--lengths")

    # Ray, torch and MLflow take seconds to import.
    from cluster.session import ray_session
    from dashboards.progress import ConsoleProgress
    from dashboards.sections import ReportOrigin
    from research.overlap.report import report
    from research.overlap.run import compare_overlap
    from research.overlap.study import asynchronous, chains, under
    from research.overlap.timeline import chrome_trace
    from specdec_core.base.files import write_atomically
    from specdec_core.models.pair import check_pair
    from specdec_core.prompts.prompt_sets import load_prompts

    placement = Placement.load(cluster)
    loaded = load_prompts(prompts, limit, check_pair(spec), chat_template)
    with ConsoleProgress(console) as progress, ray_session():
        result = compare_overlap(
            spec,
            placement,
            [*under(sampling, chains(spec.drafts, chosen_lengths, lookups))],
            [*under(sampling, asynchronous(spec.drafts, window, lookups))],
            lambda bench: bench.requests(loaded, max_new_tokens),
            repeats,
            progress,
        )
    folder = workspace() / "overlap" / (name or spec.name)
    trace = write_atomically(folder / "trace.json", json.dumps(chrome_trace(result.spans)))
    runner = result.spec.runner
    note = (
        f"{len(loaded)} prompts of {prompts}, {max_new_tokens} new tokens, {repeats} repeats in"
        f" turns; {runner.device}, target {runner.target_dtype}, draft {runner.draft_dtype}"
    )
    params = {
        "prompts": prompts,
        "chat_template": chat_template,
        "max_new_tokens": max_new_tokens,
        "repeats": repeats,
    }
    origin = ReportOrigin(name=folder.name, pair=spec.name, notes=[note], params=params)
    deliver(report(result, origin), folder, "report", [trace])


if __name__ == "__main__":
    run(main)
