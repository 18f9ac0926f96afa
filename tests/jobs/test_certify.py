"""`specdec certify` writes a certificate or says which check failed; promoting asks for one."""

from __future__ import annotations

from pathlib import Path

import pytest
import yaml

from jobs import certify, deploy
from specdec_core.config import Configuration, PairSpec
from specdec_core.drafting.draft_model.settings import DraftModelSettings
from specdec_core.drafting.pearl.settings import PearlSettings
from specdec_core.drafting.policies.fixed import FixedSettings
from specdec_core.drafting.target_started.settings import TargetTreeSettings
from specdec_core.evidence.certificate.certificate import LiveSpeed, find_certificate
from tests.commands import Command, assert_refused, prompts_file
from tests.registered import SUFFIX

CHAIN = Configuration(drafter=DraftModelSettings(policy=FixedSettings(max_tokens=4)))
# Unless the target waits, whether a candidate comes in time says how busy this machine is.
BESIDE = Configuration(drafter=PearlSettings(wait=2))
PLACEMENT = Path(__file__).parents[2] / "cluster" / "local-2.yaml"
LOSSY = Configuration(drafter=TargetTreeSettings(branching=(2, 2, 1)))


def written(folder: Path, spec: PairSpec, configuration: Configuration) -> tuple[Path, Path]:
    """Files of a configuration, and of prompts."""
    config = folder / "config.yaml"
    content = {"pair": spec, "configuration": configuration}
    dumped = {key: value.model_dump(mode="json") for key, value in content.items()}
    config.write_text(yaml.safe_dump(dumped))
    return config, prompts_file(folder, ("def main(", "class A:", "import os"))


@pytest.fixture(autouse=True)
def never_slower(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whether it is faster says how busy this machine is."""
    monkeypatch.setattr(LiveSpeed, "passed", True)


def test_a_certificate_is_written(command: Command, tmp_path: Path, tiny_spec: PairSpec) -> None:
    config, prompts = written(tmp_path, tiny_spec, CHAIN)
    done = command(certify.main, tmp_path, "--config", config, "--prompts", prompts, "--quick")
    assert done.returncode == 0, done
    assert "0 differ" in done.stdout
    certificate = find_certificate(tiny_spec, CHAIN)
    assert certificate is not None
    assert certificate.prompts.count == 3
    assert certificate.checks.speed.ratio > 0
    assert not (tmp_path / "mlflow.db").exists()  # nothing is registered there


def test_asynchronous_drafting_is_certified_on_devices_of_its_own(
    command: Command, tmp_path: Path, tiny_spec: PairSpec, ray_running: None
) -> None:
    config, prompts = written(tmp_path, tiny_spec, BESIDE)
    options = ("--config", config, "--prompts", prompts, "--quick", "--cluster", PLACEMENT)
    done = command(certify.main, tmp_path, *options)
    assert done.returncode == 0, done
    assert "0 differ" in done.stdout
    certificate = find_certificate(tiny_spec, BESIDE)
    assert certificate is not None
    assert certificate.checks.sampled.tokens > 0
    assert certificate.checks.speed.tokens_per_second > 0


def test_devices_are_for_asynchronous_drafting_alone(
    command: Command, tmp_path: Path, tiny_spec: PairSpec
) -> None:
    config, _ = written(tmp_path, tiny_spec, CHAIN)
    done = command(certify.main, tmp_path, "--config", config, "--cluster", PLACEMENT)
    assert done.returncode == 2
    assert "needs no device of its own" in done.stderr
    config, prompts = written(tmp_path, tiny_spec, BESIDE)
    options = ("--config", config, "--prompts", prompts, "--quick")
    done = command(certify.main, tmp_path, *options)
    assert_refused(done, "say which, with --cluster")


def test_a_lossy_configuration_gets_none(
    command: Command, tmp_path: Path, tiny_spec: PairSpec
) -> None:
    config, prompts = written(tmp_path, tiny_spec, LOSSY)
    done = command(certify.main, tmp_path, "--config", config, "--prompts", prompts, "--quick")
    assert done.returncode == 1
    assert "not certified: greedy identity" in done.stdout
    assert "in place of" in done.stdout
    assert not (tmp_path / "certificates").exists()


def test_promoting_asks_for_a_certificate(command: Command, swept: Path) -> None:
    done = command(deploy.main, swept, "--promote", SUFFIX.id)
    assert done.returncode == 2
    assert f"{SUFFIX.id} has no certificate" in done.stderr
    assert "--uncertified" in done.stderr
