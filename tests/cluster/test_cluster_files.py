"""The cluster files are what Ray and KubeRay read, and run what this checkout has."""

from __future__ import annotations

import importlib
import re
import shlex
from importlib.metadata import version
from pathlib import Path
from typing import Any

import pytest
import typer
import yaml
from ray.autoscaler._private.util import prepare_config, validate_config
from ray.runtime_env import RuntimeEnv
from ray.serve.schema import ServeDeploySchema

from cluster.serving.replicas.number import Replicas
from jobs.cli import COMMANDS
from jobs.serve import Arguments
from specdec_core.config import parse

ROOT = Path(__file__).parents[2]
FILES = ROOT / "cluster"
MANIFESTS = sorted((FILES / "kuberay").glob("*.yaml"))
KINDS = {"PersistentVolumeClaim", "RayCluster", "RayJob", "RayService"}


def manifest(kind: str) -> dict[str, Any]:
    (found,) = [d for f in MANIFESTS if (d := yaml.safe_load(f.read_text()))["kind"] == kind]
    return found["spec"]


def check_command(line: str) -> None:
    """`line` is a job of this checkout, with options that it has."""
    words = shlex.split(line, comments=True)
    assert words[:2] == ["python", "-m"], line
    package, _, name = words[2].partition(".")
    assert (package, name.replace("_", "-")) in {("jobs", command) for command in COMMANDS}
    app = typer.Typer(add_completion=False)
    app.command()(importlib.import_module(words[2]).main)
    typer.main.get_command(app).make_context(name, words[3:])
    for word in words[3:]:
        if word.endswith(".yaml"):
            assert (ROOT / word).exists(), word


def test_the_launchers_file_fits_rays_schema() -> None:
    config = yaml.safe_load((FILES / "ray-cluster.yaml").read_text())
    validate_config(prepare_config(config))
    for command in (*config["head_start_ray_commands"], *config["worker_start_ray_commands"]):
        assert "ray stop" in command or "RAY_AUTH_MODE=token" in command


def test_the_runtime_environment_is_one_that_ray_takes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(ROOT)
    content = yaml.safe_load((FILES / "runtime-env.yaml").read_text())
    assert (ROOT / content["uv"]).exists()
    environment = RuntimeEnv(**content)
    assert f"ray=={version('ray')}" in environment["uv"]["packages"]


def test_every_kind_of_manifest_is_there_and_of_the_installed_ray() -> None:
    documents = [yaml.safe_load(file.read_text()) for file in MANIFESTS]
    assert {document["kind"] for document in documents} == KINDS
    for spec in (
        manifest("RayCluster"),
        manifest("RayJob")["rayClusterSpec"],
        manifest("RayService")["rayClusterConfig"],
    ):
        assert spec["rayVersion"] == version("ray")
        assert spec["authOptions"]["mode"] == "token"
        groups = [spec["headGroupSpec"], *spec["workerGroupSpecs"]]
        for pod in (group["template"]["spec"] for group in groups):
            (container,) = pod["containers"]
            claims = {v["name"]: v.get("persistentVolumeClaim") for v in pod["volumes"]}
            mounts = {m["mountPath"]: claims[m["name"]] for m in container["volumeMounts"]}
            home = {e["name"]: e["value"] for e in container["env"]}["SPECDEC_HOME"]
            assert mounts[home] == {"claimName": "specdec-home"}
            assert container["resources"]["limits"] == container["resources"]["requests"]


def test_the_ray_job_runs_a_job() -> None:
    spec = manifest("RayJob")
    check_command(spec["entrypoint"])
    assert RuntimeEnv(**yaml.safe_load(spec["runtimeEnvYAML"]), _validate=False)["working_dir"]


def test_the_ray_service_serves_this_application() -> None:
    config = ServeDeploySchema.model_validate(
        yaml.safe_load(manifest("RayService")["serveConfigV2"])
    )
    (application,) = config.applications
    module, name = application.import_path.split(":")
    assert callable(getattr(importlib.import_module(module), name))
    arguments = parse(Arguments, application.args, "args")
    assert arguments.slots == 4
    replicas = Replicas.asked(arguments.replicas, arguments.max_replicas)
    assert replicas.most == 8
    # Keys are where every pod that may answer finds them.
    assert arguments.api_key_file is not None
    spec = manifest("RayService")["rayClusterConfig"]
    for group in (spec["headGroupSpec"], *spec["workerGroupSpecs"]):
        pod = group["template"]["spec"]
        [keys] = [v["name"] for v in pod["volumes"] if "secret" in v]
        mounts = {m["name"]: m["mountPath"] for m in pod["containers"][0]["volumeMounts"]}
        assert mounts[keys] == str(arguments.api_key_file.parent)
    # What a deployment is given here would replace what the application gives it.
    assert not application.deployments


def test_every_job_that_the_manual_submits_is_one() -> None:
    pages = (ROOT / "README.md", ROOT / "docs" / "start" / "cluster.md")
    text = "\n".join(page.read_text() for page in pages)
    lines = re.findall(r"ray job submit .*? -- (.*)", text)
    assert len(lines) > 5
    for line in lines:
        check_command(line)
