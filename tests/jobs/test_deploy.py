"""Following the registry's champion goes on whatever the registry does."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace

import pytest

from cluster.serving.control import announced
from cluster.serving.http.app import build_app
from cluster.serving.http.service import CompletionService
from cluster.serving.served import Operation
from cluster.serving.server_process import running
from jobs import deploy
from specdec_core.config import AUTOREGRESSIVE, Configuration, PairSpec
from specdec_core.drafting.prompt_lookup import PromptLookupSettings
from specdec_core.engine import Engine
from specdec_core.models.pair import Pair
from tests.dashboards.tracking.test_sweep_run import certificate_of
from tests.local_server import LocalServer
from tests.registered import appointed

LOOKUP = Configuration(drafter=PromptLookupSettings())
OPERATION = Operation("a secret")


@pytest.fixture
def url(home: Path, tiny_pair: Pair) -> Iterator[str]:
    """A server of this workspace that refuses every deployment, and says so."""
    service = CompletionService(Engine(tiny_pair, AUTOREGRESSIVE), "tiny", operation=OPERATION)
    with (
        running(LocalServer(lambda: build_app(service))) as url,
        announced(url, tiny_pair.spec, OPERATION),
    ):
        yield url


def test_following_outlives_the_registry_and_says_once_what_is_in_the_way(
    home: Path,
    url: str,
    tiny_spec: PairSpec,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    artifacts, away = home / "mlartifacts", home / "away"

    def certified() -> None:
        away.rename(artifacts)
        certificate_of(tiny_spec, LOOKUP).save()

    story: list[tuple[Callable[[], object], str]] = [  # before a look, and what that has to say
        (lambda: appointed(tiny_spec, LOOKUP), "no certificate"),
        (lambda: None, ""),
        (lambda: artifacts.rename(away), "champion.yaml"),
        (lambda: None, ""),
        (certified, "not replaced while it serves"),
        (lambda: artifacts.rename(away), ""),  # nothing is read of a champion that is known
    ]
    said: list[str] = []

    def sleep(_: float) -> None:
        said.append(capsys.readouterr().out)
        if len(said) > len(story):
            raise KeyboardInterrupt
        story[len(said) - 1][0]()

    monkeypatch.setattr(deploy, "time", SimpleNamespace(sleep=sleep))
    with pytest.raises(KeyboardInterrupt):
        deploy.follow_champion(url, None, 1)
    for found, (_, expected) in zip(said[1:], story, strict=True):
        assert expected in found
        assert bool(found) == bool(expected), found
