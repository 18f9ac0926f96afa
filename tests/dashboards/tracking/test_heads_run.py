"""Heads are shown and logged as they were trained, and logged once."""

import pytest
from mlflow import MlflowClient

from dashboards.outputs.mlflow_runs import Undelivered
from dashboards.reports.heads import FITS, fits
from dashboards.store import tracking_uri
from dashboards.tracking.training_run import log_heads
from specdec_core.config import PairSpec
from specdec_core.drafting.heads.card import HeadSpec, HeadTrainingSettings
from specdec_core.drafting.heads.storage import save_head
from specdec_core.servers.process import free_port
from specdec_core.training.heads.training import FinishedHead, HeadTraining
from tests.registered import runs_in
from tests.specdec_core.drafting.heads.examples import learnable

SETTINGS = HeadTrainingSettings(learning_rate=1e-2, batch_size=256, epochs=3)
PARAMS = {"recordings": ["training"], "settings": SETTINGS.model_dump()}


@pytest.fixture(scope="module")
def heads(tmp_path_factory):
    root, heads = tmp_path_factory.mktemp("heads"), []
    for spec in (HeadSpec(depth=0), HeadSpec(depth=1)):
        trained = HeadTraining(spec, learnable(), SETTINGS).run()
        folder = root / f"small-{spec.label}"
        card = save_head(trained.weights, trained.card, folder)
        heads.append(FinishedHead(folder.name, folder, card))
    return heads


@pytest.fixture
def store(home):
    return MlflowClient(tracking_uri())


def log(heads, out, params=PARAMS):
    """Log a training that has ended; returns its run."""
    return log_heads(PairSpec(), "small", params, heads, out)


def test_the_table_marks_the_least_eval_kl(heads):
    section = fits({head.label: head.card for head in heads})
    best = min(range(2), key=lambda i: heads[i].card.metrics["eval_kl"])
    assert section.best == [(best, list(FITS).index("eval/KL"))]
    assert section.shown["eval/KL"][best] == f"{heads[best].card.metrics['eval_kl']:.3f}"


def test_each_head_is_one_run_with_its_curves_and_files(heads, store, home, tmp_path):
    first = log(heads[:1], tmp_path)
    again = log(heads, tmp_path)  # the same training, which was interrupted
    assert again != first
    _, (parent,), runs = runs_in(home)
    assert parent.info.run_id == again
    nested = {run.info.run_name: run for run in runs}
    assert (len(runs), set(nested)) == (2, {head.label for head in heads})
    for head in heads:
        run = nested[head.label]
        assert run.info.status == "FINISHED"
        assert run.data.tags["mlflow.parentRunId"] == again
        assert run.data.params["w_rej"] == "1.0"
        assert run.data.metrics["kept_auc"] == pytest.approx(head.card.metrics["auc"])
        history = store.get_metric_history(run.info.run_id, "eval_kl")
        assert [m.step for m in history] == [1, 2, 3]
        assert [m.value for m in history] == pytest.approx([e.eval_kl for e in head.card.curve])
        files = {f.path for f in store.list_artifacts(run.info.run_id)}
        assert files == {"head"}
        kept = {f.path for f in store.list_artifacts(run.info.run_id, "head")}
        assert kept == {"head/model.safetensors", "head/head.json"}


def test_other_settings_are_another_run(home, tmp_path):
    first, second = (log([], tmp_path, {**PARAMS, **more}) for more in ({}, {"width": 8}))
    assert first != second
    assert len(runs_in(home)[1]) == 2


def test_a_server_that_is_away_gets_everything_by_the_same_command(
    heads, home, tmp_path, monkeypatch
):
    monkeypatch.setenv("MLFLOW_HTTP_REQUEST_MAX_RETRIES", "0")
    with monkeypatch.context() as away:
        away.setenv("MLFLOW_TRACKING_URI", f"http://127.0.0.1:{free_port()}")
        with pytest.raises(Undelivered, match=rf"the heads are in {tmp_path}, and the same"):
            log(heads, tmp_path)
    log(heads, tmp_path)
    client, (parent,), nested = runs_in(home)
    assert {run.info.status for run in (parent, *nested)} == {"FINISHED"}
    assert sorted(r.data.tags["training"] for r in nested) == sorted(h.card.training for h in heads)
    for run in nested:
        history = client.get_metric_history(run.info.run_id, "eval_kl")
        assert [metric.step for metric in history] == [1, 2, 3]
