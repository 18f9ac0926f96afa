"""When the draft and the target drafted, verified and waited."""

from __future__ import annotations

from collections.abc import Sequence

import plotly.graph_objects as go

from dashboards.look import OTHER_COLOURS, PARTS, TARGET_COLOUR, base_figure
from specdec_core.drafting.pearl.timeline import TimelineSpan

SHOWN = 0.12  # seconds that are in view at first
_KEPT, _LOST = PARTS["draft forwards, kept"], PARTS["draft forwards, thrown away"]
_LOOKS = {
    ("draft", "draft", False): ("drafting", _KEPT),
    ("draft", "draft", True): ("drafting what was too late", _LOST),
    ("target", "verify", False): ("verifying", TARGET_COLOUR),
    ("target", "wait", False): ("waiting for candidates", OTHER_COLOURS[0]),
}


def timeline_figure(spans: Sequence[TimelineSpan], title: str) -> go.Figure:
    """A row for the draft and one for the target. A bar is a forward or a wait; gaps are idle time.
    Drag to see the rest."""
    first = min((span.start for span in spans), default=0.0)
    fig = base_figure(
        title, "Milliseconds of decoding one prompt. Empty: nothing to do, or busy otherwise.", 300
    )
    for (by, what, useless), (name, colour) in _LOOKS.items():
        chosen = [
            s
            for s in spans
            if (s.by, s.what) == (by, what) and bool(s.facts.get("useless")) == useless
        ]
        fig.add_bar(
            name=name,
            y=[by] * len(chosen),
            base=[1e3 * (s.start - first) for s in chosen],
            x=[1e3 * s.seconds for s in chosen],
            orientation="h",
            marker={"color": colour, "line": {"width": 0}},
            customdata=[[_candidates(s)] for s in chosen],
            hovertemplate=f"{name}<br>%{{customdata[0]}}%{{x:.2f}} ms from %{{base:.2f}} ms"
            "<extra></extra>",
        )
    fig.update_layout(barmode="overlay", bargap=0.3)
    fig.update_xaxes(title_text="ms", range=[0, 1e3 * SHOWN])
    fig.update_yaxes(categoryorder="array", categoryarray=["target", "draft"])
    return fig


def _candidates(span: TimelineSpan) -> str:
    fed = span.facts.get("fed")
    return f"{', '.join(map(str, fed))} candidates<br>" if fed is not None else ""
