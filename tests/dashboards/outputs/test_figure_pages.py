"""Figures in MLflow are pages that draw themselves, with their tables beside them."""

import pandas as pd
import pytest
from mlflow import MlflowClient

from dashboards.outputs.html import figure_page
from dashboards.outputs.mlflow_runs import log_figures
from dashboards.reports.sweep import of_folder
from dashboards.reports.sweep_figures import drawn
from tests.dashboards import browser


@pytest.fixture(scope="module")
def drawings(swept, with_heads):
    rounds = pd.read_parquet(swept[1] / "rounds.parquet")
    sections = drawn(with_heads, rounds)
    return {section.key: section for section in sections}


def test_each_figure_is_an_artifact_and_each_table_a_file(swept, with_heads, drawings, home):
    client = MlflowClient(f"sqlite:///{home / 'mlflow.db'}")
    experiment = client.create_experiment("pair", artifact_location=str(home / "artifacts"))
    run_id = client.create_run(experiment).info.run_id
    log_figures(client, run_id, of_folder(with_heads, swept[1]).figures)
    logged = {item.path for item in client.list_artifacts(run_id, "figures")}
    tables = {name for name, section in drawings.items() if section.frame is not None}
    assert tables == {"heads"}
    pages = {f"figures/{name}.html" for name in drawings}
    assert logged == pages | {f"figures/{name}.csv" for name in tables}
    table = pd.read_csv(client.download_artifacts(run_id, "figures/heads.csv"))
    assert list(table.columns) == list(drawings["heads"].frame.columns)
    assert len(table) == 4


def test_a_page_draws_itself_without_a_network(drawings, tmp_path):
    path = tmp_path / "heads.html"
    path.write_text(figure_page(drawings["heads"]))
    assert path.stat().st_size < 3e6
    with browser.Browser() as window:
        window.open(path)
        drawn = window.wait("return document.querySelectorAll('.plot .trace path').length")
        assert drawn > 3
        assert window.run("return document.querySelectorAll('.numbers tbody tr').length") == 4
        assert window.log("browser") == []
        assert all(url.startswith(("file:", "data:")) for url in window.requests())
