"""Time a draft that drafts on while the target verifies, against the chains of one process."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator
from itertools import product
from pathlib import Path
from typing import Annotated

from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from typer import Option

from jobs.console import console, run
from jobs.profile import chosen_pair, sizes
from jobs.sweep import given
from specdec_core.base.errors import UserError
from specdec_core.base.workspace import workspace
from specdec_core.config import (
    Configuration,
    DrafterSettings,
    PairSpec,
    Sampling,
    Temperature,
    parse,
)
from specdec_core.drafting.cascade.settings import CascadeSettings
from specdec_core.drafting.draft_model.settings import DraftModelSettings
from specdec_core.drafting.hybrid import HybridSettings
from specdec_core.drafting.pearl.settings import PearlSettings
from specdec_core.drafting.policies.fixed import FixedSettings

PLACEMENT = Path(__file__).parents[1] / "cluster" / "local-2.yaml"


def main(
    cluster: Annotated[
        Path, Option(help="YAML that says which devices draft and target get")
    ] = PLACEMENT,
    target: Annotated[str | None, Option(help="target: hub id, folder, bundled:…")] = None,
    draft: Annotated[
        list[str] | None, Option(help="draft model, [name=]model; may be repeated")
    ] = None,
    prompts: Annotated[str, Option(help="JSONL file, hub id, bundled:…")] = "bundled:held_out",
    limit: Annotated[int, Option(min=1, help="use the first n prompts")] = 8,
    max_new_tokens: Annotated[int, Option(min=2, help="tokens for each prompt")] = 128,
    repeats: Annotated[int, Option(min=1, help="times each prompt is decoded")] = 3,
    temperature: Annotated[float, Option(min=0, help="0 is greedy")] = 0.0,
    lengths: Annotated[str, Option(help="K of the chains of one process")] = "2,3,4,5,6,8",
    window: Annotated[int, Option(min=1, help="candidates verified at once at most")] = 12,
    compile: Annotated[bool, Option("--compile/--no-compile", help="run compiled graphs")] = True,
    dtype: Annotated[
        str | None, Option(help="data type of all models: auto, float32, bfloat16, float16")
    ] = None,
    lookups: Annotated[
        bool, Option("--lookups", help="also chains that lookups speed up, on either side")
    ] = False,
    name: Annotated[str | None, Option(help="name of the result's folder")] = None,
) -> None:
    """Decode the same prompts with chains of each K in a process of one thread and in one of two,
    and with the draft on a device of its own, in turns; and draw what draft and target do when.
    Run it on an otherwise idle machine."""
    if name is not None and (name in ("", "..") or Path(name).name != name):
        raise UserError(f"--name {name}: expected a folder's name, not a path")
    spec = chosen_pair(PairSpec(), target, draft)
    if not spec.drafts:
        raise UserError("the pair has no draft model: give one with --draft")
    types = given(compile=compile, target_dtype=dtype, draft_dtype=dtype)
    spec = spec.model_copy(update={"runner": spec.runner.model_copy(update=types)})
    sampling = Sampling(temperature=parse(Temperature, temperature, "--temperature"))
    chains, pearl = (
        [Configuration(drafter=drafter, sampling=sampling) for drafter in drafters]
        for drafters in (
            _chains(spec.drafts, sizes(lengths, "--lengths"), lookups),
            _beside(spec.drafts, window, lookups),
        )
    )

    # Ray, torch and MLflow take seconds to import.
    from cluster.overlap import compare_overlap
    from cluster.placement import Placement
    from cluster.session import get, ray_session
    from dashboards.overlap import findings, race_section, timeline_section
    from dashboards.throughput import document, page
    from specdec_core.base.files import write_atomically
    from specdec_core.drafting.pearl.timeline import Timeline
    from specdec_core.models.pair import check_pair
    from specdec_core.prompts.prompt_sets import load_prompts

    placement = Placement.load(cluster)
    found = load_prompts(prompts, limit, check_pair(spec))
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn())
    with (
        Progress(
            *columns, TimeElapsedColumn(), console=console, transient=True, refresh_per_second=1
        ) as progress,
        ray_session(),
    ):
        task = progress.add_task("", total=1)
        result = compare_overlap(
            spec,
            placement,
            chains,
            pearl,
            lambda bench: get(bench.requests.remote(found, max_new_tokens)),
            repeats,
            lambda what, done, total: progress.update(
                task, description=what, completed=done, total=total
            ),
        )
    sections = [race_section(result), timeline_section(result)]
    runner = result.spec.runner
    lines = [
        *findings(result),
        f"{len(found)} prompts of {prompts}, {max_new_tokens} new tokens, {repeats} repeats in"
        f" turns; {runner.device}, target {runner.target_dtype}, draft {runner.draft_dtype}",
    ]
    folder = workspace() / "overlap" / (name or spec.name)
    title = f"Drafting beside the target: {spec.name}"
    for section in sections:
        write_atomically(folder / f"{section.key}.csv", section.frame.to_csv(index=False))
        console.print(section.rich())
    timeline = Timeline()
    timeline.spans.extend(result.spans)
    write_atomically(folder / "trace.json", json.dumps(timeline.chrome_trace()))
    write_atomically(folder / "report.md", document(title, lines, sections))
    write_atomically(folder / "report.html", page(title, spec.name, lines, sections, "overlap"))
    for line in lines:
        console.print(line, soft_wrap=True, markup=False)
    console.print(f"report    {folder / 'report.html'}", soft_wrap=True)


def _chains(
    drafts: Iterable[str], lengths: Iterable[int], lookups: bool
) -> Iterator[DrafterSettings]:
    """Drafting and verifying in turns."""
    for draft, length in product(drafts, lengths):
        policy = FixedSettings(max_tokens=length)
        chain = DraftModelSettings(draft=draft, policy=policy)
        yield from _with_lookups(chain, CascadeSettings(draft=draft, policy=policy), lookups)


def _beside(drafts: Iterable[str], window: int, lookups: bool) -> Iterator[DrafterSettings]:
    """Drafting while the target verifies."""
    for draft in drafts:
        policy = FixedSettings(max_tokens=window)
        chain = DraftModelSettings(draft=draft, policy=policy)
        cascade = CascadeSettings(draft=draft, policy=policy)
        alone, sped_up = (PearlSettings(drafter=own, window=window) for own in (chain, cascade))
        yield from _with_lookups(alone, sped_up, lookups)
        yield PearlSettings(drafter=chain, window=window, wait=0)
        yield PearlSettings(drafter=chain, window=window, width=4)


def _with_lookups(
    chain: DrafterSettings, sped_up: DrafterSettings, lookups: bool
) -> Iterator[DrafterSettings]:
    """A chain by itself; and by a draft that a lookup speeds up, that one only where the target's
    text does not repeat itself, and with what is found there as a branch."""
    yield chain
    if lookups:
        yield sped_up
        for merge in (False, True):
            yield HybridSettings(otherwise=sped_up, merge=merge)


if __name__ == "__main__":
    run(main)
