"""How far target-initialised trees drift from the target, by their width and the target's scores of
the texts."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from research.drift.drift import Written, write
from research.frames import Rows, framed
from specdec_core.base.observer import Observer
from specdec_core.config import Configuration, Sampling, parse
from specdec_core.drafting.target_started.settings import TargetTreeSettings
from specdec_core.models.pair import Pair


def target_tree(draft: str, branching: Sequence[int], sampling: Sampling) -> Configuration:
    """A target-initialised tree; `branching[0]` is its width. Raises :class:`UserError` for
    branching that is none."""
    value = {"kind": "target_tree", "draft": draft, "branching": tuple(branching)}
    drafter = parse(TargetTreeSettings, value, "--branching")
    return Configuration(drafter=drafter, sampling=sampling)


@framed
def on_texts(
    pair: Pair,
    trees: Iterable[Configuration],
    sampling: Sampling,
    prompts: Sequence[tuple[int, ...]],
    texts: int,
    max_new_tokens: int,
    observer: Observer | None = None,
) -> Rows:
    """One row for autoregressive decoding (width 0) and each of `trees`, of `texts` texts a prompt
    (tokens): the mean log-likelihood of a token under the target in nats, its change against the
    first row, the share of tokens that are the target's most likely ones (`agreement`), and MAT,
    the tokens a target forward gave."""
    observer = observer or Observer()

    def written(configuration: Configuration) -> Written:
        observer.stage(configuration.label, len(prompts) * texts)
        return write(
            pair, configuration, prompts, texts, max_new_tokens, on_finish=lambda _: observer.step()
        )

    alone = written(Configuration(sampling=sampling))
    yield {"draft": "autoregressive", "width": 0, "lossless": True, **_scores(alone, None)}
    for tree in trees:
        drafter = tree.drafter
        assert isinstance(drafter, TargetTreeSettings)
        place = {"draft": drafter.draft, "width": drafter.branching[0], "lossless": tree.lossless}
        yield {**place, **_scores(written(tree), alone)}


def _scores(written: Written, alone: Written | None) -> dict[str, float]:
    change = written.against(alone).columns("change") if alone else {}
    return {
        **written.interval().columns("log_likelihood"),
        **change,
        **written.agreement().columns("agreement"),
        "mat": written.counts.metrics()["mat"],
        "tokens": int(written.tokens.sum()),
    }
