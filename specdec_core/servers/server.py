"""The protocol of a server, and the values that it takes and gives."""

from __future__ import annotations

import os
import shlex
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Literal, NamedTuple

from specdec_core.base.errors import UserError
from specdec_core.base.files import write_atomically
from specdec_core.config import (
    Configuration,
    DrafterSettings,
    PairConfiguration,
    PairSpec,
    RunnerSettings,
    draft_named,
)
from specdec_core.drafting.draft_model.settings import DraftModelSettings
from specdec_core.drafting.policies.fixed import FixedSettings
from specdec_core.drafting.prompt_lookup import Occurrence, PromptLookupSettings

if TYPE_CHECKING:
    from specdec_core.cost import Profile
    from specdec_core.models.pair import Pair
    from specdec_core.servers.peer import Peer
    from specdec_core.servers.process import Lacks, ServerProcess

_KINDS = {"model": "draft model", "eagle3": "EAGLE-3"}  # of drafts, in names of modes
DraftKind = Literal["model", "eagle", "eagle3", "other"]
Stage = Literal["plug_in", "bench", "serve", "profile"]


class DraftFile(NamedTuple):
    """A draft as another program finds it: its folder or hub id, and its kind. `eagle` is a head of
    EAGLE or EAGLE-2; the program does not read the kind `other`, and `refused` may give the reason.
    A `padded` model has the target's tokens, but a different number of logits. An EAGLE-3 head
    reads the inputs of the target's `layers`; a program that is not told them may get none."""

    place: str
    kind: DraftKind
    padded: bool = False
    refused: str | None = None
    layers: tuple[int, ...] = ()


@dataclass(frozen=True)
class Models:
    """A pair's models as another program finds them; the first draft is the default."""

    target: str
    drafts: Mapping[str, DraftFile]

    def draft(self, name: str | None) -> DraftFile:
        """The draft of this name, or the first one. Raises :class:`UserError` where there is no
        such draft."""
        return self.drafts[draft_named(self.drafts, name, "drafter.draft")]


@dataclass(frozen=True)
class Counterpart:
    """The settings of a server for a drafter, and remarks on how its behaviour differs from
    ours."""

    settings: Mapping[str, Any]
    remarks: tuple[str, ...] = ()


USAGE = "usage.txt"


@dataclass(frozen=True)
class WrittenFiles:
    """Files by their names, and the lines that use them from their folder."""

    files: Mapping[str, str]
    usage: str

    def save(self, folder: Path) -> None:
        """Write them, and the lines to :data:`USAGE`."""
        for name, text in {**self.files, USAGE: self.usage + "\n"}.items():
            write_atomically(folder / name, text)


@dataclass(frozen=True)
class Mode:
    """A way to start a server: its name in tables and its settings, as in :class:`Counterpart`.

    Attributes:
        draft: the draft of the pair that it runs
        configuration: the configuration that its settings are the counterpart of, if it is known
        plug_in: the configuration that our plug-in drafts by
        with_ours: whether it has settings or a plug-in of this library
    """

    name: str
    settings: Mapping[str, Any]
    draft: str | None = None
    configuration: Configuration | None = None
    plug_in: Configuration | None = None
    with_ours: bool = False

    @property
    def autoregressive(self) -> bool:
        return not self.settings and self.plug_in is None


@dataclass(frozen=True)
class ServedMode:
    """A mode as an HTTP server with OpenAI's routes. `command(requests, port)` starts it on a port
    of this machine, to decode up to `requests` requests together, with the variables
    `environment`. `settings` are its engine's for one request. `lacks` is as of
    :class:`ServerProcess`."""

    version: str
    settings: dict[str, Any]
    command: Callable[[int, int], Sequence[str]]
    environment: Mapping[str, str]
    lacks: Lacks | None = None

    def process(self, name: str, requests: int, log: Path | None = None) -> ServerProcess:
        """Its process, which decodes up to `requests` requests together and is called `name`."""
        from specdec_core.servers.process import ServerProcess  # plug-ins run without httpx

        return ServerProcess(
            name, lambda port: self.command(requests, port), self.environment, log, self.lacks
        )

    def shown(self, requests: int, port: int) -> str:
        """The shell's command for it, with the variables that differ from this process's."""
        here = os.environ
        unset = [
            word for name in sorted(here.keys() - self.environment.keys()) for word in ("-u", name)
        ]
        own = sorted(self.environment.items())
        changed = [f"{name}={value}" for name, value in own if here.get(name) != value]
        variables = ["env", *unset, *changed] if unset or changed else []
        return shlex.join([*variables, *self.command(requests, port)])


class Server(ABC):
    """A program that decodes speculatively.

    Every server has settings for some of our drafters. It takes part in further `stages` as it
    declares them: `plug_in` (our drafters run inside it), `bench` (this library starts it and
    decodes single requests), `serve` (this library starts its HTTP server), `profile` (its steps
    are timed). The methods of a stage are called only on servers that
    :func:`specdec_core.servers.table.server_of` gives for the stage.
    """

    name: ClassVar[str]  # as --to takes it
    title: ClassVar[str]
    version: ClassVar[str]  # with these settings
    stages: ClassVar[frozenset[Stage]] = frozenset()
    files: ClassVar[tuple[str, ...]] = ()  # that may be written for it
    verified: ClassVar[bool] = False  # whether tests run the settings in the program itself
    heads: ClassVar[Literal["speculators", "specforge"] | None] = None  # format of EAGLE heads
    told_layers: ClassVar[bool] = False  # whether its settings have the layers that a head reads
    gguf: ClassVar[bool] = False  # whether it reads GGUF files
    eagle: ClassVar[bool] = False  # whether it loads heads of the first generation, too
    occurrence: ClassVar[Occurrence] = "latest"  # of an n-gram, after which its lookups copy
    both_occurrences: ClassVar[bool] = False  # whether it has settings for either occurrence
    measures: ClassVar[bool] = False  # whether its plug-in measures what a target forward costs

    # Settings

    @abstractmethod
    def settings_for(self, drafter: DrafterSettings, models: Models) -> Counterpart | None:
        """The counterpart of a drafter; None if it has none."""

    def counterpart(self, drafter: DrafterSettings | None, models: Models) -> Counterpart | None:
        """The counterpart of a drafter or of decoding without one; None if it has none."""
        return Counterpart({}) if drafter is None else self.settings_for(drafter, models)

    @abstractmethod
    def written(self, counterpart: Counterpart, models: Models) -> WrittenFiles:
        """The counterpart as the program reads it."""

    def with_more(self, counterpart: Counterpart, more: Mapping[str, Any]) -> Counterpart:
        """The counterpart with further settings, which no drafter decides. Raises
        :class:`UserError` for settings that the server does not have with it."""
        raise UserError(f"--set: no further settings of {self.title} are known")

    def other_matches(self, drafter: PromptLookupSettings) -> tuple[str, ...]:
        """The remark where its lookups copy after another occurrence than ours."""
        if drafter.occurrence == self.occurrence:
            return ()
        return (
            f"copies after an n-gram's {self.occurrence} occurrence, not the {drafter.occurrence}",
        )

    # Stage plug_in

    def check_plug_in(self, configuration: Configuration, drafts: Iterable[DraftFile]) -> None:
        """Raises :class:`UserError` for a configuration that the plug-in cannot draft by; `drafts`
        are those that it runs."""
        raise NotImplementedError

    def plug_in_settings(self, configuration: Configuration) -> dict[str, Any]:
        """The program's settings beside the plug-in's file."""
        return {}

    def plugged_in(
        self, configuration: Configuration, models: Models, runner: RunnerSettings
    ) -> WrittenFiles:
        """The configuration for the plug-in; `runner` says how its draft models run. Raises
        :class:`UserError` as :meth:`check_plug_in` does."""
        raise NotImplementedError

    def plug_in_mode(self, configuration: Configuration, name: str) -> Mode:
        """The program with the plug-in."""
        settings = self.plug_in_settings(configuration)
        return Mode(
            name, settings, configuration=configuration, plug_in=configuration, with_ours=True
        )

    # Stages bench and serve

    def modes(self, pair: Pair, served: bool = False) -> list[Mode]:
        """The modes that it is compared in, autoregressive decoding first; under load, `served`,
        fewer, because each mode starts a server at each load."""
        raise NotImplementedError

    def missing(self, settings: Mapping[str, Any]) -> str | None:
        """A line on what the program with some settings needs and is not installed; None where it
        can start."""
        return None

    def peers(self, pair: Pair, modes: Sequence[Mode]) -> list[Peer]:
        """A peer for each mode, not yet open."""
        raise NotImplementedError

    def served(self, pair: Pair, mode: Mode, cores: Sequence[int], folder: Path) -> ServedMode:
        """A mode as an HTTP server, with its compute threads bound to `cores`, one each. Its files
        are in `folder`, which must last as long as the server does. Raises :class:`UserError`
        where the program is not installed."""
        raise NotImplementedError

    def answering(self, layers: Sequence[int]) -> Mode:
        """The mode whose answers are recorded: without speculation and, where EAGLE heads draft,
        with the hidden states of the target's `layers`. Raises :class:`UserError` for a server that
        does not give them."""
        if layers:
            raise UserError(
                f"{self.title}: gives no hidden states, which EAGLE heads read; run specdec record"
                " before, with the target's weights"
            )
        return Mode(self.title, {})

    def in_production(self, command: Sequence[str], model: str, devices: int) -> list[str]:
        """A mode's command for production: with the name of the model for clients, the number of
        devices that share the target, its metrics and its prefix cache. Raises :class:`UserError`
        for several devices."""
        if devices > 1:
            raise UserError(f"{self.title}: how it shares a target between devices is not known")
        return [*command]

    # Stage profile

    def profile(self, pair: Pair, **sizes: Any) -> Profile:
        """The times of its steps by `widths`, `contexts` and `batches`, or by the server's default
        sizes, measured `repeats` times; an `observer` follows. Raises :class:`UserError` where it
        does not run, or sizes do not fit."""
        raise NotImplementedError

    def mode_of(self, configuration: Configuration, models: Models) -> Mode:
        """The mode for a configuration (:meth:`find_mode`). Raises :class:`UserError` where it has
        none, where what it needs is not installed, and where its plug-in would lack a cost."""
        name = f"{self.title}, {configuration.label}"
        mode, reason = self.find_mode(configuration, models, name)
        if mode is None:
            raise UserError(reason)
        if mode.plug_in is not None and not self.measures:
            check_priced(mode.plug_in, self.title)
        return mode

    def find_mode(
        self, configuration: Configuration, models: Models, name: str
    ) -> tuple[Mode | None, str | None]:
        """The mode for a configuration, which is called `name`: with its counterpart, else with
        the plug-in. Also why it is not with the counterpart, where that needs what is not
        installed, or why there is no mode."""
        if (reason := self.missing({})) is not None:
            return None, f"{self.title}: {reason}"
        counterpart = self.counterpart(configuration.drafter, models)
        if counterpart is not None and configuration.lossless:
            draft, settings = configuration.draft_of(models.drafts), counterpart.settings
            if (reason := self.missing(settings)) is None:
                return Mode(name, settings, draft, configuration, with_ours=True), None
        if "plug_in" not in self.stages:
            lacks = f"{self.title} has no counterpart of {configuration.label}"
            return None, lacks if reason is None else f"{self.title}: {reason}"
        try:
            self.check_plug_in(configuration, configuration.drafts_of(models.drafts).values())
        except UserError as error:
            return None, str(error)
        return self.plug_in_mode(configuration, f"{name}, by plug-in"), reason

    def compared_drafters(
        self, models: Models, lengths: Mapping[str, Sequence[int]], ngram: int
    ) -> dict[str, DrafterSettings | None]:
        """What modes are compared, by their names: none, chains of the drafts, and lookups of up to
        `ngram` tokens. `lengths` are by the kind of a draft and, of lookups, at `lookup`."""
        drafters: dict[str, DrafterSettings | None] = {self.title: None}
        for name, draft in models.drafts.items():
            for k in lengths.get(draft.kind, ()):
                chain = DraftModelSettings(draft=name, policy=FixedSettings(max_tokens=k))
                drafters[f"{self.title} {_KINDS[draft.kind]} K={k}, {name}"] = chain
        for k in lengths["lookup"]:
            drafters[f"{self.title} n-gram K={k}"] = PromptLookupSettings(
                min_ngram=2, max_ngram=ngram, max_tokens=k, occurrence=self.occurrence
            )
        return drafters

    def compared(
        self, drafters: Mapping[str, DrafterSettings | None], models: Models
    ) -> list[Mode]:
        """The modes of drafters that it has a counterpart of, by their names."""
        modes = []
        for name, drafter in drafters.items():
            counterpart = self.counterpart(drafter, models)
            if counterpart is not None:
                configuration = Configuration(drafter=drafter)
                draft = configuration.draft_of(models.drafts)
                modes.append(Mode(name, counterpart.settings, draft, configuration))
        return modes


def check_priced(configuration: Configuration, program: str) -> None:
    """Raises :class:`UserError` for a configuration that asks `program` for a cost."""
    if configuration.unpriced:
        raise UserError(
            f"{configuration.label}: policy.target_cost: profile: {program} has no profile; give a"
            " number, as `specdec export --plugin` does"
        )


PLUG_IN_FILE = "specdec.yaml"


def plug_in_file(
    configuration: Configuration, models: Models, runner: RunnerSettings
) -> dict[str, str]:
    """The file that plug-ins read, by its name; it names the models by where they are."""
    drafts = {name: d.place for name, d in configuration.drafts_of(models.drafts).items()}
    pair = PairSpec(target=models.target, drafts=drafts, runner=runner)
    return {PLUG_IN_FILE: PairConfiguration(pair=pair, configuration=configuration).to_yaml()}
