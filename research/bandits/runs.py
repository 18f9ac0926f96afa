"""Comparing bandits with their arms on prompts or on a recording, and saving the comparison."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

from research.bandits.comparison import ArmComparison, ArmsPlan, mixed, race, replay_all, state_name
from specdec_core.base.files import write_atomically
from specdec_core.base.observer import Observer
from specdec_core.engine.turns import requests_of
from specdec_core.measure.forward_times import forward_times
from specdec_core.models.pair import load_pair
from specdec_core.prompts.prompt_sets import load_prompts
from specdec_core.recordings.replay import Replay
from specdec_core.recordings.schema import Recording


def race_prompts(
    plan: ArmsPlan,
    sources: Sequence[str],
    chat_template: str,
    limit: int,
    max_new_tokens: int,
    repeats: int,
    slots: int,
    observer: Observer,
) -> tuple[ArmComparison, str]:
    """Decode the first `limit` prompts of each of `sources` in turn; returns the comparison and a
    description of what was decoded."""
    observer.stage(f"loading {plan.pair.name}")
    pair = load_pair(plan.pair)
    sets = [load_prompts(source, limit, pair.tokenizer, chat_template) for source in sources]
    tokens = [r.tokens for r in requests_of(list(mixed(sets)), pair, max_new_tokens)]
    comparison = race(pair, plan, tokens, max_new_tokens, repeats, slots, observer)
    runner = pair.spec.runner
    return comparison, (
        f"{plan.pair.name}: {len(tokens)} prompts of {', '.join(sources)}, {max_new_tokens} new "
        f"tokens, {repeats} repeats, {slots} at a time; {runner.device}, target "
        f"{runner.target_dtype}, draft {runner.draft_dtype}, threads {runner.threads}"
    )


def replay_recording(
    recording: Recording,
    plan: ArmsPlan,
    profile: Path | None,
    observer: Observer,
) -> tuple[ArmComparison, str]:
    """Replay a recording of the plan's pair and sampling; returns the comparison and a description
    of what was replayed. :func:`forward_times` gives the times."""
    header = recording.header
    configurations = [entrant.configuration for entrant in plan.entrants]
    times = forward_times(header.pair, configurations, profile, observer, header.fingerprints)
    comparison = replay_all(Replay(recording, profile=times), plan, times, observer)
    return comparison, (
        f"{recording.folder.name}: replayed, {header.prompts.count} prompts of "
        f"{header.prompts.label}, {header.max_new_tokens} new tokens; times modelled for "
        f"{times.device}"
    )


def save(comparison: ArmComparison, folder: Path) -> list[Path]:
    """Write the bandits' states; returns the files."""
    return [
        write_atomically(
            folder / state_name(bandit.configuration),
            json.dumps(bandit.state, ensure_ascii=False, indent=1),
        )
        for bandit in comparison.of("bandit")
        if bandit.state is not None
    ]
