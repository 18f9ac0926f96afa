"""The benchmark from plan to result: load, race at every temperature, measure the limits.

It runs in the process that was asked, on a laptop or as the driver of a Ray job: times are those of
one process that decodes alone, so there is nothing to distribute.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from pydantic import Field, PositiveInt

from specdec_core.base.environment import environment
from specdec_core.base.errors import UserError
from specdec_core.base.observer import Observer
from specdec_core.config import (
    AUTOREGRESSIVE,
    Configuration,
    PairSpec,
    Sampling,
    Temperature,
    Value,
    distinct_labels,
    load_yaml,
    parse,
)
from specdec_core.engine import Engine
from specdec_core.models.pair import Pair
from specdec_core.prompts.conversation import Conversation, conversations
from specdec_core.prompts.prompt_sets import Prompt, PromptSet, digest
from specdec_core.search.plan import Plan, PromptSource
from specdec_core.studies.bench.limits import ForwardClock, oracle_limits, widths_of
from specdec_core.studies.bench.race import Contestant, Other, Own, race, take
from specdec_core.studies.bench.result import BenchResult, Profiled, Row, fastest
from specdec_core.studies.peers.choose import NAMES, peers_of
from specdec_core.studies.time_shares import sample_stacks

PROFILED = 4  # prompts that are decoded once more to see where the time goes


class BenchPlan(Value):
    """What to measure.

    `rows` are configurations of this engine, in the grammar of a sweep's `search`: a list of values
    means a row for each, and what names no draft is tried with each of the pair's. `chosen` are
    whole configurations beside them, as a champion. `peers` are what people use instead.
    """

    pair: PairSpec = PairSpec()
    prompts: PromptSource = PromptSource(limit=16)
    max_new_tokens: PositiveInt = 128
    repeats: PositiveInt = 3
    temperatures: tuple[Temperature, ...] = Field(default=(0.0,), min_length=1)
    peers: tuple[str, ...] = NAMES
    rows: tuple[dict[str, Any], ...] = ()
    chosen: tuple[Configuration, ...] = ()

    def configurations(self, source: str = "bench") -> list[Configuration]:
        """This engine's rows, autoregressive decoding first, each once; the race says how they
        sample. Raises :class:`UserError`, naming `source`, for what is malformed or lossy."""
        found = [AUTOREGRESSIVE, *self.chosen]
        if self.rows:
            found += Plan(pair=self.pair, search=self.rows).resolve(source).configurations or ()
        greedy = {c.model_copy(update={"sampling": Sampling()}): None for c in found}
        for configuration in greedy:
            if not configuration.lossless:
                raise UserError(
                    f"{source}: {configuration.label} is lossy; a benchmark compares what writes"
                    " the same (`specdec drift` measures how far lossy drafting drifts)"
                )
            if (draft := configuration.foreign_draft(self.pair.drafts)) is not None:
                known = ", ".join(self.pair.drafts) or "none"
                raise UserError(
                    f"{source}: {configuration.label}: the pair has no draft {draft!r}"
                    f" (it has: {known})"
                )
        return list(greedy)


def load_bench_plan(path: Path, **overrides: Any) -> BenchPlan:
    """Read a benchmark's file; `overrides` replace its top-level values, a mapping key by key.
    Raises :class:`UserError` for anything wrong in it."""
    content = load_yaml(path)
    if not isinstance(content, dict):
        raise UserError(f"{path}: expected a mapping with rows in it")
    for key, value in overrides.items():
        old = content.get(key)
        content[key] = {**old, **value} if isinstance(old, dict) else value
    plan = parse(BenchPlan, content, str(path))
    plan.configurations(str(path))
    return plan


def run_bench(
    plan: BenchPlan,
    prompts: Sequence[Prompt],
    pair: Pair,
    others: Sequence[Contestant],
    name: str,
    command: str,
    tell: Observer | None = None,
) -> BenchResult:
    """Race this engine's rows on `pair` and `others` at every temperature.

    Raises :class:`UserError` for prompts that do not fit.
    """
    tell = tell or Observer()
    asked = conversations(prompts, pair.tokenizer, plan.max_new_tokens, pair.max_length)
    facts = environment()
    engine = Engine(pair)
    version = f"specdec {facts.get('specdec', '')} {facts.get('git_commit', '')[:10]}".strip()
    names = distinct_labels(configurations := plan.configurations())
    own = [Own(engine, c, version, names[c.id]) for c in configurations]
    contestants: list[Contestant] = [*own, *others]
    clock = ForwardClock(pair, _typical_context(asked, plan.max_new_tokens))
    rows: list[Row] = []
    for temperature in plan.temperatures:
        at = f" at temperature {temperature:g}" if len(plan.temperatures) > 1 else ""
        steps = len(contestants) * len(asked) * plan.repeats
        tell.stage(f"{len(contestants)} contestants in turns{at}", steps)
        rows += race(
            contestants,
            asked,
            plan.max_new_tokens,
            Sampling(temperature=temperature),
            plan.repeats,
            tell.step,
            lambda known: clock.measure(widths_of([r for r in known if r.ours], pair)),
        )
    forwards = clock.forwards()
    tell.stage("profiling our best, measuring the oracle")
    greedy = next((r for r in rows if r.ours and r.autoregressive and not r.temperature), None)
    return BenchResult(
        name=name,
        started=datetime.now(UTC),
        command=command,
        pair=pair.spec,
        prompts=PromptSet(source=plan.prompts.source, count=len(prompts), digest=digest(prompts)),
        ids=[prompt.id for prompt in prompts],
        categories=[prompt.category for prompt in prompts],
        max_new_tokens=plan.max_new_tokens,
        repeats=plan.repeats,
        rows=rows,
        forwards=forwards,
        oracles=oracle_limits(pair, _texts(asked, greedy), forwards) if greedy else [],
        profiled=profiled(own, rows, asked[:PROFILED], plan.max_new_tokens),
        notes=_notes(asked),
        environment=facts,
    )


def profiled(
    own: Sequence[Own], rows: Sequence[Row], prompts: Sequence[Conversation], new_tokens: int
) -> Profiled | None:
    """What the fastest of ours at the first temperature does while it decodes `prompts` again."""
    best = fastest([r for r in rows if r.ours and r.temperature == rows[0].temperature])
    if best is None:
        return None
    contestant = next(c for c in own if c.configuration == best.configuration)
    sampling = Sampling(temperature=best.temperature)

    def decode() -> None:
        for number, prompt in enumerate(prompts):
            take(contestant, prompt, new_tokens, sampling, seed=number)

    contestant.begin()
    stacks = sample_stacks(decode)
    return Profiled(
        contestant=best.name,
        temperature=best.temperature,
        seconds={";".join(stack): seconds for stack, seconds in stacks.items()},
    )


@contextmanager
def open_others(
    pair: Pair, names: Sequence[str], explicit: bool, tell: Observer | None = None
) -> Iterator[list[Other]]:
    """Every way of the libraries `names`, loaded; closed at the end.

    A library that cannot be used here is left out with a warning, or, if it was asked for by name
    (`explicit`), a :class:`UserError`.
    """
    tell = tell or Observer()
    with ExitStack() as everything:
        found: list[Other] = []
        for group in names:
            peers = peers_of(pair, [group])
            tell.stage(f"loading {group}", len(peers))
            with ExitStack() as own:
                opened = []
                try:
                    for number, peer in enumerate(peers):
                        # The first way of every library is its autoregressive decoding.
                        opened.append(Other(own.enter_context(peer), group, not number))
                        tell.step()
                except UserError as error:
                    if explicit:
                        raise
                    tell.warned(f"without {group}: {error}")
                    continue
                found += opened
                everything.enter_context(own.pop_all())
        yield found


def _typical_context(asked: Sequence[Conversation], new_tokens: int) -> int:
    """Tokens in the cache half-way through a first turn's output."""
    lengths = [len(conversation.tokens([])) for conversation in asked]
    return max(round(sum(lengths) / len(lengths) + new_tokens / 2), 1)


def _texts(asked: Sequence[Conversation], row: Row) -> list[tuple[tuple[int, ...], list[int]]]:
    """What a row wrote in its first repeat: prompt and output of every turn."""
    found = []
    for conversation, taken in zip(asked, row.takes[0], strict=True):
        answers: list[str] = []
        for output in taken.outputs:
            found.append((conversation.tokens(answers), output))
            answers.append(conversation.answer(output))
    return found


def _notes(asked: Sequence[Conversation]) -> list[str]:
    """What the reader should know of the prompts."""
    several = [c for c in asked if len(c.prompt.turns) > 1]
    if not several:
        return []
    if several[0].chat:
        return [
            "Conversations are asked turn by turn in the tokenizer's chat template, each"
            " contestant behind its own answers; a prompt's time is that of all its turns."
        ]
    return [
        "The tokenizer has no chat template: of prompts with several turns only the first is"
        " asked, its text as it stands."
    ]
