"""A lossy method says so wherever it appears."""

import mlflow
import pytest
from mlflow import MlflowClient

from cluster.serving.protocol.counts import SpecDec
from dashboards.outputs.console import table
from dashboards.outputs.files import write_page
from dashboards.reports.standings import standings
from dashboards.reports.sweep import lossless, report
from dashboards.store import tracking_uri
from dashboards.tracking.registry import register
from dashboards.tracking.sweep_run import SweepRun
from jobs.console import console
from specdec_core.engine import Engine, Request
from specdec_core.prompts.prompt_sets import Prompt
from specdec_core.search.results import Trial
from specdec_core.tokens.statistics import Counts
from tests.configurations import drafting

LOSSY = drafting("target_tree", draft="draft", branching=(2, 2, 1))


@pytest.fixture
def result(swept, tiny_pair):
    """The sweep as if it had counted a lossy configuration too, the fastest of all."""
    result = swept[0].model_copy(deep=True)
    requests = [Request("a", tuple(range(5, 25)), 24)]
    counts = Counts.of(Engine(tiny_pair, LOSSY).generate(requests))
    metrics = counts.metrics() | {"estimated_speedup": 9.0}
    result.trials.append(Trial(configuration=LOSSY, counts=counts.as_dict(), metrics=metrics))
    return result


def test_report_and_console_name_it_and_do_not_put_it_first(result, folder):
    page = write_page(report(result), folder).read_text()
    assert "1 of 9 configurations are lossy" in page
    assert LOSSY.label.endswith(", lossy")
    assert LOSSY.label in page
    with console.capture() as shown:
        console.print(table(standings(result)))
    assert "lossy" in shown.get()
    chosen = result.model_copy(update={"champion": LOSSY.id})
    page = write_page(report(chosen), folder).read_text()
    assert "no: what is served is a lossy method, allowed by name" in page


def test_a_lossy_method_that_is_served_for_loads_alone_is_named(result, under_load):
    assert lossless(result).startswith("yes: ")
    choice = under_load.under_load.model_copy(update={"chosen": LOSSY})
    assert lossless(result.model_copy(update={"under_load": choice})).startswith("no: ")


def test_mlflow_runs_and_versions_are_tagged(result, folder, home):
    result.save(folder)
    tracking = SweepRun()
    tracking.begun(result, [Prompt("a", "x = 1")], folder)
    tracking.finish(result, folder)
    client = MlflowClient(tracking_uri())
    run = client.get_run(result.mlflow_run_id)
    found = f"tags.config_id = '{LOSSY.id}'"
    [lossy] = client.search_runs([run.info.experiment_id], found)
    assert lossy.data.tags["lossless"] == "false"
    table = mlflow.artifacts.load_text(f"{run.info.artifact_uri}/configurations.csv")
    assert LOSSY.label in table
    versions = {
        tag: register(result, config_id, client)
        for tag, config_id in (("true", result.champion), ("false", LOSSY.id))
    }
    for tag, version in versions.items():
        registered = client.get_model_version(result.pair.name, str(version))
        assert registered.tags["lossless"] == tag


def test_responses_say_so():
    assert SpecDec.of([], LOSSY).lossless is False
