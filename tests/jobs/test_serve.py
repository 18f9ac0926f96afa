"""`specdec serve` as a person uses it: ready line, curl, Ctrl-C; bad input is one line."""

import os
import re
import shutil
import signal
import socket
import subprocess
import sys
from pathlib import Path

import httpx
import pytest
import ray
import ray.serve
import yaml

from jobs import serve
from jobs.console import run
from specdec_core.config import PairSpec

ROOT = Path(__file__).parents[2]

pytestmark = pytest.mark.usefixtures("ray_running")


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


@pytest.fixture
def config(tiny_spec: PairSpec, tmp_path: Path) -> Path:
    path = tmp_path / "served.yaml"
    content = {
        "pair": tiny_spec.model_dump(mode="json"),
        "configuration": {"drafter": {"kind": "draft_model"}},
    }
    path.write_text(yaml.safe_dump(content))
    return path


@pytest.fixture
def refused(monkeypatch, capsys):
    """Run the command; returns the one line that it ends with."""

    def refuse(*arguments: object) -> str:
        monkeypatch.setattr(sys, "argv", ["serve", *map(str, arguments)])
        with pytest.raises(SystemExit) as exit:
            run(serve.main)
        assert exit.value.code == 2
        output = capsys.readouterr()
        line, end = output.err.split("\n")
        assert (output.out.strip(), end) == ("", "")
        return line

    return refuse


def test_serves_until_ctrl_c(config, tmp_path):
    port = free_port()
    process = subprocess.Popen(
        [sys.executable, "-m", "jobs.serve", "--config", str(config), "--port", str(port)],
        cwd=ROOT,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
        env={**os.environ, "COLUMNS": "80"},
    )
    output = ""
    try:
        for line in process.stdout:
            output += line
            if "Ctrl-C" in line:
                break
        assert f"http://127.0.0.1:{port}" in output, output
        assert "fixed K=5" in output
        assert str(config) in output
        curl = re.search(r"(curl .*?)\n\n", output, re.DOTALL)
        answer = subprocess.run(
            ["bash", "-c", curl[1]], capture_output=True, text=True, timeout=120
        )
        assert answer.stdout.endswith("data: [DONE]\n\n"), answer
        os.killpg(process.pid, signal.SIGINT)  # what a terminal does
        rest, _ = process.communicate(timeout=120)
        assert (process.returncode, rest.strip()) == (0, "stopped")
    finally:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)
    with pytest.raises(httpx.ConnectError):
        httpx.get(f"http://127.0.0.1:{port}/health")


def test_weights_that_cannot_be_loaded_are_one_line(config, refused, tmp_path):
    """Only the replica finds out."""
    content = yaml.safe_load(config.read_text())
    broken = tmp_path / "broken"
    shutil.copytree(content["pair"]["target"], broken)
    (broken / "model.safetensors").write_bytes(b"cut off")
    content["pair"]["target"] = str(broken)
    config.write_text(yaml.safe_dump(content))
    line = refused("--config", config, "--port", free_port())
    assert "header" in line
    assert ray.is_initialized()  # it was there before
    ray.serve.shutdown()


def test_a_port_in_use_is_one_line(config, refused):
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        line = refused("--config", config, "--port", port)
    assert line == f"error: cannot listen on 127.0.0.1:{port}: address already in use"


def test_no_champion_yet_is_one_line(refused, monkeypatch, tmp_path):
    monkeypatch.delenv("MLFLOW_TRACKING_URI", raising=False)
    monkeypatch.setenv("SPECDEC_HOME", str(tmp_path))
    assert "no champion" in refused()
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (None, "no such file"),
        ("pair: {", "not valid YAML"),
        ("configuration: {drafter: {kind: draft_model, polcy: {}}}", "polcy"),
        ("pair: {}", "configuration: Field required"),
        ("- 1", "valid dictionary"),
    ],
)
def test_a_wrong_file_is_one_line(refused, tmp_path, content, message):
    path = tmp_path / "wrong.yaml"
    if content is not None:
        path.write_text(content)
    line = refused("--config", path)
    assert str(path) in line
    assert message in line
