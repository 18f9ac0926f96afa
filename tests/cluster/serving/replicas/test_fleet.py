"""All replicas serve one thing, and the ingress knows which. These replicas are in this process,
with an engine that is not replaced."""

from __future__ import annotations

import asyncio
import inspect
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import pytest
from ray.serve.handle import DeploymentBroadcastResponse

from cluster.serving.canary import Canary
from cluster.serving.engine_loop import EngineFailed
from cluster.serving.http.service import CompletionService
from cluster.serving.replicas.fleet import Fleet, FleetSubmission
from cluster.serving.replicas.replica import EngineReplica
from cluster.serving.served import NOT_OPERATED, Deployment, Operation
from specdec_core.base.errors import UserError
from specdec_core.config import AUTOREGRESSIVE, Configuration
from specdec_core.drafting.draft_model.settings import DraftModelSettings
from specdec_core.drafting.prompt_lookup import PromptLookupSettings
from specdec_core.engine import Engine, Request
from specdec_core.models.pair import Pair

CHAIN = Configuration(drafter=DraftModelSettings())
LOOKUP = Configuration(drafter=PromptLookupSettings())


class Replica(EngineReplica.func_or_class):
    """Of a service that others start and end."""

    hangs = False

    def __init__(self, name: str, service: CompletionService) -> None:
        self._name, self._service = name, service

    def __del__(self) -> None: ...


class Handle:
    """Calls all replicas, as Ray Serve's does."""

    def __init__(self, replicas: list[Replica]) -> None:
        self.replicas, self.called = replicas, []

    def options(self, **_: Any) -> Handle:
        return self

    def broadcast(self, name: str, *arguments: Any) -> DeploymentBroadcastResponse:
        self.called.append(name)

        async def results() -> list[Result]:
            return [Result(replica, name, arguments) for replica in self.replicas]

        return DeploymentBroadcastResponse(results(), None)


class Result:
    """What a replica returns, once it does."""

    def __init__(self, replica: Replica, name: str, arguments: tuple[Any, ...]) -> None:
        self._replica, self._name, self._arguments = replica, name, arguments

    async def get_async(self) -> Any:
        if self._replica.hangs:
            await asyncio.Event().wait()
        answer = getattr(self._replica, self._name)(*self._arguments)
        return await answer if inspect.isawaitable(answer) else answer


def told(
    pair: Pair,
    story: Callable[[Fleet, Handle], Awaitable[None]],
    operation: Operation = NOT_OPERATED,
) -> None:
    """Two replicas serve CHAIN while a story is told."""
    first, second = (CompletionService(Engine(pair, CHAIN), "tiny") for _ in range(2))
    handle = Handle([Replica("first", first), Replica("second", second)])
    deployment = Deployment(pair=pair.spec, configuration=CHAIN)

    async def main() -> None:
        async with first.loop, second.loop:
            await story(Fleet(handle, deployment, operation), handle)

    asyncio.run(asyncio.wait_for(main(), timeout=60))


async def tried(fleet: Fleet, handle: Handle) -> list[Canary]:
    """Every replica gives LOOKUP half of its traffic."""
    pair = handle.replicas[0]._service.engine.pair
    fleet._trying = Deployment(pair=pair.spec, configuration=LOOKUP)
    canaries = []
    for replica in handle.replicas:
        loop = replica._service.loop
        challenger = CompletionService(Engine(pair, LOOKUP), "tiny").loop.current
        challenger.loop.open()
        loop._beside.append(challenger)
        loop.canary = Canary(loop.current, challenger, 0.5)
        canaries.append(loop.canary)
    await fleet._watch()
    assert fleet.canary is not None
    assert fleet.canary.state == "running"
    return canaries


def test_what_is_served_already_is_told_anew_and_no_more(tiny_pair: Pair) -> None:
    again = Deployment(pair=tiny_pair.spec, configuration=CHAIN, source="version 2", version=2)

    async def story(fleet: Fleet, handle: Handle) -> None:
        before = fleet.previous = Deployment(pair=tiny_pair.spec, configuration=LOOKUP)
        assert await fleet.deploy(again) == fleet.deployment == again
        assert (fleet.previous, fleet.switches) == (before, 0)
        handle.replicas[1]._service.loop.current.deployment = before.model_copy(
            update={"configuration": CHAIN}
        )
        handle.called.clear()
        await fleet._watch()  # the one that is said to be another's is no stray
        assert handle.called == ["status"]

    told(tiny_pair, story)


def test_weights_that_were_trained_anew_are_told_to_all_and_replace_none_to_return_to(
    tiny_pair: Pair,
) -> None:
    weights = {"target": "t", "draft": "before"}
    first = Deployment(pair=tiny_pair.spec, configuration=CHAIN, weights=weights)
    trained = first.model_copy(update={"weights": weights | {"draft": "after"}})

    async def story(fleet: Fleet, handle: Handle) -> None:
        fleet.deployment = first
        before = fleet.previous = Deployment(pair=tiny_pair.spec, configuration=LOOKUP)
        assert await fleet.deploy(trained) == fleet.deployment == trained
        assert (fleet.previous, fleet.switches) == (before, 1)
        # One that has come with what was there before is told, too.
        handle.replicas[1]._service.loop.current.deployment = first
        handle.called.clear()
        await fleet._watch()
        assert handle.called == ["status", "deploy"]

    told(tiny_pair, story)


def test_without_replicas_a_deployment_fails_for_now_and_is_not_refused(tiny_pair: Pair) -> None:
    wanted = Deployment(pair=tiny_pair.spec, configuration=LOOKUP)

    async def story(fleet: Fleet, handle: Handle) -> None:
        handle.replicas.clear()
        with pytest.raises(EngineFailed, match="no replica answers"):
            await fleet.deploy(wanted)
        assert fleet.deployment.configuration == CHAIN

    told(tiny_pair, story)


def test_a_rollback_ends_the_first_canary_everywhere(tiny_pair: Pair) -> None:
    async def story(fleet: Fleet, handle: Handle) -> None:
        canaries = await tried(fleet, handle)
        assert (await fleet.roll_back()).configuration == CHAIN
        assert fleet.canary.state == "dropped"
        assert {canary.state for canary in canaries} == {"dropped"}
        with pytest.raises(UserError, match="nothing else was served before"):
            await fleet.roll_back()

    told(tiny_pair, story)


def test_a_deployment_that_all_refuse_leaves_the_canary_running(tiny_pair: Pair) -> None:
    wanted = Deployment(pair=tiny_pair.spec, configuration=AUTOREGRESSIVE)

    async def story(fleet: Fleet, handle: Handle) -> None:
        canaries = await tried(fleet, handle)
        for order in (fleet.deploy, lambda wanted: fleet.try_out(wanted, 0.5)):
            with pytest.raises(UserError, match="is not replaced while it serves"):
                await order(wanted)
        await fleet._watch()
        assert fleet.canary.state == "running"
        assert {canary.state for canary in canaries} == {"running"}

    told(tiny_pair, story)


def test_a_promotion_that_cannot_be_written_down_happens_once(
    tiny_pair: Pair, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "file").touch()

    async def story(fleet: Fleet, handle: Handle) -> None:
        first, _ = await tried(fleet, handle)
        first.end("promoted", "the test says so")
        for _ in range(2):
            await fleet._watch()
        assert fleet.deployment.configuration == LOOKUP
        assert fleet.previous.configuration == CHAIN
        assert fleet.switches == 1
        served = {replica._service.engine.configuration for replica in handle.replicas}
        assert served == {LOOKUP}

    told(tiny_pair, story, Operation(None, tmp_path / "file" / "deployed"))
    assert "is not remembered" in caplog.text


def test_a_replica_that_hangs_silences_no_other(
    tiny_pair: Pair, monkeypatch: pytest.MonkeyPatch
) -> None:
    again = Deployment(pair=tiny_pair.spec, configuration=CHAIN, source="version 2", version=2)

    async def story(fleet: Fleet, handle: Handle) -> None:
        first, second = handle.replicas
        first.hangs = True
        assert [name for name, _ in await fleet.ask("metrics", seconds=0.05)] == ["second"]
        assert await fleet.takes()
        monkeypatch.setattr("cluster.serving.replicas.fleet._LOAD", 0.05)
        # It may come back with what it served before: then all serve that.
        with pytest.raises(UserError, match="a replica did not answer in time"):
            await fleet.deploy(again)
        assert fleet.deployment != again
        assert second._service.loop.current.deployment.version is None
        first.hangs = False
        assert await fleet.deploy(again) == again

    told(tiny_pair, story)


def test_a_replica_says_under_which_configuration_it_goes_on(tiny_pair: Pair) -> None:
    request = Request("r", (5, 6, 7), 100, ignore_eos=True)

    async def story(fleet: Fleet, handle: Handle) -> None:
        first = handle.replicas[0]
        other = CompletionService(Engine(tiny_pair, LOOKUP), "tiny")
        async with other.loop:
            submission = FleetSubmission(first.answer([request], False, ()), CHAIN, 1)
            by = []
            async for _ in submission:
                if not by:
                    failed = first._service.loop.current
                    first._service.loop._switch(other.loop.current)
                    failed.loop._fail("killed")
                by.append(submission.configuration)
        assert [*dict.fromkeys(configuration.label for configuration in by)] == [
            CHAIN.label,
            LOOKUP.label,
        ]

    told(tiny_pair, story)
