"""The cluster files are what Ray and KubeRay read, and run what this checkout has."""

import importlib
import os
import re
import shlex
import signal
import subprocess
import sys
from contextlib import suppress
from importlib.metadata import version
from pathlib import Path

import httpx
import pytest
import typer
import yaml
from mlflow.cli import server as mlflow_server
from ray.autoscaler._private.util import prepare_config, validate_config
from ray.runtime_env import RuntimeEnv
from ray.serve.schema import ServeDeploySchema

from jobs.cli import COMMANDS, LAB, command, studies
from jobs.serve import Arguments
from specdec_core.config import parse
from specdec_core.servers.process import free_port
from tests.commands import ROOT, wait_until

FILES = ROOT / "cluster"
MANIFESTS = sorted((FILES / "kuberay").glob("*.yaml"))
KINDS = {
    *("PersistentVolumeClaim", "Deployment", "Service", "NetworkPolicy"),
    *("RayCluster", "RayJob", "RayService"),
}


def documents():
    return [document for file in MANIFESTS for document in yaml.safe_load_all(file.read_text())]


def manifest(kind):
    (found,) = [document for document in documents() if document["kind"] == kind]
    return found["spec"]


def ray_clusters():
    return [
        manifest("RayCluster"),
        manifest("RayJob")["rayClusterSpec"],
        manifest("RayService")["rayClusterConfig"],
    ]


def pods(cluster):
    groups = [cluster["headGroupSpec"], *cluster["workerGroupSpecs"]]
    return [group["template"]["spec"] for group in groups]


def variables(pod):
    (container,) = pod["containers"]
    return {each["name"]: each["value"] for each in container["env"]}


def check_command(line):
    """`line` is a job of this checkout, with options that it has."""
    words = shlex.split(line, comments=True)
    assert words[:2] == ["python", "-m"], line
    package, _, name = words[2].partition(".")
    name = name.replace("_", " ") if package == "jobs" else f"{LAB}{name.replace('_', '-')}"
    assert name in (*COMMANDS, *(f"{LAB}{study}" for study in studies()))
    typer.main.get_command(command(name)).make_context(name, words[3:])
    for word in words[3:]:
        if word.endswith(".yaml"):
            assert (ROOT / word).exists(), word


def test_the_launchers_file_fits_rays_schema():
    config = yaml.safe_load((FILES / "ray-cluster.yaml").read_text())
    validate_config(prepare_config(config))
    for line in (*config["head_start_ray_commands"], *config["worker_start_ray_commands"]):
        assert "ray stop" in line or "RAY_AUTH_MODE=token" in line


def test_the_runtime_environment_is_one_that_ray_takes(monkeypatch):
    monkeypatch.chdir(ROOT)
    content = yaml.safe_load((FILES / "runtime-env.yaml").read_text())
    assert (ROOT / content["uv"]).exists()
    environment = RuntimeEnv(**content)
    assert f"ray=={version('ray')}" in environment["uv"]["packages"]


def test_every_kind_of_manifest_is_there_and_of_the_installed_ray():
    assert {document["kind"] for document in documents()} == KINDS
    for spec in ray_clusters():
        assert spec["rayVersion"] == version("ray")
        assert spec["authOptions"]["mode"] == "token"
        for pod in pods(spec):
            (container,) = pod["containers"]
            claims = {v["name"]: v.get("persistentVolumeClaim") for v in pod["volumes"]}
            mounts = {m["mountPath"]: claims[m["name"]] for m in container["volumeMounts"]}
            assert mounts[variables(pod)["SPECDEC_HOME"]] == {"claimName": "specdec-home"}
            assert container["resources"]["limits"] == container["resources"]["requests"]


def test_a_pod_with_gpus_has_several_which_a_target_can_be_split_over():
    limits = [pod["containers"][0]["resources"]["limits"] for pod in pods(manifest("RayCluster"))]
    assert all(int(limit.get("nvidia.com/gpu", 2)) > 1 for limit in limits)
    assert any("nvidia.com/gpu" in limit for limit in limits)


def test_every_pod_uses_the_mlflow_server_which_alone_has_its_volume():
    """SQLite on a volume that several nodes mount can be spoilt."""
    claims = {d["metadata"]["name"]: d["spec"] for d in documents() if "accessModes" in d["spec"]}
    deployment, service = manifest("Deployment"), manifest("Service")
    pod = deployment["template"]
    assert service["selector"] == deployment["selector"]["matchLabels"] == pod["metadata"]["labels"]
    assert manifest("NetworkPolicy")["podSelector"]["matchLabels"] == service["selector"]
    (container,), (volume,) = pod["spec"]["containers"], pod["spec"]["volumes"]
    (mount,) = container["volumeMounts"]
    claim = volume["persistentVolumeClaim"]["claimName"]
    assert claims[claim]["accessModes"] == ["ReadWriteOnce"]
    assert deployment["replicas"] == 1
    options = mlflow_server.make_context("server", list(container["args"])).params
    assert options["backend_store_uri"] == f"sqlite:///{mount['mountPath']}/mlflow.db"
    assert Path(options["artifacts_destination"]).parent == Path(mount["mountPath"])
    (name,) = {d["metadata"]["name"] for d in documents() if d["kind"] == "Service"}
    address = f"{name}:{service['ports'][0]['port']}"
    assert address in options["allowed_hosts"].split(",")
    for each in (pod for spec in ray_clusters() for pod in pods(spec)):
        assert variables(each)["MLFLOW_TRACKING_URI"] == f"http://{address}"
        claimed = (v.get("persistentVolumeClaim", {}) for v in each["volumes"])
        assert claim not in {volume.get("claimName") for volume in claimed}


@pytest.mark.long
def test_the_mlflow_server_answers_pods_and_keeps_its_store_on_its_volume(tmp_path):
    pod = manifest("Deployment")["template"]["spec"]
    (container,) = pod["containers"]
    port = free_port()
    own = {"--host=0.0.0.0": "--host=127.0.0.1", "--port=5000": f"--port={port}"}
    arguments = [
        own.get(argument, argument.replace("/mlflow/", f"{tmp_path}/"))
        for argument in container["args"]
    ]
    command = [sys.executable, "-m", *container["command"], *arguments]
    environment = {**os.environ, **variables(pod)}
    with subprocess.Popen(command, env=environment, start_new_session=True) as server:
        try:
            wait_for(f"http://127.0.0.1:{port}{container['readinessProbe']['httpGet']['path']}")
            search = f"http://127.0.0.1:{port}/api/2.0/mlflow/experiments/search"
            answers = {
                host: httpx.post(search, json={"max_results": 1}, headers={"Host": host})
                for host in ("specdec-mlflow:5000", "127.0.0.1:5000", "elsewhere:5000")
            }
        finally:
            os.killpg(server.pid, signal.SIGKILL)
    assert [answer.status_code for answer in answers.values()] == [200, 200, 403]
    assert (tmp_path / "mlflow.db").exists()


def wait_for(probe):
    """Until the address answers one that asks by the pod's own address, as Kubernetes does."""

    def answers():
        with suppress(httpx.TransportError):
            assert httpx.get(probe, headers={"Host": "10.1.2.3:5000"}).status_code == 200
            return True
        return False

    wait_until(answers)


def test_the_ray_job_runs_a_job():
    spec = manifest("RayJob")
    check_command(spec["entrypoint"])
    assert RuntimeEnv(**yaml.safe_load(spec["runtimeEnvYAML"]), _validate=False)["working_dir"]


def test_the_ray_service_serves_this_application():
    config = ServeDeploySchema.model_validate(
        yaml.safe_load(manifest("RayService")["serveConfigV2"])
    )
    (application,) = config.applications
    module, name = application.import_path.split(":")
    assert callable(getattr(importlib.import_module(module), name))
    arguments = parse(Arguments, application.args, "args")
    assert arguments.slots == 4
    assert arguments.replicas == 2
    # Keys are where every pod that may answer finds them.
    spec = manifest("RayService")["rayClusterConfig"]
    for group in (spec["headGroupSpec"], *spec["workerGroupSpecs"]):
        pod = group["template"]["spec"]
        [keys] = [v["name"] for v in pod["volumes"] if "secret" in v]
        mounts = {m["name"]: m["mountPath"] for m in pod["containers"][0]["volumeMounts"]}
        assert mounts[keys] == str(arguments.api_key_file.parent)
    # What a deployment is given here would replace what the application gives it.
    assert not application.deployments


@pytest.mark.parametrize("file", ["ray-cluster", "ray-job", "ray-service", "mlflow"])
def test_every_pod_can_write_to_the_volume_and_starts_without_a_look_at_all_its_files(file):
    text = (ROOT / "cluster" / "kuberay" / f"{file}.yaml").read_text()
    pods = [pod for document in yaml.safe_load_all(text) for pod in pods_in(document)]
    assert pods
    group = {"fsGroup": 100, "fsGroupChangePolicy": "OnRootMismatch"}
    assert all(pod["securityContext"] == group for pod in pods)


def pods_in(part):
    """The specifications of pods anywhere in a manifest."""
    if isinstance(part, list):
        return [pod for member in part for pod in pods_in(member)]
    if not isinstance(part, dict):
        return []
    own = [part] if "containers" in part else []
    return own + [pod for member in part.values() for pod in pods_in(member)]


def test_every_job_that_the_manual_submits_is_one():
    pages = (ROOT / "README.md", ROOT / "docs" / "start" / "cluster.md")
    text = "\n".join(page.read_text() for page in pages)
    lines = re.findall(r"ray job submit (.*?) -- (.*)", text)
    assert len(lines) > 5
    for options, line in lines:
        check_command(line)
        if line.split()[2] in ("jobs.train_draft", "jobs.train_eagle"):  # without tasks of Ray
            assert "--entrypoint-num-cpus" in options
