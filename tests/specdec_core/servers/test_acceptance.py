"""What vLLM wrote in production tells what other lengths would give, and no more than it can."""

import json
from pathlib import Path

import pytest

from dashboards.reports.production import expected, findings
from jobs.production import read_production
from specdec_core.base.errors import UserError
from specdec_core.servers.acceptance import Production, expectations
from specdec_core.servers.vllm.metrics import read_metrics
from tests.specdec_core.cost.examples import constant_profile

DATA = Path(__file__).parents[2] / "data"
METRICS = """
# HELP vllm:spec_decode_num_drafts_total Number of spec decoding drafts.
# TYPE vllm:spec_decode_num_drafts_total counter
vllm:spec_decode_num_drafts_total{{engine="0",model_name="m"}} 80.0
# TYPE vllm:spec_decode_num_draft_tokens_total counter
vllm:spec_decode_num_draft_tokens_total{{engine="0",model_name="m"}} 160.0
# TYPE vllm:spec_decode_num_accepted_tokens_per_pos_total counter
vllm:spec_decode_num_accepted_tokens_per_pos_total{{engine="0",model_name="m",position="0"}} 60.0
vllm:spec_decode_num_accepted_tokens_per_pos_total{{engine="0",model_name="m",position="1"}} 30.0
# TYPE vllm:inter_token_latency_seconds histogram
vllm:inter_token_latency_seconds_bucket{{engine="0",le="+Inf",model_name="m"}} 100.0
vllm:inter_token_latency_seconds_count{{engine="0",model_name="m"}} 100.0
vllm:inter_token_latency_seconds_sum{{engine="0",model_name="m"}} {seconds}
"""


def metrics(folder, seconds=2.0):
    file = folder / "metrics.txt"
    file.write_text(METRICS.format(seconds=seconds).lstrip())
    return file


def test_prometheus_text_gives_steps_and_acceptance_by_position(tmp_path):
    seen = read_metrics(metrics(tmp_path))
    assert (seen.length, seen.steps, seen.proposed, seen.candidates) == (2, 100, 80, 160)
    assert seen.seconds == pytest.approx(0.02)
    # A fifth of the steps has no candidates, and gives one token as ever.
    assert [seen.tokens(k) for k in (0, 1, 2)] == pytest.approx([1, 1.6, 1.9])
    # Beyond what was seen a candidate is accepted as often as the last one behind accepted ones.
    assert [seen.tokens(k) for k in (3, 4)] == pytest.approx([1.9 + 0.15, 1.9 + 0.15 + 0.075])


def test_a_profiles_every_draft_is_the_named_one_too(tmp_path, capsys):
    profile, out = tmp_path / "profile.yaml", tmp_path / "out.json"
    shown = []
    for name in ("small", "'*'"):
        profile.write_text(f"{{device: other, target: 0.1, drafts: {{{name}: 0.002}}}}")
        read_production([metrics(tmp_path)], ["small"], profile, out)
        shown.append(capsys.readouterr().out)
    assert shown[0] == shown[1]
    profile.write_text("{device: other, target: 0.1, drafts: {small: 0.002}}")
    with pytest.raises(UserError, match="--draft large: expected one of the profile's: small"):
        read_production([metrics(tmp_path)], ["large"], profile, out)


def test_what_was_read_is_not_written_in_place_of_a_folder(tmp_path):
    with pytest.raises(UserError, match=f"^{tmp_path}: cannot be written, is a directory"):
        read_production([metrics(tmp_path)], None, None, tmp_path)


def response(by_accepted, tokens, milliseconds, length=2):
    steps = sum(by_accepted)
    told = {
        "acceptance_histogram": by_accepted,
        "num_spec_steps": steps,
        "num_draft_tokens": 2 * steps,
        "num_spec_tokens": length,
    }
    metrics = {"generation_time_ms": milliseconds, "speculative_decoding": told}
    return json.dumps({"usage": {"completion_tokens": tokens}, "metrics": metrics})


def test_responses_give_the_same_as_the_sums_over_their_steps(tmp_path):
    file = tmp_path / "responses.jsonl"
    # 40 steps with candidates and 10 without give 50 + 15 + 2·15 tokens behind the first.
    lines = [response([10, 15, 15], 1 + 50 + 45, 1000.0)] * 2
    file.write_text("\n".join([*lines, json.dumps({"usage": {}, "metrics": None})]))
    assert read_metrics(file) == read_metrics(metrics(tmp_path))


def test_lengths_that_varied_are_not_mixed_up(tmp_path):
    """Steps of a shorter length had no chance to accept at later positions."""
    file = tmp_path / "responses.jsonl"
    of_four = response([10, 15, 15, 0, 0], 96, 1000.0, length=4)
    file.write_text("\n".join([response([10, 15, 15], 96, 1000.0), of_four]))
    with pytest.raises(UserError, match="num_spec_tokens 2 and 4: take a file for each length"):
        read_metrics(file)
    file.write_text(of_four)
    seen = read_metrics(file)
    assert seen.varied
    [line] = [line for line in findings([], seen) if "not always 4" in line]
    assert line.startswith("a step with candidates had 2.0 of them")
    assert "not always" not in " ".join(findings([], read_metrics(metrics(tmp_path))))


def test_steps_of_each_length_tell_what_the_full_length_would_accept(tmp_path):
    """Half of the steps had one candidate. Six of ten first candidates were accepted, and behind
    them four of ten second candidates."""
    told = {
        "acceptance_histogram": [40, 48, 12],
        "acceptance_histogram_by_draft_length": {"1": [20, 30], "2": [20, 18, 12]},
        "num_spec_steps": 100,
        "num_draft_tokens": 150,
        "num_spec_tokens": 2,
    }
    metrics = {"generation_time_ms": 1000.0, "speculative_decoding": told}
    line = json.dumps({"usage": {"completion_tokens": 173}, "metrics": metrics})
    (tmp_path / "responses.jsonl").write_text("\n".join([line, line]))
    seen = read_metrics(tmp_path / "responses.jsonl")
    assert (seen.proposed, seen.candidates, seen.reached) == (200, 300, (200, 60))
    assert seen.surviving == pytest.approx([0.6, 0.6 * 24 / 60])
    assert any("counts by the steps that had" in line for line in findings([], seen))


def test_what_vllm_0_32_wrote_is_read():
    """Six answers of 32 tokens of the bundled pair, K = 3: of `/metrics` the families that tell of
    tokens and times. Of the last steps' accepted candidates six lie beyond the texts' ends."""
    sums = read_metrics(DATA / "vllm-0.32-metrics.txt")
    answers = read_metrics(DATA / "vllm-0.32-responses.jsonl")
    assert (sums.length, sums.steps, sums.proposed, sums.candidates) == (3, 71, 71, 213)
    assert sums.accepted == (57, 38, 26)
    assert sums.steps + sum(sums.accepted) == 6 * 31 + 6
    assert sums.seconds == pytest.approx(0.010752, rel=1e-4)
    assert answers.seconds == pytest.approx(sums.seconds)
    assert answers == sums.model_copy(update={"seconds": answers.seconds})


def test_times_of_other_lengths_follow_from_a_second_server_or_a_profile(tmp_path):
    two = read_metrics(metrics(tmp_path))
    four = Production(
        length=4, steps=100, proposed=100, candidates=400, accepted=(60, 30, 15, 8), seconds=0.03
    )
    alone = {each.length: each for each in expectations([two], (1, 2, 3))}
    assert alone[2].seconds == two.seconds
    assert alone[1].seconds is None
    assert alone[1].speed is None
    assert [alone[k].beyond for k in (1, 2, 3)] == [False, False, True]
    both = {each.length: each for each in expectations([two, four], (1, 3, 6))}
    assert both[3].seconds == pytest.approx(0.025)
    assert both[6].beyond
    assert not both[3].beyond
    costs = {"round_overhead": 0.001, "proposals": {"draft small": 0.001}}
    times = constant_profile(0.006, 0.001, "small", **costs)
    priced = {e.length: e for e in expectations([two], (1, 4), times, "small")}
    # By the profile steps of 1, 2 and 4 candidates take 9, 10 and 12 ms; two were seen to take 20.
    assert [priced[k].seconds for k in (1, 2, 4)] == pytest.approx([0.018, 0.02, 0.024])


def test_lengths_are_compared_by_the_acceptance_of_one_server(tmp_path):
    """The first server accepts less than the second one, whose acceptance the estimates have."""
    two = read_metrics(metrics(tmp_path))
    four = Production(
        length=4, steps=100, proposed=100, candidates=400, accepted=(80, 60, 40, 20), seconds=0.03
    )
    lengths = expectations([two, four], [3])
    shown = expected(lengths, two).shown.set_index("K")
    assert list(shown.loc["2", ["speed, now = 1", "longest step, × now"]]) == ["1.00"] * 2
    assert findings(lengths, two)[0].endswith(": K = 2, 1.00× the speed of K = 2")


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("vllm:generation_tokens_total 5.0\n", "no vllm:spec_decode_num_drafts_total in it"),
        ("a page\n<html>", "neither Prometheus text nor JSON lines"),
        ('{"usage": {}, "metrics": null}', "--per-request-spec-decode-metrics summary"),
        ('{"choices": []}', ":1: expected a response of vLLM"),
        ('{"usage": {}, "metrics": [1]}', ":1: expected a response of vLLM"),
    ],
)
def test_a_file_that_tells_nothing_is_refused(tmp_path, text, message):
    file = tmp_path / "wrong"
    file.write_text(text)
    with pytest.raises(UserError, match=message):
        read_metrics(file)
    with pytest.raises(UserError, match="cannot be read"):
        read_metrics(tmp_path / "none")
