"""How far target-initialised trees drift from the target, by their width: exactly on a toy pair,
and on real prompts by the target's scores of the texts."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import pandas as pd

from research.drift.drift import Written, divergence, goodness_of_fit, write
from research.drift.exact import exact_divergence, written_distribution
from research.drift.toy_pair import FAR, NEAR, exact_distribution, sample_counts, toy_pair
from specdec_core.base.observer import Observer
from specdec_core.config import Configuration, Sampling, parse
from specdec_core.drafting.target_started.settings import TargetTreeSettings
from specdec_core.models.pair import Pair

TOY_SAMPLING = Sampling(temperature=1.0)
TOY_BRANCHING = (2, 2)  # after the target's tokens: the toy's texts are short


def target_tree(draft: str, branching: Sequence[int], sampling: Sampling) -> Configuration:
    """A target-initialised tree; `branching[0]` is its width. Raises :class:`UserError` for
    branching that is none."""
    value = {"kind": "target_tree", "draft": draft, "branching": tuple(branching)}
    drafter = parse(TargetTreeSettings, value, "--branching")
    return Configuration(drafter=drafter, sampling=sampling)


def on_toy_pair(
    widths: Sequence[int], samples: int, length: int, observer: Observer | None = None
) -> pd.DataFrame:
    """One row a draft of the toy pair and width: the exact divergence of the texts from the target
    (`kl` in nats, `total_variation`), its estimate from the engine's samples (`sampled_kl` with its
    interval), and how well these fit the target's distribution (`p_value`) and the enumerated one
    (`p_value_enumerated`). Empty without samples."""
    if not samples:
        return pd.DataFrame()
    observer = observer or Observer()
    observer.stage("toy pair", 2 * len(widths))
    pair = toy_pair()
    exact = exact_distribution(pair, TOY_SAMPLING, length)
    rows = []
    for draft in (NEAR, FAR):
        for width in widths:
            tree = target_tree(draft, (width, *TOY_BRANCHING), TOY_SAMPLING)
            written = written_distribution(pair, settings_of(tree), TOY_SAMPLING, length)
            kl, variation = exact_divergence(written, exact)
            counts = sample_counts(pair, tree, samples, length)
            sampled = divergence(counts, exact)
            rows.append(
                {
                    "draft": draft,
                    "width": width,
                    "lossless": tree.lossless,
                    "kl": kl,
                    "total_variation": variation,
                    "sampled_kl": sampled.kl.value,
                    "sampled_kl_low": sampled.kl.low,
                    "sampled_kl_high": sampled.kl.high,
                    "p_value": sampled.p_value,
                    "p_value_enumerated": goodness_of_fit(counts, written),
                }
            )
            observer.step()
    return pd.DataFrame(rows)


def on_texts(
    pair: Pair,
    trees: Iterable[Configuration],
    sampling: Sampling,
    prompts: Sequence[tuple[int, ...]],
    texts: int,
    max_new_tokens: int,
    observer: Observer | None = None,
) -> pd.DataFrame:
    """One row for autoregressive decoding (width 0) and each of `trees`, of `texts` texts a prompt
    (tokens): the mean log-likelihood of a token under the target in nats, its change against the
    first row, the share of tokens that are the target's most likely ones (`agreement`), and MAT,
    the tokens a target forward gave."""
    observer = observer or Observer()

    def written(configuration: Configuration) -> Written:
        observer.stage(configuration.label, len(prompts) * texts)
        return write(
            pair,
            configuration,
            prompts,
            texts,
            max_new_tokens,
            on_finish=lambda _: observer.step(),
        )

    alone = written(Configuration(sampling=sampling))
    rows = [{"draft": "autoregressive", "width": 0, "lossless": True, **_scores(alone, None)}]
    for tree in trees:
        drafter = settings_of(tree)
        place = {"draft": drafter.draft, "width": drafter.branching[0], "lossless": tree.lossless}
        rows.append({**place, **_scores(written(tree), alone)})
    return pd.DataFrame(rows)


def settings_of(tree: Configuration) -> TargetTreeSettings:
    """The settings of a target tree."""
    assert isinstance(tree.drafter, TargetTreeSettings)
    return tree.drafter


def _scores(written: Written, alone: Written | None) -> dict[str, float | None]:
    mean, agreement = written.interval(), written.agreement()
    change = None if alone is None else written.against(alone)
    return {
        "log_likelihood": mean.value,
        "log_likelihood_low": mean.low,
        "log_likelihood_high": mean.high,
        "change": None if change is None else change.value,
        "change_low": None if change is None else change.low,
        "change_high": None if change is None else change.high,
        "agreement": agreement.value,
        "agreement_low": agreement.low,
        "agreement_high": agreement.high,
        "mat": written.counts.metrics()["mat"],
        "tokens": int(written.tokens.sum()),
    }
