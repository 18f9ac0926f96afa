"""The papers' tables say what was measured: cells, bold, ties, lossy marks, CSV, page, MLflow."""

from datetime import UTC, datetime

import numpy as np
import pandas as pd
import pytest
import yaml
from mlflow import MlflowClient

from dashboards.outputs.files import write
from dashboards.outputs.markdown import part
from dashboards.outputs.mlflow_runs import log
from dashboards.store import tracking_uri
from research.papers.near_ties import FirstDifference
from research.papers.plan import PaperPlan
from research.papers.result import Measured, PapersResult, regression
from research.papers.tables import findings, notes, report, tables
from specdec_core.config import AUTOREGRESSIVE, Configuration
from specdec_core.prompts.prompt_sets import PromptSet
from specdec_core.search.results import Timing
from specdec_core.tokens.statistics import Counts

PLAN = PaperPlan.model_validate(
    yaml.safe_load("""
prompts: {code: {source: code.jsonl}, sums: {source: sums.jsonl}}
notes: ["Other models than the paper's."]
tables:
  methods:
    title: Methods by task
    paper: A paper, Table 1
    prompts: [code, sums]
    columns: [mat, speedup, verification_rate]
    notes: [PLD is prompt lookup.]
    rows:
      - {name: Vanilla}
      - {name: Chain, drafter: &chain {kind: draft_model, policy: {kind: fixed, max_tokens: 4}}}
      - {name: PLD, drafter: &lookup {kind: prompt_lookup}}
      - {name: Wide, drafter: {kind: target_tree, branching: [2, 2]}}
      - {name: UCBSpec, drafter: {kind: bandit, arms: [*chain, *lookup]}}
  lengths:
    title: By length
    paper: A paper, Table 2
    prompts: [code]
    columns: [speedup]
    vary: {λ: [4, 8]}
    rows: [{name: Chain, drafter: {kind: draft_model, policy: {kind: fixed, max_tokens: λ}}}]
""")
)
# seconds of the two prompts, one repeat; autoregressive decoding takes 8 for each
SECONDS = {
    "Vanilla": (8.0, 8.0),
    "Chain": (4.0, 4.2),
    "PLD": (3.0, 5.0),
    "Wide": (1.0, 1.0),
    "UCBSpec": (3.9, 4.1),
}


def measured(prompts, configuration, seconds):
    ratio = 16 / sum(seconds)
    counts = Counts(2, 64, 40, round(64 / ratio), 10, 50, 40, round(64 / ratio))
    timing = Timing(
        config_id=configuration.id,
        seconds=[list(seconds)],
        passes=[0],
        tokens=[32, 32],
        prefill=[0.0] * len(seconds),
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
def result():
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


def written(result, folder):
    return write(report(result), folder, "papers", apart=True)


def rows(sheet):
    """The cells of a table's Markdown by its methods."""
    lines = [line for line in part(sheet).splitlines() if line.startswith("|")]
    cells = [[cell.strip() for cell in line.strip("|").split("|")] for line in lines]
    return {row[0].strip("* "): row[1:] for row in cells}


def test_rows_are_compared_with_the_row_that_a_table_names(result):
    table = PLAN.tables["methods"].model_copy(update={"against": "Chain"})
    plan = PLAN.model_copy(update={"tables": {"methods": table}})
    [section] = tables(result.model_copy(update={"plan": plan}))
    code, sums = section.lines[1:]
    # 8.2 seconds of the chain over 8 of prompt lookup
    assert code.startswith("code: times as fast as Chain: PLD 1.02× (")
    assert "Wide (lossy) 4.10×" in code
    assert "PLD" not in sums  # not measured there
    assert tables(result)[0].lines == PLAN.tables["methods"].notes


def test_a_column_is_a_prompt_set_and_a_quantity(result):
    methods, _ = tables(result)
    cells = rows(methods)
    assert cells["method"] == [
        *("code MAT", "code ratio", "code verific. rate"),
        *("sums MAT", "sums ratio", "sums verific. rate"),
    ]
    assert cells["Vanilla"] == ["1.00", "1.00×", "1.000"] * 2
    assert cells["Chain"][1] == "=1.95× (1.70–2.20)"
    assert cells["PLD"][3:] == ["–", "–", "–"]


def test_the_best_lossless_method_is_bold_and_what_ties_with_it_is_marked(result):
    cells = rows(tables(result)[0])
    assert cells["PLD"][1].startswith("**2.00×") or cells["UCBSpec"][1].startswith("**2.00×")
    assert cells["UCBSpec"][4].startswith("**2.00×")
    assert not cells["Chain"][4].startswith("=")  # slower on every prompt: no tie
    # fewer verifications are better, and a lossy method is never the best
    assert cells["Wide (lossy)"][1] == "8.00× (7.75–8.25)"
    assert not any("**" in cell for cell in cells["Wide (lossy)"])
    assert cells["UCBSpec"][5] == "**0.500**"


def test_csv_has_every_number_of_every_cell(result, tmp_path):
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


def test_the_page_has_every_table_the_findings_and_what_differs(result, tmp_path):
    files = written(result, tmp_path)
    assert {file.name for file in files} == {
        *(f"{table}.{kind}" for table in ("methods", "lengths") for kind in ("md", "csv", "svg")),
        *("papers.md", "papers.html"),
    }
    page = (tmp_path / "papers.md").read_text()
    assert (tmp_path / "methods.md").read_text().strip() in page
    for line in (*findings(result), *notes(result), "- PLD is prompt lookup."):
        assert line in page
    assert "Other models than the paper's." in page
    for method in PLAN.methods("methods"):
        assert f"- {method.label}: {method.configurations[0].sentence}" in page
    html = (tmp_path / "papers.html").read_text()
    assert html.count("<svg") == 2
    assert "<b>0.500</b>" in html


def test_findings_compare_with_the_best_chain(result):
    lines = findings(result)
    (best,) = [line for line in lines if line.startswith("sums: fastest")]
    assert "fastest is UCBSpec, " in best  # not the lossy one
    assert "2.00× (1.75–2.25) autoregressive decoding and 1.02× (1.0" in best
    assert best.endswith("the best plain chain (medium, K=4), chosen on these prompts.")


def test_a_gap_beyond_the_rounding_of_its_forward_is_told_as_a_fault(result):
    place = {"config_id": "abc", "prompts": "code", "prompt": 1, "position": 7}
    near = FirstDifference(**place, gap=0.06, rounding=0.12)
    far = FirstDifference(**place, gap=3.0, rounding=0.12)
    chain = next(m for m in result.measured if m.configuration.drafter)
    timing = chain.timing.model_copy(update={"differing_outputs": 1})
    measured = [chain.model_copy(update={"timing": timing})]
    for found, said in (([near], "No gap is larger"), ([near, far], "A fault: 1 gaps are larger")):
        changed = result.model_copy(update={"measured": measured, "differences": found})
        assert said in notes(changed)[-1]
    assert "3 against 0.12 (code, prompt 1, position 7, configuration abc)" in notes(changed)[-1]


def test_an_mlflow_run_has_tables_as_artifacts_and_numbers_as_metrics(result, home):
    folder = home / "papers"
    files = [*written(result, folder), result.save(folder)]
    run_id = log(report(result), files, resume=folder)
    client = MlflowClient(tracking_uri())
    run = client.get_run(run_id)
    assert run.info.status == "FINISHED"
    assert run.data.tags["lossy"] == "Wide"
    metrics = run.data.metrics
    assert metrics["methods.Chain.code.speedup"] == pytest.approx(16 / 8.2)
    assert metrics["methods.Wide__lossy_.sums.speedup"] == pytest.approx(8)
    assert metrics["lengths.Chain.code.lambda_8.speedup"] == pytest.approx(16 / 12)
    stored = {file.path for file in client.list_artifacts(run_id)}
    assert stored >= {"papers.md", "papers.html", "methods.csv", "papers.json", "methods.svg"}
    client.update_run(run_id, "RUNNING")  # as a killed process leaves it
    again = log(report(result), files, resume=folder)
    assert client.get_run(run_id).info.lifecycle_stage == "deleted"
    assert log(report(result), files, resume=folder) != again
    assert client.get_run(again).info.lifecycle_stage == "active"


RATES = """
prompts: {code: {source: code.jsonl}}
tables:
  rates:
    title: Rates
    paper: SpecDec++, Fig. 3
    prompts: [code]
    columns: [discard_rate, verification_rate, speedup]
    temperatures: [1.0]
    top_k: 50
    frontier: true
    rows:
      - name: SpecDec, K=2
        drafter: {kind: draft_model, policy: {kind: fixed, max_tokens: 2}}
      - name: SpecDec, K=4
        drafter: {kind: draft_model, policy: {kind: fixed, max_tokens: 4}}
      - name: Product, 0.3
        drafter: {kind: draft_model, policy: {kind: confidence_product, threshold: 0.3}}
"""


@pytest.fixture
def frontier():
    """Decodings of five prompts that take 2 ms a draft forward, 10 ms a target forward and 30 ms
    for the prompt; the head saves both kinds of forwards."""
    plan = PaperPlan.model_validate(yaml.safe_load(RATES))
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


def test_forward_times_follow_from_the_decodings(frontier):
    times = frontier.forward_times("rates").set_index("setting")
    assert times["t_target"].tolist() == pytest.approx([0.01] * 3, rel=1e-6)
    assert np.isnan(times.loc["autoregressive", "t_draft"])
    chains = times.drop(index="autoregressive")
    assert chains["t_draft"].tolist() == pytest.approx([0.002] * 2, rel=1e-6)
    assert times.loc["fixed", "decodings"] == 10
    assert times["r2"].tolist() == pytest.approx([1.0] * 3)
    shown = [section for section in tables(frontier) if section.key == "rates-forwards"]
    assert shown[0].shown["t_target, ms"].tolist() == ["10.00"] * 3


def test_predicted_throughputs_are_held_against_the_measured_ones(frontier):
    found = frontier.throughputs("rates").set_index("method")
    assert found.index.tolist() == ["SpecDec, K=2", "SpecDec, K=4", "Product, 0.3"]
    assert found["error"].max() < 1e-6
    slower = frontier.measured[2].timing
    slower.seconds = [[1.2 * seconds for seconds in own] for own in slower.seconds]
    error = frontier.throughputs("rates")["error"].max()
    assert error > 0.02
    [shown] = [section for section in tables(frontier) if section.key == "rates-forwards"]
    assert f"deviate by {error:.1%} at most" in shown.lines[0]


@pytest.mark.parametrize(("noise", "said"), [(0.0, "condition"), (0.02, "95 % interval")])
def test_times_of_nearly_collinear_counts_are_refused(noise, said):
    rng = np.random.default_rng(0)
    n_target = np.arange(20.0, 60)
    spread = 0.01 if not noise else 4.0
    n_draft = 4 * n_target + rng.normal(0, spread, 40)
    columns = np.stack([n_draft, n_target, np.ones(40)], axis=1)
    seconds = columns @ (0.0004, 0.0016, 0.01) + rng.normal(0, noise, 40)
    found = regression(columns, seconds)
    assert said in found["refused"]
    assert np.isnan([found["t_draft"], found["t_target"], found["r2"]]).all()
    apart = np.stack([rng.permutation(n_draft), n_target, np.ones(40)], axis=1)
    assert not regression(apart, apart @ (0.0004, 0.0016, 0.01))["refused"]


def test_times_that_decodings_do_not_determine_are_left_out(frontier):
    alone, *_, product = frontier.measured
    alone.forwards["n_target"] = [60] * 5  # a forward's time and the constant cannot be told apart
    product.forwards |= {name: counts[:3] for name, counts in product.forwards.items()}
    product.timing.seconds = [own[:3] for own in product.timing.seconds]
    times = frontier.forward_times("rates").set_index("setting")
    assert times.index[times["t_target"].notna()].tolist() == ["fixed"]
    assert set(times["refused"]) == {"", "too few or equal decodings"}
