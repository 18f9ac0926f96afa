"""`specdec certify` writes a certificate or says which check failed; promoting asks for one."""

from pathlib import Path

import pytest

from jobs import certify, deploy
from specdec_core.config import PairConfiguration
from specdec_core.evidence.certificate.certificate import LiveSpeed, find_certificate
from tests.commands import assert_refused, printed, prompts_file
from tests.configurations import FOUR, LOSSY, drafting
from tests.registered import SUFFIX

# Unless the target waits, whether a candidate comes in time says how busy this machine is.
BESIDE = drafting("pearl", wait=2)
PLACEMENTS = Path(__file__).parents[2] / "cluster"


def given(folder, spec, configuration):
    """The options that name a configuration and prompts."""
    config = PairConfiguration(pair=spec, configuration=configuration).save(folder / "config.yaml")
    prompts = prompts_file(folder, ("def main(", "class A:", "import os"))
    return ["--config", config, "--prompts", prompts, "--quick"]


@pytest.fixture(autouse=True)
def never_slower(monkeypatch):
    """Whether it is faster says how busy this machine is."""
    monkeypatch.setattr(LiveSpeed, "passed", True)


@pytest.mark.parametrize(
    ("configuration", "placement"),
    [
        pytest.param(FOUR, None, id="here"),
        pytest.param(BESIDE, "local-2.yaml", id="asynchronous"),
        pytest.param(FOUR, "local-shards-2.yaml", id="split", marks=pytest.mark.long),
    ],
)
def test_a_certificate_is_written_here_and_on_devices_of_a_cluster(
    command, tmp_path, tiny_spec, ray_running, configuration, placement
):
    options = given(tmp_path, tiny_spec, configuration)
    devices = ["--cluster", PLACEMENTS / placement] if placement else []
    assert "0 differ" in printed(command(certify.main, tmp_path, *options, *devices))
    certificate = find_certificate(tiny_spec, configuration)
    assert certificate.prompts.count == 3
    assert certificate.checks.sampled.tokens > 0
    assert certificate.checks.speed.ratio > 0
    assert certificate.checks.speed.tokens_per_second > 0
    assert not (tmp_path / "mlflow.db").exists()  # nothing is registered there


def test_a_lossy_configuration_gets_none(command, tmp_path, tiny_spec):
    done = command(certify.main, tmp_path, *given(tmp_path, tiny_spec, LOSSY))
    assert done.returncode == 1
    assert "not certified: greedy identity" in done.stdout
    assert "in place of" in done.stdout
    assert not (tmp_path / "certificates").exists()


def test_promoting_asks_for_a_certificate(command, swept):
    done = command(deploy.main, swept, "--promote", SUFFIX.id)
    assert_refused(done, f"{SUFFIX.id} has no certificate.*--uncertified")
