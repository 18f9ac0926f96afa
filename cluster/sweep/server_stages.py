"""The stages of a sweep of a server: its answers, its step costs, the ranking, the races, and the
files of its champion."""

from __future__ import annotations

import re
import shutil
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime
from functools import cached_property
from pathlib import Path

from cluster.load.comparison import ServerContestant, compare_servers
from cluster.load.cores import Cores
from cluster.load.servers import mode_server
from cluster.recording import run_recording
from specdec_core.base.environment import environment
from specdec_core.base.errors import UserError
from specdec_core.base.files import write_atomically
from specdec_core.base.observer import Observer
from specdec_core.config import Configuration
from specdec_core.cost import Profile
from specdec_core.evidence.as_served import as_served
from specdec_core.evidence.load.plan import LoadPlan
from specdec_core.evidence.server_choice import (
    Expressed,
    ServerRace,
    ServerSweep,
    after_first_runs,
    best_at,
    best_of_all,
    by_load,
    contenders,
    defaults,
    express,
    finalists,
    joined,
)
from specdec_core.measure.forward_times import workspace_profile
from specdec_core.measure.parts import Parts, described
from specdec_core.models.pair import Pair
from specdec_core.prompts.prompt_sets import Prompt, PromptSet
from specdec_core.recordings.find import finished
from specdec_core.recordings.plan import RecordingPlan
from specdec_core.recordings.replay import Replay
from specdec_core.recordings.schema import Recording
from specdec_core.search.folder import SweepFolder
from specdec_core.search.load.decoded import can_simulate
from specdec_core.search.load.records import LoadRecord
from specdec_core.search.load.simulated import Simulated
from specdec_core.search.nearest import replayable
from specdec_core.search.plan import ResolvedPlan
from specdec_core.servers.answers import ServerAddress
from specdec_core.servers.model_files import models_in, placed
from specdec_core.servers.process import running
from specdec_core.servers.server import Counterpart, Mode, Server

CHAMPION = "champion"  # the folder of the files that start it
STARTED = "started"  # the folder of the files that the shown command reads
LOGS = "logs"  # the folder of what the servers print
PORT = 8000  # of the command that is shown
LEAST = 12  # requests under a load, where the plan says nothing: repeats tell more than requests
FIRST = 2  # waves of requests of the first runs, which have half of the least


@dataclass
class ServerStages:
    """A running sweep and the values that its stages share."""

    plan: ResolvedPlan
    race: LoadPlan
    server: Server
    pair: Pair
    folder: SweepFolder
    cores: Cores
    prompts: list[Prompt]  # of the races
    command: str  # that started the sweep
    observer: Observer
    scratch: Path  # for the files of servers that run
    kept: list[Parts[LoadRecord]] = field(default_factory=list)  # of the races
    unread: dict[str | None, str] = field(default_factory=dict)  # drafts, with the reasons

    def __post_init__(self) -> None:
        self.workload = self.race.workload(self.prompts, self.pair)

    def contestant(self, mode: Mode) -> ServerContestant:
        needed = mode.autoregressive  # all are compared with it
        logs = self.folder.path / LOGS
        return mode_server(self.server, self.pair, mode, self.cores, self.scratch, needed, logs)

    def express(self, configurations: Sequence[Configuration]) -> Expressed:
        """The server's modes for the configurations. Warns of configurations without a mode and of
        configurations whose draft the server cannot read. Raises :class:`UserError` where no
        configuration has one."""
        title, models = self.server.title, models_in(self.server, self.pair)
        self.contestant(self.modes[0])  # a target that cannot be converted is no fault of a draft
        found = express(self.server, models, configurations)
        self.unread = self._unread([*found.modes.values(), *self._defaults()])
        readable, left_out = dict[str, Mode](), [*found.left_out]
        for key, mode in found.modes.items():
            if mode.draft not in self.unread:
                readable[key] = mode
            elif mode.configuration is not None:
                left_out.append(mode.configuration)
        found = Expressed(readable, left_out, [*found.missing, *self.unread.values()])
        for line in found.missing:
            self.observer.warned(f"without some settings of {title}: {line}")
        if found.left_out:
            labels = ", ".join(each.label for each in found.left_out)
            self.observer.warned(
                f"{len(found.left_out)} configurations have no settings in {title}: {labels}"
            )
        if not found.modes:
            raise UserError(f"no configuration of the plan has settings in {title}")
        return found

    def _unread(self, modes: Sequence[Mode]) -> dict[str | None, str]:
        """The drafts of modes that the server cannot read, with the reasons: a format is converted
        now, where that is needed."""
        reasons: dict[str | None, str] = {}
        of_each = {mode.draft: mode for mode in modes if mode.draft is not None}
        for draft, mode in of_each.items():
            try:
                self.contestant(mode)
            except UserError as error:
                reasons[draft] = f"draft {draft}: {error}"
        return reasons

    @property
    def _readable(self) -> Pair:
        """The pair without the drafts that the server cannot read."""
        drafts = {n: place for n, place in self.pair.spec.drafts.items() if n not in self.unread}
        return replace(self.pair, spec=self.pair.spec.model_copy(update={"drafts": drafts}))

    def _defaults(self) -> list[Mode]:
        """The server's own modes that finalists are raced beside."""
        return [mode for mode in defaults(self.modes) if mode.draft not in self.unread]

    @cached_property
    def modes(self) -> list[Mode]:
        """The server's own, autoregressive decoding first."""
        return self.server.modes(self.pair, served=True)

    def record(self, home: Path, answering: Mode) -> Recording:
        """A recording of the server's own answers in that mode, in the sweep's folder."""
        place = self.folder.path / "recording"
        if finished(place):
            return Recording.open(place)
        asked = RecordingPlan(
            pair=self.pair.spec,
            prompts=self.plan.prompts,
            max_new_tokens=self.plan.max_new_tokens,
            mixing=0,
        )
        clients = max(self.race.clients)
        self.observer.stage(f"starting {self.server.title}, to record its answers")
        with running(self.contestant(answering).server(clients)) as url:
            address = ServerAddress(url=url, clients=clients)
            return run_recording(asked, home, out=place, observer=self.observer, address=address)

    def profile(self, recording: Recording) -> Profile:
        """What the server's steps cost: as the sweep began with, or of the plan, or of the
        workspace, which keeps what is measured now: where it has none, or of another version of
        the server or of fewer requests at once."""
        if (kept := self.folder.profile()) is not None:
            return kept
        profile = self.plan.profile
        if profile is not None:
            profile = profile.of(self.pair.spec.drafts)
        else:
            weights = recording.header.fingerprints
            readable = self._readable
            path = workspace_profile(readable.spec, weights, self.server.name)
            profile = Profile.load(path) if path.exists() else None
            if profile is None or not self._fits(profile):
                sizes = {"batches": tuple(sorted({1, *self.race.clients}))}
                sizes |= self.plan.forwards.model_dump(exclude_none=True)
                profile = self.server.profile(readable, **sizes, observer=self.observer)
                profile.save(path)
        self.folder.save_profile(profile)
        return profile

    def _fits(self, profile: Profile) -> bool:
        """Whether a profile is of this version of the server, of as many requests at once, and of
        all drafts: one may not have started when it was made."""
        if {mode.draft for mode in self._defaults()} - {None} - profile.drafts.keys():
            return False
        wanted = self.plan.forwards.batches or self.race.clients
        measured = max(m.batch for m in profile.target.measurements)
        plain = self.contestant(self.modes[0])
        return measured >= max(wanted) and _release(plain.row.version) in profile.device

    def run(self, recording: Recording, profile: Profile, expressed: Expressed) -> ServerSweep:
        """Rank, race and choose."""
        server, loads = self.server, self.race.loads
        own = {c.id: mode for mode in self._defaults() if (c := mode.configuration) is not None}
        known = {**expressed.modes, **own}  # by the names that their rows have in the races
        simulated = self._simulated(recording, profile, known)
        chosen = finalists(simulated, known, self.plan.live)
        modes = joined(self._defaults(), self._priced(chosen, profile))
        started, first = modes, None
        if self.race.repeats > 1:
            first = self._race("first runs", modes, repeats=1, waves=FIRST, least=LEAST // 2)
            simulated = as_served(simulated, first, known)
            chosen = self._priced(contenders(simulated, known, self.plan.live), profile)
            modes = after_first_runs(modes, self._defaults(), first.rows, loads, chosen)
            models = models_in(server, self.pair)
            joint = by_load(server, models, simulated, known, first.rows)
            if joint is not None:
                modes = joined(modes, self._priced([joint], profile))
        write_atomically(self.folder.path / "simulated.csv", simulated.table.to_csv(index=False))
        race = self._race("settings", modes, repeats=max(self.race.repeats - 1, 1))
        rows = race.may_win()
        winner = best_of_all(rows, loads)
        mode = next(each for each in modes if each.name == winner.name)
        usage, command = self._written(mode)
        return ServerSweep(
            server=server.name,
            title=server.title,
            first=first,
            race=race,
            configurations={m.name: c for m in modes if (c := m.configuration) is not None},
            expected=_expected(simulated, known, [*started, *modes]),
            ranked=len(simulated.known) - 1,
            left_out=[each.label for each in expressed.left_out],
            recording=str(recording.folder),
            times=profile.device,
            best={load.key: best_at(rows, load).name for load in loads},
            champion=winner.name,
            usage=usage,
            command=command,
        )

    def _simulated(
        self, recording: Recording, profile: Profile, modes: Mapping[str, Mode]
    ) -> Simulated:
        wanted = [c for mode in modes.values() if (c := mode.configuration) is not None]
        hidden = any(each.reads_hidden for each in wanted)
        replay = Replay(recording, hidden=hidden, profile=profile)
        assert self.plan.workload is not None  # it was checked
        ranked = [c for c in wanted if replayable(replay, profile, c) and can_simulate(replay, c)]
        if unknown := [each.label for each in wanted if each not in ranked]:
            self.observer.warned(f"not ranked, by this recording or profile: {', '.join(unknown)}")
        if not any(each.drafter for each in ranked):
            raise UserError(f"{recording.folder}: no settings can be ranked on it")
        return Simulated(ranked, replay, profile, self.plan.workload, self.observer)

    def _priced(self, modes: Iterable[Mode], profile: Profile) -> list[Mode]:
        """The modes at the costs of the server's steps, which a plug-in's policy may ask for."""
        return [
            mode
            if mode.plug_in is None
            else self.server.plug_in_mode(mode.plug_in.priced(profile), mode.name)
            for mode in modes
        ]

    def _race(self, what: str, modes: Sequence[Mode], **changes: int) -> ServerRace:
        """The server in these modes under each load, with `changes` to the plan of the race. Runs
        that are on disk are not made again."""
        started, facts, given = datetime.now(UTC), environment(), self.plan.prompts
        race = self.race.model_copy(update=changes)
        asked = PromptSet.of(given.source, self.prompts, given.chat_template)
        contestants = [self.contestant(mode) for mode in modes]
        settings = [dict(mode.settings) for mode in modes]
        weights = self.folder.weights() or {}
        same = described(
            what,
            race,
            weights,
            asked,
            settings,
            facts,
            cores=self.cores.sentence,
            versions=[each.row.version for each in contestants],
        )
        with Parts.open(self.folder.path, same, LoadRecord) as parts:
            self.kept.append(parts)
            notes = [self.cores.sentence, *parts.notes]
            rows = compare_servers(
                race, contestants, self.workload, self.cores, parts, self.observer, leave=True
            )
        return ServerRace(
            name=self.folder.name,
            started=started,
            command=self.command,
            pair=self.pair.spec,
            prompts=asked,
            max_new_tokens=self.race.max_new_tokens,
            repeats=race.repeats,
            loads=race.loads,
            slots=race.slots,
            one_server=race.one_server,
            rows=rows,
            notes=notes,
            environment=facts,
        )

    def _written(self, mode: Mode) -> tuple[str, str]:
        """Write the files that start the champion. Returns the lines that use them, and the command
        that started it in the race, with the variables that it needs and a port to choose."""
        server, place = self.server, self.folder.path / CHAMPION
        if mode.plug_in is not None:
            models = models_in(server, self.pair, plug_in=True)
            written = server.plugged_in(placed(mode.plug_in), models, self.pair.spec.runner)
        else:
            written = server.written(Counterpart(mode.settings), models_in(server, self.pair))
        files = self.folder.path / STARTED
        shutil.rmtree(files, ignore_errors=True)  # of an interrupted run
        files.mkdir()
        served = server.served(self.pair, mode, self.cores.engine, files.resolve())
        started = served.shown(max(self.race.clients), PORT)
        written.save(place)
        return written.usage, started


def _release(version: str) -> str:
    """The number in a server's version, as `0.32.0` in `vllm cpu 0.32.0`."""
    found = re.search(r"b?\d[\w.]*", version)
    return found[0] if found else version


def _expected(
    simulated: Simulated, known: Mapping[str, Mode], modes: Sequence[Mode]
) -> dict[str, dict[str, float]]:
    """Simulated tokens a second by mode and load, where a mode was simulated. `known` are the modes
    by the simulated ids, which a mode no longer has at the costs of a profile."""
    values = {load.key: simulated.values(load) for load in simulated.traffic.loads}
    ids = {mode.name: key for key, mode in known.items() if key in simulated.known}
    return {
        mode.name: {key: float(of[ids[mode.name]]) for key, of in values.items()}
        for mode in modes
        if mode.name in ids
    }
