"""A benchmark's report is whole: every table in Markdown, CSV and HTML, and its MLflow run."""

import pandas as pd
import pytest

from dashboards.outputs.files import write
from dashboards.outputs.markdown import document, part
from dashboards.outputs.mlflow_runs import log
from dashboards.reports.bench import findings, report
from specdec_core.evidence.bench.result import BenchResult
from tests.registered import runs_in
from tests.specdec_core.evidence.bench.test_result import result_of
from tests.specdec_core.evidence.bench.test_result import row as row_of


def test_the_report_has_every_row_and_says_who_wins(bench_result, bench_prompts, home):
    whole = report(bench_result)
    shown = [section for section in whole.sections if section.frame is not None]
    folder = home / "bench" / "tiny"
    bench_result.save(folder)
    write(whole, folder)
    files = {path.name for path in folder.iterdir()}
    keys = [section.key for section in shown]
    assert keys == [
        *("temperature_0", "temperature_1", "sets_0", "sets_1"),
        *("parts_0", "parts_1"),
        "contestants",
    ]
    assert files >= {"report.md", "report.html", "bench.json", "summary.csv"}
    assert files >= {f"{key}.csv" for key in keys}
    text = (folder / "report.md").read_text()
    for row in bench_result.rows:
        assert f"| {row.name} |" in text or f"| **{row.name}** |" in text
    for section in shown:
        assert f"## {section.title}" in text
        frame = pd.read_csv(folder / f"{section.key}.csv")
        assert len(frame) == len(section.frame) >= 1
        table = part(section).split("\n\n")[-1].splitlines()
        assert len({line.replace("\\|", "").count("|") for line in table}) == 1
        assert len(table) == len(section.shown) + 2
    (greedy, sampled) = (line for line in findings(bench_result) if "transformers' best" in line)
    assert greedy.startswith("temperature 0: our best")
    assert "(each chosen on other prompts than it is timed on, in 6 parts of 3)" in sampled
    assert "6 of 6" in text
    assert BenchResult.load(folder) == bench_result

    prompts = (bench_result.prompts, bench_prompts)
    run_id = log(whole, [folder], prompts=prompts)
    client, [run], nested = runs_in(home)
    assert run.info.run_id == run_id
    assert run.info.status == "FINISHED"
    (best, _) = bench_result.leads()
    assert run.data.metrics["over_transformers_T0"] == pytest.approx(best.ratio)
    assert run.inputs.dataset_inputs[0].dataset.digest == "0" * 36
    assert len(nested) == len(bench_result.rows)
    speeds = {run.data.tags["mlflow.runName"]: run.data.metrics for run in nested}
    for row in bench_result.rows:
        logged = speeds[f"{row.group}: {row.name}, T={row.temperature:g}"]
        assert logged["tokens_per_second"] == pytest.approx(row.tokens_per_second)
    artifacts = {file.path for file in client.list_artifacts(run_id)}
    assert artifacts >= {"report.md", "summary.csv"}


def test_what_is_not_lossless_is_said(bench_result):
    broken = bench_result.model_copy(deep=True)
    chain = broken.at(0.0, "specdec")[1]
    chain.takes[1][2].outputs[0][4] += 1
    (line,) = (line for line in findings(broken) if line.startswith("NOT LOSSLESS"))
    assert "1 of 6 outputs" in line
    assert "first at token 4" in line
    assert "5 of 6, from 4" in document(report(broken))


def test_every_prompt_set_has_its_speeds_ratios_and_accepted_lengths(bench_result):
    rows = [
        row_of("autoregressive", "specdec", [2.0] * 8, autoregressive=True),
        row_of("SVIP", "specdec", [0.5, 1.0, 0.8, 1.0] * 2),
        row_of("other draft", "specdec", [0.1] * 8),
    ]
    categories = {"categories": ["chat", "gsm8k", None, "coding"] * 2}
    result = result_of(bench_result, rows).model_copy(update=categories)
    [table] = (part(section) for section in report(result).parts if section.key == "sets_0")
    assert "| chat (2) tokens/s | chat (2) over our autoregressive | chat (2) MAT |" in table
    (svip,) = (line for line in table.splitlines() if line.startswith("| SVIP |"))
    assert svip.startswith("| SVIP | 20 | 4.00× |")
    (fastest,) = (line for line in table.splitlines() if line.startswith("| other draft |"))
    assert "| **20.00×** |" in fastest
