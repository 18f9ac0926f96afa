"""Measure throughput by batch size, choose K for each, and show what long contexts cost."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from typer import Option

from jobs.choice import read_config
from jobs.console import console, deliver, run
from jobs.options import (
    ChatTemplate,
    Drafts,
    Limit,
    MaxLength,
    Name,
    Prompts,
    Target,
    check_name,
    chosen_pair,
    sizes,
    with_draft,
)
from specdec_core.base.errors import UserError
from specdec_core.base.workspace import workspace
from specdec_core.config import PairSpec
from specdec_core.prompts.chat import AUTO

if TYPE_CHECKING:
    import pandas as pd

    from specdec_core.cost import Profile
    from specdec_core.studies.batch_choice import BatchChoice
    from specdec_core.studies.throughput import Throughput

NONE = "none"


def main(
    config: Annotated[
        Path | None,
        Option(
            help="YAML with `pair` and `configuration`, or the beginning of a configuration's id;"
            " it is measured with the others."
        ),
    ] = None,
    target: Target = None,
    draft: Drafts = None,
    prompts: Prompts = "bundled:held_out",
    chat_template: ChatTemplate = AUTO,
    limit: Limit = 24,
    max_new_tokens: Annotated[int, Option(min=2, help="New tokens for each prompt.")] = 64,
    max_length: MaxLength = None,
    slots: Annotated[str, Option(help="Requests decoded together, as 1,4,16.")] = "1,2,4,8,16",
    lengths: Annotated[
        str | None, Option(help="K of fixed chains to measure; unset, those of the plan.")
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
    name: Name = None,
) -> None:
    """Decode queues of prompts greedily with 1, 2, 4, … requests at a time, autoregressively, with
    fixed K, and with the K that is best for each number of requests by the profile; and time
    forwards and rounds by context. Run it on an otherwise idle machine."""
    check_name(name)
    if config is not None and (target is not None or draft or max_length is not None):
        raise UserError("--config names the pair: give no --target, --draft or --max-length")
    counts = sizes(slots, "--slots")
    fixed = sizes(lengths, "--lengths") if lengths is not None else None
    chosen_contexts = sizes(contexts, "--contexts") if contexts not in (None, NONE) else None
    choice = read_config(config)[0] if config is not None else None
    spec = with_draft(choice.pair if choice else chosen_pair(PairSpec(), target, draft, max_length))

    # torch and MLflow take seconds to import.
    from dashboards.progress import ConsoleProgress
    from specdec_core.engine.turns import requests_of
    from specdec_core.models.pair import load_pair
    from specdec_core.prompts.prompt_sets import digest, load_prompts
    from specdec_core.studies.batch_choice import choose_by_batch
    from specdec_core.studies.forward_times import load_profile
    from specdec_core.studies.long_context import at_contexts
    from specdec_core.studies.profiling import profile_chains
    from specdec_core.studies.throughput import measure_throughput

    times = load_profile(profile, spec) if profile is not None else None
    with console.status(f"loading {spec.name}"):
        pair = load_pair(spec)
    loaded = load_prompts(prompts, limit, pair.tokenizer, chat_template)
    tokens = [request.tokens for request in requests_of(loaded, pair, max_new_tokens)]
    with ConsoleProgress(console) as progress:
        times = times or profile_chains(pair, counts, progress)
        best = choose_by_batch(pair, times, tokens, counts, max_new_tokens, progress)
        plan = best.configuration
        chosen = [choice.configuration.greedily] if choice else []
        wanted = [*([plan] if plan else []), *best.chains(counts, fixed), *chosen]
        result = measure_throughput(
            pair, wanted, tokens, counts, repeats, queues, max_new_tokens, progress
        )
        by_context = None
        if contexts != NONE:
            by_context = at_contexts(pair, tokens, chosen_contexts, best.draft, progress)

    params = {
        "prompts": prompts,
        "chat_template": chat_template,
        "prompts_digest": digest(loaded),
        "max_new_tokens": max_new_tokens,
        "slots": slots,
        "queues": queues,
        "repeats": repeats,
    }
    _deliver(name or spec.name, pair.spec, len(loaded), params, times, best, result, by_context)


def _deliver(
    name: str,
    pair: PairSpec,
    prompts: int,
    params: dict[str, Any],
    times: Profile,
    best: BatchChoice,
    result: Throughput,
    by_context: pd.DataFrame | None,
) -> None:
    """Write the profile, the plan and the report, log them, and print the plan."""
    from dashboards.reports.throughput import report
    from dashboards.sections import Origin
    from specdec_core.base.files import write_atomically

    folder, plan = workspace() / "throughput" / name, best.configuration
    files = [times.save(folder / "profile.json")]
    if plan is not None:
        files.append(write_atomically(folder / "plan.yaml", plan.to_yaml()))
    notes = [
        f"{prompts} prompts of {params['prompts']}, {params['max_new_tokens']} new tokens, queues"
        f" of 3 requests for each slot, {params['queues']} queues, {params['repeats']} repeats",
        _machine(pair),
    ]
    origin = Origin(name=name, pair=pair.name, notes=notes, params=params)
    deliver(report(result, best, by_context, origin), folder, "throughput", files)
    if plan is not None:
        console.print("\nto paste (a configuration whose K follows the batch):\n")
        console.print(plan.to_yaml(), markup=False)


def _machine(pair: PairSpec) -> str:
    runner = pair.runner
    return (
        f"{runner.device}, target {runner.target_dtype}, draft {runner.draft_dtype}, threads"
        f" {runner.threads}"
    )


if __name__ == "__main__":
    run(main)
