"""`specdec serve` says what it serves; bad input is one line."""

import hashlib
import shutil
import socket
from collections.abc import Callable

import openai
import pytest
import ray
import ray.serve
import yaml

from cluster.serving import deployment
from cluster.serving.http.access import read_keys
from cluster.serving.served import Deployment
from jobs import serve
from jobs.serve_keys import main as make_key
from specdec_core.base.errors import UserError
from specdec_core.config import AUTOREGRESSIVE, Configuration
from specdec_core.engine import Engine, Request
from specdec_core.servers.process import free_port
from tests.commands import ROOT, config_file

Refused = Callable[..., str]

pytestmark = pytest.mark.usefixtures("ray_running")


@pytest.fixture
def config(tiny_spec, tmp_path):
    return config_file(tmp_path, tiny_spec, {"kind": "draft_model"})


@pytest.fixture
def refused(command, tmp_path):
    """Run the command; returns the one line that it ends with."""

    def refuse(*arguments):
        done = command(serve.main, tmp_path / "home", *arguments)
        assert (done.returncode, done.stdout.strip()) == (2, "")
        [line] = done.stderr.splitlines()
        return line

    return refuse


def beside(folder, spec):
    """A configuration whose draft drafts beside the target."""
    return config_file(folder, spec, {"kind": "pearl"})


def rayservice(config, **more):
    """What KubeRay's manifest says of its application, and this built with the arguments there, a
    configuration, a placement and no keys; `more` replaces arguments."""
    manifest = yaml.safe_load((ROOT / "cluster" / "kuberay" / "ray-service.yaml").read_text())
    (described,) = yaml.safe_load(manifest["spec"]["serveConfigV2"])["applications"]
    files = {"config": str(config), "cluster": str(ROOT / "cluster" / "local-2.yaml")}
    access = {"api_key_file": None, "no_auth": True}
    return described, serve.application({**described["args"], **files, **access, **more})


def test_the_rayservices_application_is_built_from_its_arguments(tiny_spec, tmp_path, monkeypatch):
    config = beside(tmp_path, tiny_spec)
    monkeypatch.setattr(deployment, "application", lambda start, *_: start)
    described, start = rayservice(config)
    arguments = described["args"]
    assert (start.deployment.pair, start.limits.slots) == (tiny_spec, arguments["slots"])
    assert start.queue == 128
    assert start.deployment.configuration.asynchronous
    assert (start.placement.draft.devices, start.placement.target.devices) == (1, 1)
    assert start.replicas == 2
    assert rayservice(config, max_length=64)[1].deployment.pair.runner.max_length == 64
    with pytest.raises(UserError, match="give `api_key_file`, a file of `specdec serve keys`, or"):
        rayservice(config, no_auth=False)
    missing = config.with_name("keys")
    with pytest.raises(UserError, match=f"{missing}: no such file"):
        rayservice(config, no_auth=False, api_key_file=str(missing))
    with pytest.raises(UserError, match="args: slot: "):
        serve.application({"slot": 4})


@pytest.mark.long
def test_the_rayservices_application_serves_a_draft_beside_the_target(tiny_pair, tmp_path):
    # The second replica that the manifest asks for would wait for devices that are not here.
    described, built = rayservice(beside(tmp_path, tiny_pair.spec), replicas=1)
    port = free_port()
    try:
        ray.serve.start(proxy_location="HeadOnly", http_options={"port": port})
        ray.serve.run(built, name=described["name"], route_prefix=described["route_prefix"])
        client = openai.OpenAI(base_url=f"http://127.0.0.1:{port}/v1", api_key="none")
        (model,) = (model.id for model in client.models.list())
        answers = [
            client.completions.create(model=model, prompt=prompt, max_tokens=60)
            for prompt in ("def main(", "import", "def main(")
        ]
        engine = Engine(tiny_pair)
        for answer, prompt in zip(answers, ("def main(", "import", "def main("), strict=True):
            (expected,) = engine.generate([Request("", engine.encode(prompt), 60)])
            assert answer.choices[0].text == expected.text
    finally:
        ray.serve.shutdown()


@pytest.mark.long
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


def test_replicas_that_cannot_be_are_one_line(config, refused):
    line = refused("--config", config, "--replicas", 1000, "--port", free_port())
    assert line.startswith("error: --replicas 1000: the cluster has room for ")
    line = refused("--config", config, "--replicas", 2, "--cores", "0")
    assert "not the same number for each of 2 replicas" in line


def test_an_address_that_others_reach_needs_keys(config, refused, tmp_path):
    line = refused("--config", config, "--host", "0.0.0.0")
    assert "--api-key-file" in line
    assert "--no-auth" in line
    missing = tmp_path / "keys"
    line = refused("--config", config, "--api-key-file", missing)
    assert line.startswith(f"error: {missing}: no such file")
    line = refused("--config", config, "--tls-cert", missing, "--tls-key", missing)
    assert line.startswith(f"error: --tls-cert {missing}: cannot be read")


def test_the_request_to_try_is_a_chat_where_there_is_a_template(chat_spec, tiny_spec, capsys):
    url = "http://127.0.0.1:8000"
    for spec, keys, path in (
        (chat_spec, True, "/v1/chat/completions"),
        (tiny_spec, False, "/v1/completions"),
    ):
        served = Deployment(pair=spec, configuration=AUTOREGRESSIVE, source="a file")
        serve._announce(url, served, 4, keys)
        printed = capsys.readouterr().out
        assert f"curl -N {url}{path} " in printed
        assert ("Authorization: Bearer $KEY" in printed) == keys


def test_ranges_of_load_beyond_the_slots_are_said(tiny_spec, capsys):
    ranges = {1: {"kind": "draft_model"}, 3: {"kind": "prompt_lookup"}, 5: None, 9: 2}
    configuration = Configuration(drafter={"kind": "schedule", "ranges": ranges})
    served = Deployment(pair=tiny_spec, configuration=configuration, source="a file")
    for slots, said in ((4, True), (8, True), (9, False)):
        serve._announce("http://127.0.0.1:8000", served, slots, keys=False)
        assert ("warning" in (printed := capsys.readouterr().out)) == said
        assert (f"--slots {slots}: what drafts from" in printed) == said
        assert ("from 5 and 9 requests on never does; --slots 9" in printed) == (slots == 4)


def test_the_file_has_the_hashes_of_the_keys_that_were_shown(tmp_path, capsys):
    path = tmp_path / "keys"
    for name in ("anne", ""):
        make_key(path, name)
    keys = [line for line in capsys.readouterr().out.splitlines() if line.startswith("sk-")]
    assert len(set(keys)) == 2
    assert read_keys(path) == tuple(hashlib.sha256(key.encode()).digest() for key in keys)
    assert " anne\n" in path.read_text()
    assert not any(key in path.read_text() for key in keys)
