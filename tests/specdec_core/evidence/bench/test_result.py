"""Ratios, the best of each, and where the time went follow from the takes."""

import pytest

from specdec_core.base.errors import UserError
from specdec_core.evidence.bench.result import (
    PARTS_OF_A_ROUND,
    BenchResult,
    BenchRow,
    Take,
    first_difference,
    summary_frame,
)
from specdec_core.evidence.bench.sets import by_set, sets_frame
from specdec_core.measure.comparison import over


def row(name, group, seconds, tokens=10, **more):
    """One repeat; a prompt's tokens are all zero."""
    takes = [[Take(seconds=[s], outputs=[[0] * tokens]) for s in seconds]]
    return BenchRow(name=name, group=group, temperature=0.0, takes=takes, **more)


def result_of(template, rows):
    prompts = len(rows[0].takes[0])
    changes = {"rows": rows, "ids": [*map(str, range(prompts))], "categories": [None] * prompts}
    return template.model_copy(update={**changes, "repeats": 1})


def test_speeds_and_ratios_are_by_the_token():
    slow, fast = row("slow", "a", [1.0, 3.0]), row("fast", "b", [1.0, 1.0], tokens=20)
    assert slow.tokens_per_second == pytest.approx(1 / 0.2)
    assert over(fast, slow).value == pytest.approx(0.2 / 0.05)
    low, high = over(fast, slow).low, over(fast, slow).high
    assert low == pytest.approx(2)  # both prompts the first
    assert high == pytest.approx(6)  # both the second


def test_the_best_is_chosen_on_other_prompts_than_it_is_timed_on(bench_result):
    """Each row is lucky on one prompt: the others choose another row for it."""

    def lucky(*prompts):
        return [0.5 if prompt in prompts else 1.0 for prompt in range(8)]

    rows = [
        row("autoregressive", "specdec", [2.0] * 8, autoregressive=True),
        *(row(f"lucky {n}", "specdec", lucky(n)) for n in range(8)),
        row("lossy", "specdec", [0.01] * 8, lossless=False),
        row("theirs", "transformers", [1.5] * 8),
        row("theirs with ours", "transformers", [0.01] * 8, with_ours=True),
    ]
    (best,) = result_of(bench_result, rows).leads()
    assert (best.ours, best.theirs, best.requests) == ("lucky 0", "theirs", 8)
    assert best.ratio == pytest.approx(1.5)  # not more, as on the prompts that chose it
    (best,) = result_of(bench_result, [*rows, row("good", "specdec", lucky(*range(4)))]).leads()
    assert (best.ours, best.ratio) == ("good", pytest.approx(2))


def test_the_first_difference_counts_a_shorter_output():
    assert first_difference([1, 2, 3], [1, 2, 3]) is None
    assert first_difference([1, 9, 3], [1, 2, 3]) == 1
    assert first_difference([1, 2], [1, 2, 3]) == 2


def test_unequal_rows_of_ours_are_named_in_float32_only(bench_result):
    other = row("other", "specdec", [1.0])
    other.takes[0][0].outputs[0][3] = 7
    rows = [row("autoregressive", "specdec", [1.0], autoregressive=True), other]
    result = result_of(bench_result, rows)
    assert [own.name for own in result.unequal()] == ["other"]
    pair = result.pair.with_runner(target_dtype="bfloat16")
    assert not result.model_copy(update={"pair": pair}).unequal()


def test_the_table_has_every_row(bench_result):
    summary = summary_frame(bench_result)
    assert len(summary) == len(bench_result.rows)
    own = summary[summary["contestant"] == "autoregressive"]
    assert (own["over_autoregressive"] == 1).all()
    greedy, sampled = (summary[summary["temperature"] == t] for t in (0, 1))
    assert (greedy["equal_own"] == 6).all()
    assert (greedy["equal_ours"] == 6).all()
    assert sampled["equal_own"].isna().all()
    assert (summary["over_autoregressive_low"] <= summary["over_autoregressive"]).all()
    assert (summary["over_autoregressive_high"] >= summary["over_autoregressive"]).all()
    best = summary[(summary["temperature"] == 0) & (summary["group"] == "transformers")]
    assert (best["over_transformers"] <= 1 + 1e-9).all()
    assert (best["over_transformers"] == 1).any()


def test_a_result_is_read_as_it_was_written(bench_result, tmp_path):
    bench_result.save(tmp_path)
    assert BenchResult.load(tmp_path) == bench_result
    with pytest.raises(UserError, match=r"no benchmark in it"):
        BenchResult.load(tmp_path / "elsewhere")
    (tmp_path / "bench.json").write_text('{"colour": 1}')
    with pytest.raises(UserError, match=r"bench\.json: .*colour: unknown key"):
        BenchResult.load(tmp_path)


def test_the_parts_of_a_token_add_up_to_its_time(bench_result):
    parts = dict(zip(PARTS_OF_A_ROUND, (4.0, 2.0, 0.5, 0.3, 0.2), strict=True)) | {"prefill": 1.0}
    take = Take(seconds=[10.0], outputs=[[0] * 5], parts=parts)
    own = BenchRow(name="x", group="specdec", temperature=0, takes=[[take]])
    assert own.seconds_by_part()["target_forward"] == pytest.approx(4 / 5)
    assert own.seconds_by_part()["outside"] == pytest.approx(2 / 5)
    for measured in bench_result.at(0.0, "specdec"):
        seconds = sum(sum(take.seconds) for takes in measured.takes for take in takes)
        assert sum(measured.seconds_by_part().values()) == pytest.approx(seconds / 60)
    assert not bench_result.at(0.0, "transformers")[0].seconds_by_part()


def test_a_race_falls_into_its_prompt_sets(bench_result):
    """The fastest row differs from prompt set to prompt set."""
    rows = [
        row("autoregressive", "specdec", [2.0] * 8, autoregressive=True),
        row("theirs", "vllm", [1.0, 4.0, 4.0, 4.0] * 2),
        row("SVIP", "specdec", [0.5, 1.0, 0.8, 1.0] * 2),
        row("other draft", "specdec", [0.1] * 8),
    ]
    sets = ["chat", "gsm8k", None, "coding"] * 2  # as a mixture's prompts come interleaved
    result = result_of(bench_result, rows).model_copy(update={"categories": sets})
    parts = by_set(result)
    assert [*parts] == ["chat", "gsm8k", "other", "mt_bench"]
    assert parts["chat"].ids == ["0", "4"]
    frame = sets_frame(result)
    assert (frame["prompts"] == 2).all()
    speeds = frame.pivot(index="contestant", columns="set", values="tokens_per_second")
    assert speeds.loc["SVIP", "chat"] == pytest.approx(10 / 0.5)
    assert speeds.loc["SVIP", "other"] == pytest.approx(10 / 0.8)
    over = frame.pivot(index="contestant", columns="set", values="over_vllm")
    assert over.loc["autoregressive", "chat"] == pytest.approx(0.5)
    assert over.loc["autoregressive", "gsm8k"] == pytest.approx(2.0)
    one = result.model_copy(update={"categories": [None] * 8})
    assert not by_set(one)
    assert not len(sets_frame(one))
