"""MLflow's pages show our experiments as tables of runs with the columns to compare first."""

import json
import shutil

import pytest
from mlflow import MlflowClient

from dashboards.outputs.mlflow_runs import log
from dashboards.reports.bench import report
from dashboards.store import experiment_id_of, tracking_uri
from dashboards.tracking.sweep_run import SweepRun
from dashboards.tracking.training_run import log_heads
from dashboards.views import VIEWS
from jobs.console import console, print_runs_page
from specdec_core.drafting.heads.card import HeadSpec
from specdec_core.drafting.heads.storage import save_head
from specdec_core.servers.process import free_port
from specdec_core.training.heads.training import FinishedHead, HeadTraining
from tests.dashboards import browser
from tests.dashboards.tracking.test_delivery import server
from tests.dashboards.tracking.test_heads_run import SETTINGS
from tests.specdec_core.drafting.heads.examples import learnable

KIND = "mlflow.experimentKind"
NOTE = "mlflow.note.content"


@pytest.fixture(scope="module")
def pair(swept, bench_result, bench_prompts, empty_store, tmp_path_factory):
    """A pair's name and a workspace whose store has a sweep, a benchmark and a head of the pair."""
    home = tmp_path_factory.mktemp("views")
    shutil.copy(empty_store, home / "mlflow.db")
    result, folder = swept[0].model_copy(deep=True), home / "sweep"
    shutil.copytree(swept[1], folder)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("SPECDEC_HOME", str(home))
        tracking = SweepRun()
        tracking.begun(result, bench_prompts, folder)
        tracking.finish(result, folder)
        bench = bench_result.model_copy(update={"pair": result.pair})
        log(report(bench), [], prompts=(bench.prompts, bench_prompts))
        head = HeadTraining(HeadSpec(), learnable(), SETTINGS).run()
        card = save_head(head.weights, head.card, home / "heads" / "mine")
        trained = FinishedHead("mine", home / "heads" / "mine", card)
        log_heads(result.pair, "small", {}, [trained], home / "heads")
        yield result.pair.name, home


def runs_of(experiment, view):
    client = MlflowClient(tracking_uri())
    return client.search_runs([experiment_id_of(client, experiment)], VIEWS[view].runs)


@pytest.mark.parametrize("view", VIEWS)
def test_a_view_has_columns_that_its_runs_have(pair, view):
    runs = runs_of(pair[0], view)
    assert runs
    known = {
        f"{kind}.`{name}`"
        for run in runs
        for kind in ("metrics", "params", "tags")
        for name in getattr(run.data, kind)
    }
    assert known >= set(VIEWS[view].columns)


def test_an_experiment_gets_the_tags_that_it_lacks_and_keeps_those_that_it_has(home):
    client = MlflowClient(tracking_uri())
    old = client.create_experiment("old")
    theirs = {KIND: "genai_development", NOTE: "ours, do not touch"}
    kept = client.create_experiment("kept", tags=theirs)
    new = experiment_id_of(client, "new")
    for name, known in (("old", old), ("kept", kept), ("new", new)):
        assert experiment_id_of(client, name) == known
    tags = {known: client.get_experiment(known).tags for known in (old, kept, new)}
    assert tags[kept].items() >= theirs.items()
    for experiment in (old, new):
        assert tags[experiment][KIND] == "custom_model_development"
        assert f"#/experiments/{experiment}/runs?" in tags[experiment][NOTE]
    for view in VIEWS:
        for of_experiment in tags.values():
            saved = json.loads(of_experiment[f"mlflow.sharedViewState.{view}"])
            assert (saved["name"], type(saved["state"])) == (view, str)


@pytest.fixture(scope="module")
def served(pair):
    """The address of a server of the store."""
    port = free_port()
    with server(pair[1], port):
        yield f"http://127.0.0.1:{port}"


@pytest.fixture(scope="module")
def window():
    """Wide: the table leaves out what does not fit."""
    with browser.Browser(2400, 1000) as opened:
        yield opened


HEADINGS = """
    const cells = [...document.querySelectorAll(".ag-header-cell")];
    const left = cell => cell.getBoundingClientRect().left;
    return cells.sort((a, b) => left(a) - left(b)).map(cell => cell.getAttribute("col-id")).join();
"""


def shows(window, view, runs):
    """Fails unless a table shows `runs` runs with the columns of a view, from the left."""
    columns = ["attributes.`Run Name`", "runDateAndNestInfo", *VIEWS[view].columns]
    ready = f"""
        const rows = document.querySelectorAll(".ag-center-cols-container .ag-row").length;
        const headings = (() => {{ {HEADINGS} }})();
        return rows === {runs} && headings.includes({json.dumps(",".join(columns))});
    """
    assert window.wait(ready, 60), window.run("return location.href") + window.run(HEADINGS)


@pytest.mark.long
def test_the_address_that_a_command_prints_opens_the_table_of_runs(
    pair, served, window, monkeypatch
):
    """As do the links on the page of the experiment."""
    monkeypatch.setenv("MLFLOW_TRACKING_URI", served)
    with console.capture() as printed:
        print_runs_page(pair[0], "benchmarks")
    label, address = printed.get().split()
    assert label == "compare"
    window.open(address)
    shows(window, "benchmarks", len(runs_of(pair[0], "benchmarks")))

    address = f"{served}/#/experiments"
    for text in (pair[0], "sweeps"):
        window.open("about:blank")  # else the page would not load anew
        window.open(address)
        link = f"[...document.querySelectorAll('a')].find(a => a.textContent === '{text}')?.href"
        address = window.wait(f"return {link}", 60)
        assert address, window.run("return location.href")
    window.open("about:blank")
    window.open(address)
    shows(window, "sweeps", len(runs_of(pair[0], "sweeps")))
