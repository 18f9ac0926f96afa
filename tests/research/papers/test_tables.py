"""The papers' tables say what was measured: cells, bold, ties, lossy marks, CSV, page, MLflow."""

from __future__ import annotations

import json
from datetime import UTC, datetime
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
from mlflow import MlflowClient

from dashboards.outputs.console import table as console_table
from dashboards.outputs.files import write
from dashboards.outputs.markdown import part
from dashboards.outputs.mlflow_runs import log
from dashboards.sections import Section
from research.papers import tables as papers
from research.papers.figures import paper_figure
from research.papers.plan import PaperPlan
from research.papers.result import Measured, PapersResult
from research.papers.tables import findings, notes, report, tables
from specdec_core.config import AUTOREGRESSIVE, Configuration, Sampling
from specdec_core.prompts.prompt_sets import PromptSet
from specdec_core.search.results import Timing
from specdec_core.tokens.statistics import Counts
from tests.research.addresses import fetched

LOOKUP = {"kind": "prompt_lookup"}
FIXED = {"kind": "fixed", "max_tokens": "λ"}
CHAIN = {"kind": "draft_model", "policy": {"kind": "fixed", "max_tokens": 4}}
PLAN = PaperPlan.model_validate(
    {
        "prompts": {"code": {"source": "code.jsonl"}, "sums": {"source": "sums.jsonl"}},
        "notes": ["Other models than the paper's."],
        "tables": {
            "methods": {
                "title": "Methods by task",
                "paper": "A paper, Table 1",
                "prompts": ["code", "sums"],
                "columns": ["mat", "speedup", "verification_rate"],
                "notes": ["PLD is prompt lookup."],
                "rows": [
                    {"name": "Vanilla"},
                    {"name": "Chain", "drafter": CHAIN},
                    {"name": "PLD", "drafter": LOOKUP},
                    {"name": "Wide", "drafter": {"kind": "target_tree", "branching": [2, 2]}},
                    {
                        "name": "UCBSpec",
                        "drafter": {"kind": "bandit", "arms": [CHAIN, LOOKUP]},
                    },
                ],
            },
            "lengths": {
                "title": "By length",
                "paper": "A paper, Table 2",
                "prompts": ["code"],
                "columns": ["speedup"],
                "vary": {"λ": [4, 8]},
                "rows": [
                    {"name": "Chain", "drafter": {"kind": "draft_model", "policy": FIXED}},
                ],
            },
        },
    }
)
# seconds of the two prompts, one repeat; autoregressive decoding takes 8 for each
SECONDS = {
    "Vanilla": (8.0, 8.0),
    "Chain": (4.0, 4.2),
    "PLD": (3.0, 5.0),
    "Wide": (1.0, 1.0),
    "UCBSpec": (3.9, 4.1),
}


def measured(prompts: str, configuration: Configuration, seconds: tuple[float, float]) -> Measured:
    ratio = 16 / sum(seconds)
    counts = Counts(2, 64, 40, round(64 / ratio), 10, 50, 40, round(64 / ratio))
    timing = Timing(
        config_id=configuration.id,
        seconds=[list(seconds)],
        tokens=[32, 32],
        speedup=ratio,
        low=1.0 if configuration == AUTOREGRESSIVE else ratio - 0.25,
        high=1.0 if configuration == AUTOREGRESSIVE else ratio + 0.25,
        tokens_per_second=64 / sum(seconds),
    )
    metrics = {**counts.metrics(), "speedup": ratio, "tokens_per_second": 64 / sum(seconds)}
    return Measured(
        prompts=prompts,
        configuration=configuration,
        counts=counts.as_dict(),
        metrics=metrics,
        timing=timing,
    )


@pytest.fixture(scope="module")
def result() -> PapersResult:
    everything = []
    for method in PLAN.methods("methods"):
        (configuration,) = method.configurations
        everything.append(measured("code", configuration, SECONDS[method.name]))
        if method.name != "PLD":  # not measured on this set
            everything.append(measured("sums", configuration, SECONDS[method.name]))
    (method,) = PLAN.methods("lengths")
    everything.append(measured("code", method.configurations[1], (6.0, 6.0)))
    sets = {
        name: PromptSet(source=f"{name}.jsonl", count=2, digest="0" * 64)
        for name in ("code", "sums")
    }
    return PapersResult(
        name="mine",
        started=datetime(2026, 11, 21, tzinfo=UTC),
        plan=PLAN,
        pair=PLAN.pair,
        sets=sets,
        measured=everything,
        environment={"python": "3.11"},
    )


def written(result: PapersResult, folder: Path) -> list[Path]:
    return write(report(result), folder, "papers", apart=True)


def rows(sheet: Section) -> dict[str, list[str]]:
    """The cells of a table's Markdown by its methods."""
    lines = [line for line in part(sheet).splitlines() if line.startswith("|")]
    cells = [[cell.strip() for cell in line.strip("|").split("|")] for line in lines]
    return {row[0].strip("* "): row[1:] for row in cells}


def test_rows_are_compared_with_the_row_that_a_table_names(result: PapersResult) -> None:
    table = PLAN.tables["methods"].model_copy(update={"against": "Chain"})
    plan = PLAN.model_copy(update={"tables": {"methods": table}})
    [section] = tables(result.model_copy(update={"plan": plan}))
    code, sums = section.lines[1:]
    # 8.2 seconds of the chain over 8 of prompt lookup
    assert code.startswith("code: times as fast as Chain: PLD 1.02× (")
    assert "Wide (lossy) 4.10×" in code
    assert "PLD" not in sums  # not measured there
    assert tables(result)[0].lines == PLAN.tables["methods"].notes


def test_sampled_rows_are_compared_with_the_sampled_one(result: PapersResult) -> None:
    table = PLAN.tables["methods"]
    table = table.model_copy(update={"against": "Chain", "temperatures": (0.0, 1.0)})
    plan = PLAN.model_copy(update={"tables": {"methods": table}})
    hot = {"sampling": Sampling(temperature=1)}
    sampled = [
        each.model_copy(update={"configuration": each.configuration.model_copy(update=hot)})
        for each in result.measured
    ]
    fields = {name: getattr(result, name) for name in PapersResult.model_fields}
    both = PapersResult(**{**fields, "plan": plan, "measured": [*result.measured, *sampled]})
    [section] = tables(both)
    compared = [line for line in section.lines if line.startswith("code: ")]
    assert len(compared) == 2
    for line, own, other in zip(compared, ("T=0", "T=1"), ("T=1", "T=0"), strict=True):
        assert line.startswith(f"code: times as fast as Chain, {own}: PLD, {own} 1.02× (")
        assert other not in line


def test_a_column_is_a_prompt_set_and_a_quantity(result: PapersResult) -> None:
    methods, _ = tables(result)
    cells = rows(methods)
    assert cells["method"] == [
        *("code MAT", "code ratio", "code verific. rate"),
        *("sums MAT", "sums ratio", "sums verific. rate"),
    ]
    assert cells["Vanilla"] == ["1.00", "1.00×", "1.000"] * 2
    assert cells["Chain"][1] == "=1.95× (1.70–2.20)"
    assert cells["PLD"][3:] == ["–", "–", "–"]


def test_the_papers_numbers_stand_beside_the_rows(result: PapersResult) -> None:
    for key, column in (("methods", ("", "paper")), ("lengths", "paper")):
        table = result.plan.tables[key]
        *rows, last = table.rows
        told = (*rows, last.model_copy(update={"reported": "2.5×"}))
        changed = {"tables": {key: table.model_copy(update={"rows": told})}}
        plan = result.plan.model_copy(update=changed)
        [section] = tables(result.model_copy(update={"plan": plan}))
        assert section.shown[column].tolist() == ["–"] * len(rows) + ["2.5×"]
        assert column not in section.brief  # of a console


def test_the_best_lossless_method_is_bold_and_what_ties_with_it_is_marked(
    result: PapersResult,
) -> None:
    cells = rows(tables(result)[0])
    assert cells["PLD"][1].startswith("**2.00×") or cells["UCBSpec"][1].startswith("**2.00×")
    assert cells["UCBSpec"][4].startswith("**2.00×")
    assert not cells["Chain"][4].startswith("=")  # slower on every prompt: no tie
    # fewer verifications are better, and a lossy method is never the best
    assert cells["Wide (lossy)"][1] == "8.00× (7.75–8.25)"
    assert not any("**" in cell for cell in cells["Wide (lossy)"])
    assert cells["UCBSpec"][5] == "**0.500**"


def test_what_a_table_varies_is_across(result: PapersResult) -> None:
    _, lengths = tables(result)
    cells = rows(lengths)
    assert cells["method"] == ["λ = 4", "λ = 8"]
    assert cells["Chain"] == ["1.95×", "1.33×"]
    assert "A paper, Table 2. code (2) prompts, temperature 0, draft medium." in lengths.note


def test_csv_has_every_number_of_every_cell(result: PapersResult, tmp_path: Path) -> None:
    written(result, tmp_path)
    table = pd.read_csv(tmp_path / "methods.csv").set_index(["method", "prompts"])
    assert len(table) == 9
    assert table.loc[("Chain", "code"), "speedup"] == pytest.approx(16 / 8.2)
    assert table.loc[("Chain", "code"), "speedup_low"] == pytest.approx(16 / 8.2 - 0.25)
    assert not table.loc[("Wide (lossy)", "sums"), "lossless"]
    assert table.loc[("PLD", "code"), "n_target"] == 32
    assert np.isnan(table.loc[("Vanilla", "code"), "path_rate"])
    lengths = pd.read_csv(tmp_path / "lengths.csv")
    assert list(lengths["λ"]) == [4, 8]


def test_the_page_has_every_table_the_findings_and_what_differs(
    result: PapersResult, tmp_path: Path
) -> None:
    files = written(result, tmp_path)
    assert {file.name for file in files} == {
        *("methods.md", "methods.csv", "lengths.md", "lengths.csv", "papers.md", "papers.html")
    }
    page = (tmp_path / "papers.md").read_text()
    assert (tmp_path / "methods.md").read_text().strip() in page
    for line in (*findings(result), *notes(result), "- PLD is prompt lookup."):
        assert line in page
    assert "Other models than the paper's." in page
    for method in PLAN.methods("methods"):
        assert f"- {method.label}: {method.configurations[0].sentence}" in page
    html = (tmp_path / "papers.html").read_text()
    assert html.count("data-plot=") >= 2
    assert "<b>0.500</b>" in html
    assert fetched(html) == []


def test_findings_compare_with_the_best_chain_and_bandits_with_their_best_arm(
    result: PapersResult,
) -> None:
    lines = findings(result)
    (best,) = [line for line in lines if line.startswith("sums: fastest")]
    assert "fastest is UCBSpec, " in best  # not the lossy one
    assert "2.00× (1.75–2.25) autoregressive decoding and 1.02× (1.0" in best
    assert "the best plain chain (medium, K=4)" in best
    (bandit,) = [line for line in lines if line.startswith("code: against the best arm")]
    assert "PLD (prompt lookup 3/10): UCBSpec 1.00× (" in bandit
    assert bandit.endswith("a tie.")
    assert not any(line.startswith("sums: against") for line in lines)  # one arm is unknown there


def test_findings_say_where_a_method_is_best(result: PapersResult) -> None:
    assert findings(result)[-1] == "code: λ of the highest ratio: Chain at 4 (1.95×)."


def test_figures_leave_out_what_was_not_measured(result: PapersResult) -> None:
    bars = paper_figure(result, "methods")
    assert [bar.name for bar in bars.data] == ["Chain", "PLD", "Wide (lossy)", "UCBSpec"]
    chain = bars.data[0]
    assert list(chain.y) == pytest.approx([16 / 8.2] * 2)
    assert chain.error_y.array[0] == pytest.approx(0.25)
    looks = {(bar.marker.color, bar.marker.pattern.shape) for bar in bars.data}
    assert len(looks) == len(bars.data)
    (line,) = paper_figure(result, "lengths").data
    assert list(line.x) == [4, 8]


def test_the_console_shows_values_without_intervals(
    result: PapersResult, monkeypatch: pytest.MonkeyPatch
) -> None:
    table = console_table(tables(result)[0])
    assert [column.header for column in table.columns][:3] == ["method", "code\nMAT", "code\nratio"]
    assert table.columns[2]._cells[1] == "=1.95×"
    monkeypatch.setattr(papers, "MOST_COLUMNS", 3)
    narrow = console_table(tables(result)[0])
    assert [column.header for column in narrow.columns] == ["method", "code\nratio", "sums\nratio"]


def test_an_mlflow_run_has_tables_as_artifacts_and_numbers_as_metrics(
    result: PapersResult, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    uri = f"sqlite:///{tmp_path / 'mlflow.db'}"
    monkeypatch.setenv("SPECDEC_HOME", str(tmp_path))
    monkeypatch.delenv("MLFLOW_TRACKING_URI", raising=False)
    folder = tmp_path / "papers"
    files = [*written(result, folder), result.save(folder)]
    run_id = log(report(result), files, resume=folder)
    client = MlflowClient(uri)
    run = client.get_run(run_id)
    assert run.info.status == "FINISHED"
    assert run.data.tags["lossy"] == "Wide"
    metrics = run.data.metrics
    assert metrics["methods.Chain.code.speedup"] == pytest.approx(16 / 8.2)
    assert metrics["methods.Wide__lossy_.sums.speedup"] == pytest.approx(8)
    assert metrics["lengths.Chain.code.lambda_8.speedup"] == pytest.approx(16 / 12)
    stored = {file.path for file in client.list_artifacts(run_id)}
    assert stored >= {"papers.md", "papers.html", "methods.csv", "papers.json", "figures"}
    client.update_run(run_id, "RUNNING")  # as a killed process leaves it
    assert log(report(result), files, resume=folder) == run_id
    assert log(report(result), files, resume=folder) != run_id


def test_the_result_is_read_as_it_was_written(result: PapersResult, tmp_path: Path) -> None:
    result.save(tmp_path)
    again = PapersResult.load(tmp_path)
    for key in PLAN.tables:
        pd.testing.assert_frame_equal(again.frame(key), result.frame(key))
    assert json.loads((tmp_path / "papers.json").read_text())["name"] == "mine"


@pytest.fixture
def frontier() -> PapersResult:
    """Decodings of five prompts that take 2 ms a draft forward, 10 ms a target forward and 30 ms
    for the prompt; the head saves both kinds of forwards."""
    drafters = {
        "SpecDec, K=2": {"kind": "fixed", "max_tokens": 2},
        "SpecDec, K=4": {"kind": "fixed", "max_tokens": 4},
        "Product, 0.3": {"kind": "confidence_product", "threshold": 0.3},
    }
    table = {
        "title": "Rates",
        "paper": "SpecDec++, Fig. 3",
        "prompts": ["code"],
        "columns": ["discard_rate", "verification_rate", "speedup"],
        "temperatures": [1.0],
        "top_k": 50,
        "frontier": True,
        "rows": [
            {"name": name, "drafter": {"kind": "draft_model", "policy": policy}}
            for name, policy in drafters.items()
        ],
    }
    plan = PaperPlan.model_validate(
        {"prompts": {"code": {"source": "code.jsonl"}}, "tables": {"rates": table}}
    )
    configurations = [m.configurations[0] for m in plan.methods("rates")]
    alone = Configuration(sampling=configurations[0].sampling)
    rng, measurements = np.random.default_rng(0), []
    for configuration, most in zip([alone, *configurations], (0, 90, 100, 60), strict=True):
        n_draft = rng.integers(most // 2, most, 5) if most else np.zeros(5, int)
        n_target = rng.integers(20, 30, 5) - most // 10 if most else np.arange(60, 65)
        seconds = 0.03 + 0.002 * n_draft + 0.01 * n_target
        each = measured("code", configuration, tuple(seconds.tolist()))
        timing = each.timing.model_copy(update={"tokens": [60] * 5})
        forwards = {"n_draft": n_draft.tolist(), "n_target": n_target.tolist()}
        measurements.append(each.model_copy(update={"forwards": forwards, "timing": timing}))
    return PapersResult(
        name="mine",
        started=datetime(2026, 11, 24, tzinfo=UTC),
        plan=plan,
        pair=plan.pair,
        sets={"code": PromptSet(source="code.jsonl", count=5, digest="0" * 64)},
        measured=measurements,
    )


def test_the_papers_sampling_is_decoded(frontier: PapersResult) -> None:
    for method in frontier.plan.methods("rates"):
        assert method.configurations[0].sampling == Sampling(temperature=1.0, top_k=50)
    assert "temperature 1 and top-k 50" in tables(frontier)[0].note


def test_forward_times_follow_from_the_decodings(frontier: PapersResult) -> None:
    times = frontier.forward_times("rates").set_index("setting")
    assert times["t_target"].tolist() == pytest.approx([0.01] * 3, rel=1e-6)
    assert np.isnan(times.loc["autoregressive", "t_draft"])
    chains = times.drop(index="autoregressive")
    assert chains["t_draft"].tolist() == pytest.approx([0.002] * 2, rel=1e-6)
    assert times.loc["fixed", "decodings"] == 10
    assert times["r2"].tolist() == pytest.approx([1.0] * 3)
    shown = [section for section in tables(frontier) if section.key == "rates-forwards"]
    assert shown[0].shown["t_target, ms"].tolist() == ["10.00"] * 3


def test_times_that_decodings_do_not_determine_are_left_out(frontier: PapersResult) -> None:
    alone, *_, product = frontier.measured
    alone.forwards["n_target"] = [60] * 5  # a forward's time and the constant cannot be told apart
    product.forwards |= {name: counts[:3] for name, counts in product.forwards.items()}
    product.timing.seconds = [own[:3] for own in product.timing.seconds]
    assert frontier.forward_times("rates")["setting"].tolist() == ["fixed"]


def test_rates_are_drawn_against_each_other_a_line_a_family(frontier: PapersResult) -> None:
    figure = paper_figure(frontier, "rates")
    assert [trace.name for trace in figure.data] == ["fixed, code", "confidence_product, code"]
    chain = frontier.plan.methods("rates")[1].configurations[0]
    line = figure.data[0]
    assert (line.x[1], line.y[1]) == tuple(
        frontier.value("code", chain, rate) for rate in ("discard_rate", "verification_rate")
    )


def test_the_best_of_a_family_is_held_against_the_best_chain(frontier: PapersResult) -> None:
    (line,) = [line for line in findings(frontier) if "against the best fixed K" in line]
    product, chains = frontier.measured[-1], frontier.measured[1:-1]
    best = max(chains, key=lambda m: m.timing.tokens_per_second)
    ratio = product.timing.over(best.timing)
    assert f"Product, 0.3 ({product.configuration.label}) {ratio.value:.2f}×" in line
    assert f"({best.configuration.label})" in line
