"""Trained heads: figures, the table of SpecDec++'s ablation, and their MLflow runs."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import plotly.graph_objects as go
from mlflow.entities import Metric, Run, RunTag
from plotly.subplots import make_subplots
from rich import box
from rich.table import Table

from dashboards.delivery import Delivery
from dashboards.drawings import Drawing, draw_heads, log_figures
from dashboards.look import INK, MUTED, OTHER_COLOURS, base_figure, style
from dashboards.progress import SweepProgress
from dashboards.tracking import (
    DeliveredRun,
    Undelivered,
    as_metrics,
    as_params,
    connect,
    experiment_id_of,
    runs_where,
    user_name,
)
from specdec_core.base.environment import environment
from specdec_core.base.observer import Observer
from specdec_core.config import FixedPolicy, PairSpec
from specdec_core.drafting.heads.card import HeadCard
from specdec_core.drafting.heads.storage import CARD
from specdec_core.training.heads.evaluation import Modelled
from specdec_core.training.heads.finished import Finished, HeadObserver

CARD_PARAMS = {"kind", "draft", "depth", "width", "w_acc", "w_rej", "settings", "sampling"}


class HeadProgress(SweepProgress, HeadObserver):
    """The training of a grid on the console."""


# Figures


def reliability_diagram(cards: Mapping[str, HeadCard]) -> go.Figure:
    """Accepted against predicted, on the eval prompts, for each head; the marks' areas are the
    bins' shares of the candidates."""
    title = "Accepted against predicted"
    if len(cards) == 1:
        (name,) = cards
        title = f"{name}: accepted against predicted, ECE {cards[name].metrics['ece']:.3f}"
    fig = base_figure(
        title,
        "Candidates of held-out prompts in bins of predicted acceptance, larger where more lie.<br>"
        "On the diagonal a head is calibrated; a weight of rejections pushes it to the left.",
        480,
    )
    fig.add_scatter(
        x=[0, 1], y=[0, 1], mode="lines", name="calibrated", hoverinfo="skip",
        line={"color": MUTED, "width": 1.5, "dash": "dash"},
    )  # fmt: skip
    for i, ((name, card), colour) in enumerate(zip(cards.items(), _colours(cards), strict=True)):
        bins = card.reliability
        total = max(sum(b.count for b in bins), 1)
        fig.add_scatter(
            x=[b.predicted for b in bins],
            y=[b.accepted for b in bins],
            customdata=[[b.count, b.count / total] for b in bins],
            mode="lines+markers",
            name=name,
            visible=True if i < MOST_SHOWN else "legendonly",
            line={"color": colour, "width": 2},
            marker={
                "size": [5 + 30 * (b.count / total) ** 0.5 for b in bins],
                "opacity": 0.75,
                "color": colour,
            },
            hovertemplate=f"<b>{name}</b><br>predicted %{{x:.3f}}, accepted %{{y:.3f}}<br>"
            "%{customdata[0]} candidates (%{customdata[1]:.1%})<extra></extra>",
        )
    fig.update_xaxes(title_text="predicted acceptance probability (mean of the bin)", range=[0, 1])
    fig.update_yaxes(title_text="share accepted", range=[0, 1.02])
    return _with_legend(fig)


def training_curves(cards: Mapping[str, HeadCard]) -> go.Figure:
    """Loss and KL of each head over epochs: solid on held-out prompts, dotted in training."""
    fig = make_subplots(rows=1, cols=2, horizontal_spacing=0.12)
    fig = base_figure(
        "Loss and KL over the epochs",
        "Left: the weighted loss that is trained. Right: KL(P‖P̂) without weights, in nats.<br>"
        "Solid: held-out prompts. Dotted: training. The star is the epoch that was kept.",
        440,
        fig,
    )
    for i, ((name, card), colour) in enumerate(zip(cards.items(), _colours(cards), strict=True)):
        epochs = [e.epoch for e in card.curve]
        kept = int(card.metrics["epoch"])
        for column, quantity in enumerate(("loss", "kl"), start=1):
            for split, dash in (("eval", "solid"), ("train", "dot")):
                values = [getattr(e, f"{split}_{quantity}") for e in card.curve]
                marks = ["star" if e == kept and split == "eval" else "circle" for e in epochs]
                fig.add_scatter(
                    x=epochs, y=values, mode="lines+markers", name=name, legendgroup=name,
                    showlegend=column == 1 and split == "eval",
                    visible=True if i < MOST_SHOWN else "legendonly",
                    line={"color": colour, "width": 2, "dash": dash},
                    marker={"size": [12 if m == "star" else 4 for m in marks], "symbol": marks},
                    hovertemplate=f"<b>{name}</b><br>epoch %{{x}}, {split} {quantity} %{{y:.4f}}"
                    "<extra></extra>",
                    row=1, col=column,
                )  # fmt: skip
    fig.update_xaxes(title_text="epoch")
    fig.update_yaxes(title_text="weighted loss", row=1, col=1)
    fig.update_yaxes(title_text="KL (nats)", row=1, col=2)
    return _with_legend(fig)


def _with_legend(fig: go.Figure) -> go.Figure:
    """Names of heads are long and may be many: beside the figure, not above it."""
    legend = {"orientation": "v", "x": 1.02, "y": 1, "yanchor": "top", "tracegroupgap": 0}
    return fig.update_layout(legend=legend, margin_t=100)


MOST_SHOWN = 6  # heads; the others wait in the legend


def _colours(cards: Mapping[str, HeadCard]) -> list[str]:
    shades = [style("specdecpp").colour, style("decision").colour, *OTHER_COLOURS, INK]
    return [shades[i % len(shades)] for i in range(len(cards))]


# The table


def heads_table(heads: Sequence[Finished]) -> Table:
    """How well the heads' probabilities fit, as in SpecDec++'s Table 3. The least eval KL of every
    weight is bold."""
    table = Table(box=box.SIMPLE, pad_edge=False, collapse_padding=True)
    table.add_column("head")
    for heading in ("w_rej", "D", "train/KL", "eval/KL", "AUC", "ECE", "epoch"):
        table.add_column(heading, justify="right", no_wrap=True)
    for head in heads:
        card, metrics = head.card, head.card.metrics
        peers = [
            other.card.metrics["eval_kl"]
            for other in heads
            if (other.card.kind, other.card.w_rej) == (card.kind, card.w_rej)
        ]
        least = len(peers) > 1 and metrics["eval_kl"] == min(peers)
        table.add_row(
            head.label,
            f"{card.w_rej:g}",
            str(card.depth) if card.kind == "specdecpp" else "–",
            f"{metrics['train_kl']:.3f}",
            f"[bold]{metrics['eval_kl']:.3f}[/bold]" if least else f"{metrics['eval_kl']:.3f}",
            f"{metrics['auc']:.3f}",
            f"{metrics['ece']:.3f}",
            f"{metrics['epoch']:.0f} of {card.settings.epochs}",
        )
    table.caption = "KL in nats, on held-out prompts where not train"
    return table


def judged_table(judged: Mapping[str, Modelled]) -> Table:
    """The best threshold of each rule and head on a recording, the fastest in bold."""
    table = Table(box=box.SIMPLE, pad_edge=False, collapse_padding=True)
    table.add_column("")
    for heading in ("best", "AUC", "MAT", "ms a token", "modelled speedup"):
        table.add_column(heading, justify="right", no_wrap=True)
    most = max(m.speedup for m in judged.values())
    for name, found in judged.items():
        policy = found.policy
        chosen = (
            f"K = {policy.max_tokens}"
            if isinstance(policy, FixedPolicy)
            else f"{'Π ' if getattr(policy, 'cumulative', False) else ''}h = {policy.threshold:g}"
        )
        table.add_row(
            name,
            chosen,
            "–" if found.auc is None else f"{found.auc:.3f}",
            f"{found.mat:.2f}",
            f"{1e3 * found.latency:.3f}",
            f"{found.speedup:.3f}×",
            style="bold" if found.speedup == most else None,
        )
    table.caption = "by replay and the profile; AUC: accepted against rejected candidates"
    return table


# MLflow


class HeadsRun(DeliveredRun, HeadObserver):
    """A parent run for a training of heads, in the pair's experiment, and a nested run for each
    head: a head is logged once, however often the training is repeated or resumed."""

    def __init__(
        self,
        pair: PairSpec,
        draft: str,
        params: Mapping[str, Any],
        tell: Observer | None = None,
    ) -> None:
        """`params` say what is trained, on what; the same ones take the same run up again."""
        super().__init__(tell)
        self.cards: dict[str, HeadCard] = {}
        self.judged: dict[str, Modelled] = {}  # by the heads' names, once a recording judged them
        self._tried: set[str] = set()
        self.client = connect(patient=True)
        self.delivery = Delivery()  # by one thread: a run is begun before what is in it
        self._put(partial(self._begin, pair.name, draft, params))

    def head_finished(self, head: Finished) -> None:
        """Log a head as a finished nested run."""
        self.cards[head.label] = head.card
        self._put(partial(self._log, head))

    def finish(self, out: Path) -> None:
        """Log the figures and end the run. Raises :class:`Undelivered` where the store cannot be
        reached; the heads are in `out`."""
        self._put(self._finish)
        if left := self._settle():
            raise Undelivered(
                f"{self._absent(left)}; the heads are in {out}, and the same command delivers them"
            )
        self.finished = True

    def _begin(self, experiment: str, draft: str, params: Mapping[str, Any]) -> None:
        self.experiment_id = experiment_id_of(self._client, experiment)
        plan = hashlib.sha256(json.dumps([draft, params], sort_keys=True).encode()).hexdigest()
        earlier = runs_where(self._client, self.experiment_id, f"tags.training_plan = '{plan}'")
        if (run := next(earlier, None)) is None:
            tags = {"training_plan": plan, "draft": draft, **_environment_tags()}
            name = f"heads of {draft}"
            run = self._client.create_run(self.experiment_id, tags=tags, run_name=name)
        else:
            self._client.update_run(run.info.run_id, "RUNNING")
        self.run_id = run.info.run_id
        if not run.data.params:
            self._client.log_batch(self.run_id, params=as_params(params))
        self.nested: dict[str, Run] = {
            run.data.tags.get("training", ""): run for run in self._nested(self.run_id)
        }

    def _finish(self) -> None:
        if self.cards:
            log_figures(self._client, self.run_id, figures(self.cards, self.judged))
        self._client.set_terminated(self.run_id)

    def _log(self, head: Finished) -> None:
        card = head.card
        run = self.nested.get(card.training)
        if head.label in self._tried:  # and the store may have made the run, unheard
            query = f" and tags.training = '{card.training}'"
            run = next(self._nested(self.run_id, query), None)
        self._tried.add(head.label)
        if run is None:
            tags = {
                "mlflow.parentRunId": self.run_id,
                "training": card.training,
                **_environment_tags(),
            }
            run = self._client.create_run(self.experiment_id, run_name=head.label, tags=tags)
        if run.info.status == "FINISHED":
            return
        run_id = run.info.run_id
        trained = int((head.folder / CARD).stat().st_mtime * 1000)  # logged twice, it is the same
        curve = [
            Metric(key, float(value), trained, epoch.epoch)
            for epoch in card.curve
            for key, value in epoch.model_dump(exclude={"epoch"}).items()
        ]
        final = {f"kept_{key}": value for key, value in card.metrics.items()}
        self._client.log_batch(
            run_id,
            metrics=[
                *curve,
                *as_metrics(final | {f"{k}_rows": v for k, v in card.examples.items()}),
            ],
            params=as_params(card.model_dump(mode="json", include=CARD_PARAMS)),
            tags=[RunTag(f"fingerprint.{k}", v) for k, v in card.pair.items()],
        )
        # Its curves are the run's metrics, which MLflow draws itself.
        diagram = Drawing(reliability_diagram({head.label: card}))
        log_figures(self.client, run_id, {"reliability": diagram})
        self._client.log_artifacts(run_id, str(head.folder), "head")
        self._client.set_terminated(run_id)
        self.nested[card.training] = self._client.get_run(run_id)


def figures(
    cards: Mapping[str, HeadCard], judged: Mapping[str, Modelled] | None = None
) -> dict[str, Drawing]:
    """The figures of some heads, by file name; `judged` has their best thresholds."""
    return {
        "reliability": Drawing(reliability_diagram(cards)),
        "curves": Drawing(training_curves(cards)),
        **draw_heads(cards, judged=judged),
    }


def _environment_tags() -> dict[str, str]:
    """Git commit, hardware and library versions."""
    tags = environment() | {"mlflow.user": user_name(), "mlflow.source.name": "specdec train-head"}
    if commit := tags.get("git_commit"):
        tags["mlflow.source.git.commit"] = commit.removesuffix("-dirty")
    return tags
