"""The report of servers under load is whole: tables, figure, files and its MLflow run."""

import pandas as pd
import pytest

from dashboards.outputs.files import write
from dashboards.outputs.markdown import document
from dashboards.outputs.mlflow_runs import log
from dashboards.reports.load import findings, report
from specdec_core.prompts.prompt_sets import Prompt
from tests.load_result import REQUESTS, load_result, open_result
from tests.registered import runs_in


def test_the_report_says_who_wins_and_how_it_was_measured():
    result = load_result()
    first, second, *ours = findings(result)
    assert first.startswith("1 client: our best, chain, writes 0.87×")
    assert "vllm's best, vLLM n-gram K=4 (each chosen on other requests than" in second
    assert any("4 clients: chain writes" in line and "1.33×" in line for line in ours)
    text = document(report(result))
    assert "8 with 1 client, 8 with 4 clients" in text
    for row in result.rows:
        assert text.count(f"| {row.name} |") + text.count(f"| **{row.name}** |") >= 2
    assert "## Errors" not in text


def test_errors_and_other_texts_are_said():
    result = load_result("float32")
    chain = result.rows[1]
    chain.runs["4"][1][3].text = "other"
    chain.runs["1"][0][0].error = "status 429: full"
    text = document(report(result))
    assert "NOT LOSSLESS: 4 clients: 1 of 16 texts of chain" in text
    assert "status 429: full" in text


def test_goodput_at_rates_is_drawn_and_said():
    result = open_result()
    lines = findings(result)
    assert "2 requests/s: 100% of chain's requests keep latency ≤ 0.17 s" in lines
    assert any("2 requests/s: chain answers 1.33×" in line for line in lines)
    whole = report(result)
    text = document(whole)
    assert "8 with 2 requests/s" in text
    assert "10.0 ms late" in text
    [rates] = [part for part in whole.parts if part.figure]
    assert rates.key == "rates"
    assert [list(trace.text) for trace in rates.figure.data] == [["2/s"]] * 4
    goodput = {trace.name: trace.y[0] for trace in rates.figure.data}
    assert goodput["autoregressive"] == 0 < goodput["chain"]
    assert "rate_2.goodput" in whole.nested[0].metrics


def test_it_is_written_and_logged(home):
    result, folder = load_result(), home / "bench" / "tiny"
    whole = report(result)
    result.save(folder)
    write(whole, folder)
    names = {path.name for path in folder.iterdir()}
    assert names >= {"report.md", "report.html", "load.json", "requests.csv", "summary.csv"}
    assert len(pd.read_csv(folder / "requests.csv")) == 4 * 2 * 2 * REQUESTS

    run_id = log(whole, [folder], prompts=(result.prompts, [Prompt("1", "x")]))
    client, _, nested = runs_in(home)
    history = client.get_metric_history(run_id, "over_vllm")
    assert {metric.step: metric.value for metric in history} == {
        lead.at.clients: pytest.approx(lead.ratio) for lead in result.leads()
    }
    assert {run.data.tags["group"] for run in nested} == {"specdec", "vllm"}
    assert len(nested) == len(result.rows)
