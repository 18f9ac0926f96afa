"""A trace of the draft and the target for a browser."""

import pytest

from research.overlap.timeline import busy, chrome_trace
from specdec_core.drafting.pearl.timeline import TimelineSpan


def test_a_trace_has_a_row_for_each_side_in_microseconds() -> None:
    spans = [
        TimelineSpan("target", "verify", 10.0, 10.004, {"fed": [2]}),
        TimelineSpan("draft", "draft", 10.001, 10.002, {"useless": False}),
    ]
    names, rows = {}, {}
    for event in chrome_trace(spans)["traceEvents"]:
        if event["ph"] == "M":
            names[event["tid"]] = event["args"]["name"]
        else:
            rows[names[event["tid"]]] = event
    assert rows["target"]["ts"] == 0
    assert rows["target"]["dur"] == pytest.approx(4000)
    assert rows["draft"]["ts"] == pytest.approx(1000)
    assert rows["target"]["args"] == {"fed": [2]}
    assert busy(spans, "draft", "draft") == pytest.approx(0.001)
