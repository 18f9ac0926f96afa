"""The console's table tells measured from estimated and names the champion."""

from rich.console import Console

from dashboards.outputs.console import table
from dashboards.reports.standings import standings, timed_sentences


def shown(result, most=40):
    console = Console(width=90, color_system=None)
    with console.capture() as capture:
        console.print(table(standings(result, most)))
    return capture.get().splitlines()


def row(lines, label):
    return next(line for line in lines if line.strip().startswith(f"{label} "))


def test_measured_speedups_have_an_interval_and_estimated_ones_a_mark(swept):
    result = swept[0]
    lines = shown(result)
    timed = {timing.config_id: timing for timing in result.timings}
    for trial in result.trials:
        line = row(lines, trial.configuration.label)
        assert f"{trial.metrics['verification_rate']:.3f}" in line
        assert f"{trial.metrics['mat']:.2f}" in line
        if trial.id in timed:
            timing = timed[trial.id]
            assert f"{timing.speedup:.2f}× ({timing.low:.2f}–{timing.high:.2f})" in line
        elif trial.configuration.drafter is not None:
            assert f"≈ {trial.metrics['estimated_speedup']:.2f}×" in line
    assert "★" in row(lines, result.champion_trial.configuration.label)
    tied = next(timing for timing in result.timings if timing.tied_with_champion)
    assert f"={tied.speedup:.2f}×" in row(lines, result.trial(tied.config_id).configuration.label)


def test_sentences_are_of_those_timed_and_begin_with_the_champion(swept):
    result = swept[0]
    lines = timed_sentences(result).lines
    best = result.champion_trial.configuration
    assert lines[0] == f"{result.labels[best.id]}: {best.sentence}"
    assert [line.partition(":")[0] for line in lines[1:]] == [
        result.labels[t.config_id] for t in result.timings if t.config_id != best.id
    ]


def test_a_long_table_is_cut_and_says_so(swept):
    lines = shown(swept[0], most=4)
    assert sum("×" in line for line in lines) == 4
    text = " ".join(" ".join(lines).split())  # however the caption is wrapped
    assert f"{len(swept[0].trials) - 4} more in the report" in text


def test_a_long_table_has_the_best_of_every_family(swept):
    result = swept[0].model_copy(update={"timings": [], "autoregressive": None}, deep=True)
    slow = next(t for t in result.trials if t.configuration.family == "svip")
    slow.metrics["estimated_speedup"] = 0.01
    families = {t.configuration.family for t in result.trials if t.configuration.drafter}
    lines = shown(result, most=len(families))
    assert row(lines, slow.configuration.label)
