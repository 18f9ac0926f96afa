"""The report is one file that draws itself in a browser, asks for nothing and says the truth."""

import re
import shutil
from pathlib import Path

import pytest

from dashboards.outputs.files import write_page
from dashboards.outputs.html import page as render
from dashboards.reports.standings import standings
from dashboards.reports.sweep import caveats, facts, headline, report
from dashboards.tracking.sweep_run import _summary
from jobs import report as job
from specdec_core.base.errors import UserError
from specdec_core.search.results import ReplaySummary
from tests.dashboards import browser
from tests.specdec_core.cost.examples import constant_profile, fitted_profile

FIGURES = {"frontier", "speedups", "time"}


def write_report(result, folder):
    return write_page(report(result), folder)


@pytest.fixture(scope="module")
def page(swept, with_heads, tmp_path_factory):
    """A report with every section."""
    folder = shutil.copytree(swept[1], tmp_path_factory.mktemp("report") / "sweep")
    return write_report(with_heads, folder)


@pytest.fixture(scope="module", params=["light", "dark"])
def opened(page: Path, request: pytest.FixtureRequest):
    """The report in a headless Chromium: wide and light, or narrow and dark."""
    flags = ["--blink-settings=preferredColorScheme=0"] if request.param == "dark" else []
    width = 500 if flags else 1280
    with browser.Browser(width, 1000, *flags) as window:
        window.open(page)
        last = "document.querySelector('#heads .main-svg')"  # figures are drawn in order
        assert window.wait(f"return {last} !== null")
        yield request.param, window


# For what is the same in every width and colour scheme.
in_light = pytest.mark.parametrize("opened", ["light"], indirect=True)


def test_report_draws_itself_in_a_browser_with_a_clean_console(opened):
    kind, window = opened
    drawn = window.run("""
        return Object.fromEntries([...document.querySelectorAll(".plot")].map(plot => [plot.id, {
            svg: plot.querySelectorAll("svg.main-svg").length,
            marks: plot.querySelectorAll(
                ".trace path, .trace .point, .trace .textpoint, .heatmap-label"
            ).length,
            axes: plot.querySelectorAll(".xtitle, .ytitle, .x2title, .y2title").length,
            width: plot.querySelector("svg.main-svg").getBoundingClientRect().width,
        }]));
    """)
    assert set(drawn) == FIGURES | {"heads"}
    for name, figure in drawn.items():
        assert figure["svg"] > 0, name
        assert figure["marks"] > 3, name
        assert figure["axes"] > 0, name
        assert figure["width"] > (300 if kind == "dark" else 900), name
    assert window.log("browser") == []
    assert [url for url in window.requests() if not url.startswith("data:")] == [window.address]
    assert window.run("return document.documentElement.scrollWidth <= innerWidth")
    ink, ground = window.run("""
        const page = getComputedStyle(document.body), axis = document.querySelector(".xtitle");
        return [getComputedStyle(axis).fill, page.backgroundColor];
    """)
    light = [sum(map(int, re.findall(r"\d+", colour)[:3])) > 384 for colour in (ink, ground)]
    assert light == ([True, False] if kind == "dark" else [False, True])


@in_light
def test_tables_stand_below_their_figures(opened):
    _, window = opened
    tables = window.run("""
        return Object.fromEntries([...document.querySelectorAll(".numbers")].map(table => [
            table.closest("section").querySelector(".plot").id,
            [...table.rows].map(row => [...row.cells].map(cell => cell.textContent)),
        ]));
    """)
    assert set(tables) == {"heads"}
    heads = [dict(zip(tables["heads"][0], row, strict=True)) for row in tables["heads"][1:]]
    known = [(row["w_rej"], row["D"]) for row in heads]
    assert known == [("1", "0"), ("1", "1"), ("6", "0"), ("6", "1")]


@in_light
def test_a_click_on_a_heading_sorts_the_table(opened):
    _, window = opened
    column = """
        const rows = [...document.querySelectorAll(".sortable tbody tr")];
        return rows.map(row => Number(row.cells[3].textContent));
    """
    window.run("document.querySelectorAll('th button')[3].click()")
    assert (rates := window.run(column)) == sorted(rates, reverse=True)
    window.run("document.querySelectorAll('th button')[3].click()")
    assert window.run(column) == sorted(rates)


def drawn_in(page):
    return set(re.findall(r'class="plot" id="(\w+)"', page.read_text()))


def test_heads_that_are_gone_leave_the_rest_of_the_report(with_heads, folder):
    result = with_heads.model_copy(deep=True)
    for trial in result.trials:
        policy = getattr(trial.configuration.drafter, "policy", None)
        if policy is not None and policy.kind == "specdecpp":
            gone = policy.model_copy(update={"head": policy.head + "-gone"})
            drafter = trial.configuration.drafter.model_copy(update={"policy": gone})
            trial.configuration = trial.configuration.model_copy(update={"drafter": drafter})
    assert drawn_in(write_report(result, folder)) == FIGURES


@pytest.fixture
def replayed(result):
    result.replay = ReplaySummary(
        recording="traces/recorded", configurations=1200, seconds=2, per_second=600,
        n_draft=9000, n_target=3000, checked=3, equal=3,
    )  # fmt: skip
    for trial in result.trials[1:]:
        trial.replayed = True
    return result


def test_a_replayed_sweep_says_what_that_saved(replayed):
    text = dict(facts(replayed))["replay"]
    assert "1,200 configurations" in text
    assert "600 a second" in text
    assert "saved 9,000 draft and 3,000 target forwards" in text
    assert set(standings(replayed).shown["status"]) >= {"champion", "replayed"}
    assert "other counts than the replay" not in " ".join(caveats(replayed))
    replayed.replay.equal = 2
    assert "1 had other counts than the replay" in " ".join(caveats(replayed))


def test_a_sweep_that_resumed_after_its_replay_has_no_rate_of_it(replayed):
    assert _summary(replayed)["replayed_per_second"] == 600
    replayed.replay.per_second = 0
    assert "a second" not in dict(facts(replayed))["replay"]
    assert "replayed_per_second" not in _summary(replayed)


def test_a_ranking_for_another_machine_says_that_it_was_not_timed(replayed, folder):
    replayed.hardware = "two A100"
    replayed.profile = constant_profile(0.112, 0.0234, autoregressive_forward=0.108)
    replayed.timings, replayed.autoregressive = [], None
    assert drawn_in(write_report(replayed, folder)) == FIGURES
    assert headline(replayed).endswith("as fast as autoregressive decoding on two A100")
    assert "estimated" in headline(replayed)
    said = "all speedups are estimates, in which a forward takes the same time"
    assert said in " ".join(caveats(replayed))
    replayed.profile = fitted_profile()
    assert said not in " ".join(caveats(replayed))


def test_plotly_is_inlined_once_and_nothing_is_linked(page):
    text = page.read_text()
    assert text.count('id="plotly"') == 1
    assert not re.search(r"<(script|link|img|iframe)[^>]+(src|href)=(?!\"data:)", text)


def test_what_people_named_cannot_break_out_of_the_page(result, folder):
    evil = "</script><script>alert(1)</script>"
    result.name = evil
    result.environment["cpu"] = evil
    result.pair = result.pair.model_copy(update={"drafts": {"draft": evil}})
    html = render(report(result))
    assert "<script>alert" not in html


def champion_timing(result, **measured):
    (timing,) = [t for t in result.timings if t.config_id == result.champion]
    for name, value in measured.items():
        setattr(timing, name, value)


def test_the_headline_is_the_measured_speedup_of_the_champion_if_it_can_be_told(result):
    champion_timing(result, speedup=1.5, low=1.25, high=1.75)
    assert headline(result).endswith("is 1.50× as fast as autoregressive decoding")
    champion_timing(result, speedup=1.1, low=0.9, high=1.3)
    assert "cannot be told from autoregressive decoding" in headline(result)
    result.timings = []
    assert "estimated" in headline(result)


def test_a_sweep_where_speculation_does_not_pay_says_so(result, folder):
    result.champion = result.autoregressive.config_id
    assert headline(result) == "Nothing beats autoregressive decoding here"
    assert headline(result) in write_report(result, folder).read_text()


def test_caveats_name_ties_differing_outputs_and_what_was_only_estimated(result):
    text = " ".join(caveats(result))
    assert "Not shown to be slower than the champion: draft, K=5." in text
    assert "1 of 4 (draft, confidence 0.3)" in text
    assert "3 of 8 configurations were timed" in text


def test_the_command_reports_on_the_newest_sweep(swept, bare_home, capsys):
    with pytest.raises(UserError, match="no sweep yet"):
        job.main()
    for name in ("older", "newer"):
        shutil.copytree(swept[1], bare_home / "sweeps" / name)
        (bare_home / "sweeps" / name / "sweep.json").touch()
    job.main()
    assert (bare_home / "sweeps" / "newer" / "report.html").is_file()
    assert not (bare_home / "sweeps" / "older" / "report.html").exists()
    assert "newer/report.html" in capsys.readouterr().out


def test_a_workload_says_what_is_served_and_how_well_the_simulation_does(under_load, folder):
    made = report(under_load)
    assert made.title.startswith("2 ranges of load")
    sections = {section.key: section for section in made.sections}
    lines = " ".join(sections["served"].lines)
    assert "it costs at most" in lines
    assert "The simulation is off by" in lines
    shown = sections["loads"].shown
    assert list(shown["load"].unique()) == ["1 client", "8 clients"]
    assert sum("★" in name for name in shown["configuration"]) == 2
    checked = sections["simulation"]
    assert all(re.fullmatch(r"[+-]\d+%", cell) for cell in checked.shown["off by"])
