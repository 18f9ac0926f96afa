"""Measure throughput by batch size, choose K for each, and show what long contexts cost."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from typer import Option

from jobs.choice import read_choice
from jobs.console import console, run
from jobs.profile import chosen_pair, sizes
from specdec_core.base.errors import UserError
from specdec_core.base.workspace import workspace
from specdec_core.config import Configuration, PairSpec
from specdec_core.drafting.draft_model.settings import DraftModelSettings
from specdec_core.drafting.policies.fixed import FixedSettings

if TYPE_CHECKING:
    import pandas as pd

    from specdec_core.cost import Profile
    from specdec_core.models.pair import Pair
    from specdec_core.studies.throughput import Throughput, Tokens

NONE = "none"
_WIDTHS = (1, 2, 3, 5, 9, 17)  # of a profile that is measured here: chains of up to 16 candidates


def main(
    config: Annotated[
        Path | None,
        Option(
            help="YAML with `pair` and `configuration`, or the beginning of a configuration's id;"
            " it is measured beside the others."
        ),
    ] = None,
    target: Annotated[
        str | None, Option(help="Target model: hub id, folder or bundled:<name>.")
    ] = None,
    draft: Annotated[
        list[str] | None,
        Option(help="Draft model as [name=]<hub id, folder or bundled:…>; repeatable."),
    ] = None,
    prompts: Annotated[str, Option(help="JSONL file, hub id, bundled:…")] = "bundled:held_out",
    limit: Annotated[int, Option(min=1, help="Use the first n prompts.")] = 24,
    max_new_tokens: Annotated[int, Option(min=2, help="Tokens for each prompt.")] = 64,
    slots: Annotated[str, Option(help="Requests decoded together, as 1,4,16.")] = "1,2,4,8,16",
    lengths: Annotated[
        str | None, Option(help="K of fixed chains to measure; unset, those that the plan names.")
    ] = None,
    queues: Annotated[int, Option(min=1, help="Queues for each number of slots.")] = 2,
    repeats: Annotated[int, Option(min=1, help="Times each queue is decoded.")] = 3,
    profile: Annotated[
        Path | None, Option(help="The pair's forward times (JSON); unset, they are measured.")
    ] = None,
    contexts: Annotated[
        str | None,
        Option(help="Tokens in the cache, as 128,1024; `none` leaves this part out."),
    ] = None,
    name: Annotated[str | None, Option(help="Name of the result's folder.")] = None,
) -> None:
    """Decode queues of prompts greedily with 1, 2, 4, … requests at a time, autoregressively, with
    fixed K, and with the K that is best for each number of requests by the profile; and time
    forwards and rounds by context. Run it on an otherwise idle machine."""
    if name is not None and (name in ("", "..") or Path(name).name != name):
        raise UserError(f"--name {name}: expected a folder's name, not a path")
    if config is not None and (target is not None or draft):
        raise UserError("--config names the pair: give no --target and no --draft")
    counts = sizes(slots, "--slots")
    fixed = sizes(lengths, "--lengths") if lengths is not None else None
    asked = sizes(contexts, "--contexts") if contexts not in (None, NONE) else None
    choice = read_choice(config)[0] if config is not None else None
    spec = choice.pair if choice is not None else chosen_pair(PairSpec(), target, draft)
    if not spec.drafts:
        raise UserError("the pair has no draft model: give one with --draft")

    # torch and MLflow take seconds to import.
    from dashboards import throughput as shown
    from specdec_core.base.files import write_atomically
    from specdec_core.cost import Profile
    from specdec_core.models.pair import load_pair
    from specdec_core.prompts.prompt_sets import digest, load_prompts

    times = Profile.load(profile) if profile is not None else None
    with console.status(f"loading {spec.name}"):
        pair = load_pair(spec)
    found = load_prompts(prompts, limit, pair.tokenizer)
    tokens = [tuple(pair.tokenizer(prompt.text)["input_ids"]) for prompt in found]
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn())
    with Progress(*columns, TimeElapsedColumn(), console=console, transient=True) as progress:
        times = times or measured_profile(pair, counts, progress)
        predicted, best, plan = planned(pair, times, tokens, counts, max_new_tokens, progress)
        wanted = configurations(pair, plan, best, counts, fixed)
        if choice is not None:
            wanted.append(choice.configuration)
        result = raced(pair, wanted, tokens, counts, repeats, queues, max_new_tokens, progress)
        table = None
        if contexts != NONE:
            table = by_context(pair, [t for own in tokens for t in own], asked, plan, progress)

    sections = [shown.throughput_section(result), shown.plan_section(predicted, best)]
    if table is not None:
        sections.append(shown.contexts_section(table))
    runner = pair.spec.runner
    notes = [
        *shown.paying(result),
        *(shown.beside_fixed(result, plan) if plan is not None else ()),
        f"{len(found)} prompts of {prompts}, {max_new_tokens} new tokens, queues of 3 requests for"
        f" each slot, {queues} queues, {repeats} repeats",
        f"{runner.device}, target {runner.target_dtype}, draft {runner.draft_dtype}, threads"
        f" {runner.threads}",
    ]
    for section in sections:
        console.print(section.rich())
    for note in notes:
        console.print(note, soft_wrap=True, markup=False)
    if plan is None:
        console.print("best: draft nothing, at every number of slots")
    else:
        console.print("to paste (a configuration whose K follows the batch):\n")
        console.print(plan.to_yaml(), markup=False)

    folder = workspace() / "throughput" / (name or spec.name)
    title = f"Throughput of {spec.name}"
    for section in sections:
        write_atomically(folder / f"{section.key}.csv", section.frame.to_csv(index=False))
    write_atomically(folder / "runs.csv", result.frame().to_csv(index=False))
    write_atomically(folder / "throughput.md", shown.document(title, notes, sections))
    write_atomically(folder / "throughput.html", shown.page(title, spec.name, notes, sections))
    times.save(folder / "profile.json")
    if plan is not None:
        write_atomically(folder / "plan.yaml", plan.to_yaml())
    params = {
        "prompts": prompts,
        "prompts_digest": digest(found),
        "max_new_tokens": max_new_tokens,
        "slots": slots,
        "queues": queues,
        "repeats": repeats,
    }
    shown.log_throughput(spec.name, params, result, table, sections, plan, folder)
    console.print(f"figures   {folder / 'throughput.html'}", soft_wrap=True)


def measured_profile(pair: Pair, slots: Sequence[int], progress: Progress) -> Profile:
    """What forwards of the shapes that chains have cost at the batch sizes `slots`."""
    from specdec_core.studies.profiling import profile_pair

    task = progress.add_task("measuring forwards", total=None)
    return profile_pair(
        pair,
        _WIDTHS,
        batches=slots,
        repeats=5,
        on_step=lambda done, total: progress.update(task, completed=done, total=total),
    )


def planned(
    pair: Pair,
    profile: Profile,
    prompts: Sequence[Tokens],
    slots: Sequence[int],
    new_tokens: int,
    progress: Progress,
) -> tuple[pd.DataFrame, dict[int, int], Configuration | None]:
    """What the profile expects of every K at every number of requests up to the largest of `slots`,
    the best K of each, and the configuration that follows them; all with the draft that is best on
    average. None where nothing should be drafted."""
    from specdec_core.engine.engine import Engine, Request
    from specdec_core.search.batch_plan import (
        LENGTHS,
        agreement,
        batch_policy,
        best_lengths,
        chain_counts,
        predict,
    )

    task = progress.add_task("reading the target's own text", total=len(prompts))
    requests = [Request(str(n), own, new_tokens) for n, own in enumerate(prompts)]
    generations = Engine(pair, slots=max(slots)).generate(
        requests, on_finish=lambda _: progress.advance(task)
    )
    outputs = [generation.tokens for generation in generations]
    context = sum(map(len, prompts)) / len(prompts) + new_tokens / 2
    tables = {}
    for name, model in pair.drafts.items():
        agreeing = agreement(model, prompts, outputs)
        counts = {k: chain_counts(agreeing, k) for k in LENGTHS if k < new_tokens}
        tables[name] = predict(profile, counts, range(1, max(slots) + 1), name, context)
    reached = {n: own.groupby("batch")["speedup"].max().mean() for n, own in tables.items()}
    name = max(reached, key=reached.get)
    best = best_lengths(tables[name])
    policy = batch_policy(best)
    plan = None
    if policy is not None:
        plan = Configuration(drafter=DraftModelSettings(draft=name, policy=policy))
    table = tables[name]
    return table[table["batch"].isin(slots)].reset_index(drop=True), best, plan


def configurations(
    pair: Pair,
    plan: Configuration | None,
    best: dict[int, int],
    slots: Sequence[int],
    fixed: Sequence[int] | None,
) -> list[Configuration]:
    """The plan and, with its draft, chains of the K in `fixed`, or of those that it names for
    `slots`."""
    draft = plan.draft if plan is not None else next(iter(pair.drafts))
    lengths = fixed or sorted({best[count] for count in slots} - {0})
    chains = [
        Configuration(drafter=DraftModelSettings(draft=draft, policy=FixedSettings(max_tokens=k)))
        for k in lengths
    ]
    return [*([plan] if plan is not None else []), *chains]


def raced(
    pair: Pair,
    wanted: Sequence[Configuration],
    prompts: Sequence[Tokens],
    slots: Sequence[int],
    repeats: int,
    queues: int,
    new_tokens: int,
    progress: Progress,
) -> Throughput:
    """Everybody on the same queues, in turns."""
    from specdec_core.studies.throughput import measure_throughput

    total = (len({c.id for c in wanted}) + 1) * len(set(slots)) * repeats * queues
    task = progress.add_task("", total=total)

    def begun(count: int, configuration: Configuration) -> None:
        progress.update(task, description=f"{count} slots, {configuration.label}")
        progress.advance(task)

    return measure_throughput(pair, wanted, prompts, slots, repeats, queues, new_tokens, begun)


def by_context(
    pair: Pair,
    text: Sequence[int],
    asked: Sequence[int] | None,
    plan: Configuration | None,
    progress: Progress,
) -> pd.DataFrame:
    """Forwards and rounds at the contexts `asked`, or at as many of the usual ones as the models
    hold."""
    from specdec_core.studies.long_context import CONTEXTS, measure_contexts, room_for

    room = room_for(asked or CONTEXTS)
    runner = pair.spec.runner
    longer = runner.model_copy(update={"max_length": max(runner.max_length, room)})
    pair = replace(pair, spec=pair.spec.model_copy(update={"runner": longer}))
    fitting = [c for c in CONTEXTS if room_for((c,)) <= pair.max_length]
    task = progress.add_task("measuring contexts", total=None)
    return measure_contexts(
        pair,
        text,
        asked or fitting,
        plan.draft if plan is not None else None,
        on_step=lambda done, total: progress.update(task, completed=done, total=total),
    )


if __name__ == "__main__":
    run(main)
