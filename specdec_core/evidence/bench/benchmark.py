"""The benchmark from plan to result: load, and race at every temperature.

It runs in the calling process, on a laptop or as the driver of a Ray job: one process decodes
alone, so there is nothing to distribute."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from datetime import UTC, datetime
from functools import partial
from pathlib import Path
from typing import Any, Self

from pydantic import Field, PositiveInt

from specdec_core.base.environment import environment
from specdec_core.base.errors import UserError
from specdec_core.base.observer import SILENT, Observer
from specdec_core.config import (
    AUTOREGRESSIVE,
    Configuration,
    PairSpec,
    Placement,
    Sampling,
    Temperature,
    Value,
    distinct_labels,
    load_yaml,
    overridden,
    parse,
)
from specdec_core.drafting.trained import trained_digests
from specdec_core.engine import Engine
from specdec_core.evidence.bench.race import (
    BenchContestant,
    EngineContestant,
    PeerContestant,
    race,
)
from specdec_core.evidence.bench.result import BenchResult, Take
from specdec_core.measure.parts import Parts
from specdec_core.models.pair import Pair
from specdec_core.prompts.conversation import Conversation, conversations
from specdec_core.prompts.prompt_sets import Prompt
from specdec_core.prompts.source import PromptSource
from specdec_core.search.plan import Plan
from specdec_core.servers.plug_in_drafter import check_chains
from specdec_core.servers.server import Mode
from specdec_core.servers.table import names_of, server_of

# What a benchmark's file does not decide.
_BY_OPTIONS = {
    "pair": "--target and --draft, or --config",
    "chosen": "--config",
    "cluster": "`bench offline --cluster`",
}


class BenchPlan(Value):
    """What to measure.

    `rows` are configurations of this engine, in the grammar of a sweep's `search`: a list of values
    means a row for each, and an entry that names no draft a row for each of the pair's. `chosen`
    are further, whole configurations, such as a champion. `peers` are other libraries, which also
    run this library's plug-in with each of `plug_ins`, written like `rows`. `only`, where there are
    any, are parts of the names to measure beside this engine's autoregressive decoding. `cluster`:
    the devices of the pair's models, where they have some of their own.
    """

    pair: PairSpec = PairSpec()
    prompts: PromptSource = PromptSource(limit=16)
    max_new_tokens: PositiveInt = 128
    repeats: PositiveInt = 3
    temperatures: tuple[Temperature, ...] = Field(default=(0.0,), min_length=1)
    peers: tuple[str, ...] = Field(default_factory=partial(names_of, "bench"))
    rows: tuple[dict[str, Any], ...] = ()
    plug_ins: tuple[dict[str, Any], ...] = ()
    chosen: tuple[Configuration, ...] = ()
    only: tuple[str, ...] = ()
    cluster: Placement | None = None

    @classmethod
    def load(cls, path: Path, **overrides: Any) -> Self:
        """Read a benchmark's file; `overrides` replace its top-level values
        (:func:`specdec_core.config.overridden`). Raises :class:`UserError` for anything wrong in
        it."""
        content = load_yaml(path)
        if not isinstance(content, dict):
            raise UserError(f"{path}: expected a mapping with rows in it")
        for name, option in _BY_OPTIONS.items():
            if name in content:
                raise UserError(f"{path}: {name}: given by {option}")
        plan = parse(cls, overridden(content, overrides), str(path))
        plan.configurations(str(path))
        plan.plugged_in(str(path))
        return plan

    def wants(self, name: str) -> bool:
        """Whether what has that name is to be measured."""
        return not self.only or any(part in name for part in self.only)

    def wanted(self, source: str = "bench") -> dict[str, Configuration]:
        """This engine's rows that are measured, by their names; errors as for
        :meth:`configurations`."""
        named = distinct_labels(configurations := self.configurations(source))
        return {
            named[c.id]: c for c in configurations if c.drafter is None or self.wants(named[c.id])
        }

    def configurations(self, source: str = "bench") -> list[Configuration]:
        """This engine's rows, autoregressive decoding first, each once; the race sets their
        sampling. Raises :class:`UserError`, naming `source`, for malformed or lossy ones."""
        configurations = [AUTOREGRESSIVE, *self.chosen]
        if self.rows:
            plan = Plan(pair=self.pair, search=self.rows, cluster=self.cluster).resolve(source)
            configurations += plan.configurations or ()
        return self._checked(configurations, source)

    def plugged_in(self, source: str = "bench") -> list[Configuration]:
        """The configurations of the plug-ins, each once; errors as above, also for those that the
        plug-ins cannot draft by."""
        plan = Plan(pair=self.pair, search=self.plug_ins)
        if plan.empty:
            return []
        chosen = self._checked(plan.resolve(source).configurations or (), source)
        for configuration in chosen:
            check_chains(configuration, f"{source}: a plug-in")
        return chosen

    def weights(self, pair: Pair) -> dict[str, str]:
        """A digest of each of the pair's models, and of all that the plan's configurations read
        beside them."""
        return pair.fingerprints | trained_digests([*self.configurations(), *self.plugged_in()])

    def _checked(self, configurations: Sequence[Configuration], source: str) -> list[Configuration]:
        greedily = {"sampling": Sampling()}
        greedy = dict.fromkeys(each.model_copy(update=greedily) for each in configurations)
        for configuration in greedy:
            if not configuration.lossless:
                raise UserError(
                    f"{source}: {configuration.label} is lossy; a benchmark compares what writes"
                    " the same (`specdec lab drift` measures how far lossy drafting drifts)"
                )
            configuration.check_drafts(self.pair.drafts, f"{source}: {configuration.label}")
        return list(greedy)


def run_bench(
    plan: BenchPlan,
    prompts: Sequence[Prompt],
    pair: Pair,
    peers: Sequence[BenchContestant],
    name: str,
    command: str,
    observer: Observer = SILENT,
    parts: Parts[Take] | None = None,
) -> BenchResult:
    """Race this engine's rows on `pair` and `peers` at every temperature. Repeats that are in
    `parts` are not made again.

    Raises :class:`UserError` for prompts that do not fit.
    """
    texts = conversations(prompts, pair.tokenizer, plan.max_new_tokens, pair.max_length)
    facts = environment()
    engine = Engine(pair)
    version = f"specdec {facts.get('specdec', '')} {facts.get('git_commit', '')[:10]}".strip()
    ours = [EngineContestant(engine, c, version, name) for name, c in plan.wanted().items()]
    notes = [*_notes(texts), *(parts.notes if parts else [])]  # before further repeats are kept
    started = datetime.now(UTC)
    rows = race(
        [*ours, *peers],
        texts,
        plan.max_new_tokens,
        [Sampling(temperature=temperature) for temperature in plan.temperatures],
        plan.repeats,
        observer,
        parts,
    )
    return BenchResult(
        name=name,
        started=started,
        command=command,
        pair=pair.spec,
        prompts=plan.prompts.described(prompts),
        ids=[prompt.id for prompt in prompts],
        categories=[prompt.category for prompt in prompts],
        max_new_tokens=plan.max_new_tokens,
        repeats=plan.repeats,
        rows=rows,
        notes=notes,
        environment=facts,
    )


@contextmanager
def open_peers(
    plan: BenchPlan,
    pair: Pair,
    explicit: bool,
    observer: Observer = SILENT,
    ours: Mapping[str, Sequence[Mode]] | None = None,
) -> Iterator[list[PeerContestant]]:
    """The modes of a plan's libraries that it wants, started; closed at the end. `ours` are, by
    library, modes with settings or plug-ins of this library.

    A mode that does not start is left out with a warning; if it is the first of its library, all
    modes of that library are left out. If the user named the library (`explicit`), a
    :class:`UserError` is raised instead. It is also raised for a part of `only` that is in no name.
    """
    modes = {}
    for group in plan.peers:
        server = server_of(group, stage="bench", option="peers")
        modes[group] = [*server.modes(pair), *(ours or {}).get(group, ())]
    names = [*distinct_labels(plan.configurations()).values()]
    names += [mode.name for own in modes.values() for mode in own]
    for part in plan.only:
        if not any(part in name for name in names):
            raise UserError(f"--only {part}: no name contains it (they are: {', '.join(names)})")
    with ExitStack() as opened:
        contestants: list[PeerContestant] = []
        for group, own in modes.items():
            wanted = [mode for mode in own if plan.wants(mode.name)]
            if not wanted:
                continue
            observer.stage(f"loading {group}", len(wanted))
            peers = server_of(group).peers(pair, wanted)
            for mode, peer in zip(wanted, peers, strict=True):
                try:
                    ready = opened.enter_context(peer)
                except UserError as error:
                    if explicit:
                        raise
                    first = mode is wanted[0]
                    observer.warned(f"without {group if first else peer.name}: {error}")
                    if first:
                        break
                else:
                    contestants.append(PeerContestant(ready, group, mode.autoregressive))
                observer.step()
        yield contestants


def _notes(texts: Sequence[Conversation]) -> list[str]:
    """How prompts with several turns are decoded."""
    several = [c for c in texts if len(c.prompt.turns) > 1]
    if not several:
        return []
    if any(conversation.turns > 1 for conversation in several):
        return [
            "Conversations are asked turn by turn in a chat template, each contestant behind its"
            " own answers; a prompt's time is that of all its turns."
        ]
    return [
        "Without a chat template, of prompts with several turns only the first is asked, its text"
        " as it stands."
    ]
