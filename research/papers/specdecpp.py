"""SpecDec++'s Table 3: heads of every depth and weight, each with its thresholds, by replay; and
the stand-alone models of its Table 2, timed."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from itertools import product
from time import perf_counter
from typing import Any

import numpy as np
import pandas as pd

from research.frames import Rows, framed
from research.papers.post_use import MOST, draft_models
from research.papers.replayed import Recordings
from research.papers.result import regression
from specdec_core.base.errors import UserError
from specdec_core.config import MOST_TOKENS, Configuration, PolicySettings
from specdec_core.cost import Profile
from specdec_core.drafting.draft_model.settings import DraftModelSettings
from specdec_core.drafting.heads.card import HeadSpec, HeadTrainingSettings
from specdec_core.drafting.heads.loaded import LoadedHead
from specdec_core.drafting.policies.confidence import ConfidenceProductSettings
from specdec_core.drafting.policies.fixed import FixedSettings
from specdec_core.drafting.policies.heads import SpecDecPlusPlusSettings
from specdec_core.models.pair import load_pair
from specdec_core.models.runner import Batch, ModelRunner
from specdec_core.recordings.replay import Replay
from specdec_core.recordings.schema import Recording
from specdec_core.training.heads import examples as splits
from specdec_core.training.heads.examples import load_examples, split_prompts
from specdec_core.training.heads.training import HeadTraining

WEIGHTS = (1.0, 3.0, 6.0, 12.0)
DEPTHS = (0, 1, 2, 3, 4)
THRESHOLDS = (0.1, 0.3, 0.5, 0.7, 0.9)
# Of a head; 0 is K = 1, at which it decides nothing.
SETTINGS_OF_HEADS = (0.0, 0.01, 0.03, *THRESHOLDS)
STEPS = (8, 24, 48, 64)  # tokens that a model writes alone
SETTINGS = HeadTrainingSettings(epochs=30)  # the best of them, on dev, is kept
DEV, TEST = "dev", "test"
FIXED, PRODUCT = "best fixed K", "confidence product"  # what a head has to beat
BASELINES: Mapping[str, Mapping[float, PolicySettings]] = {
    FIXED: {k: FixedSettings(max_tokens=k) for k in range(1, 15)},
    PRODUCT: {h: ConfidenceProductSettings(threshold=h) for h in THRESHOLDS},
}


def heads(mixed: Recordings, judged: Recordings, times: Profile) -> pd.DataFrame:
    """A row for each head (`name`, `w_rej`, `depth`, the `examples` that it learned from, its KL on
    the splits: `train_kl`, `eval_kl`, `test_kl`), threshold (`setting`) and set of prompts
    (`prompts`): the modelled `speedup` on them.
    The baselines have rows, too. Heads learn from the first of the `mixed` recordings; its dev and
    test prompts are the sets named dev and test. The other sets are `judged`, without the prompts
    that heads learned from. The policies' own time is left out. Raises :class:`UserError` where
    prompts are too few, or the pair has no draft model."""
    recording = next(iter(mixed.values()))
    draft, trained = recording.draft_name(), recording.prompts.first_turns
    found = _train(recording, draft)
    loaded = {(draft, name): head for name, (_, head) in found.items()}
    sets = {
        name: (
            Replay(each, loaded, drawn=True),
            np.flatnonzero(unseen(each.prompts.first_turns, trained)),
        )
        for name, each in judged.items()
    }
    split = split_prompts(trained)
    dev, test = (np.flatnonzero(split == part) for part in (splits.DEV, splits.TEST))
    if not len(dev) or not len(test):
        raise UserError(f"{recording.folder}: too few prompts for dev and test")
    own = Replay(recording, loaded, drawn=True)
    sets = {DEV: (own, dev), TEST: (own, test), **sets}
    steered = {
        name: {
            h: SpecDecPlusPlusSettings(head=name, threshold=h, max_tokens=MOST_TOKENS if h else 1)
            for h in SETTINGS_OF_HEADS
        }
        for name in found
    }
    return pd.DataFrame(
        {
            "name": name,
            **(found[name][0] if name in found else {}),
            "setting": float(setting),
            "prompts": prompts,
            "speedup": modelled_speedup(replay, times, draft, policy, numbers),
        }
        for name, policies in {**steered, **BASELINES}.items()
        for setting, policy in policies.items()
        for prompts, (replay, numbers) in sets.items()
        if len(numbers)
    )


@framed
def stand_alone(greedy: Recordings) -> Rows:
    """Table 2's stand-alone models, timed now: the target and each draft model write texts of
    several lengths alone, greedily, after the first prompts of each set. A row a set and model:
    `prompts`, `model`, and the columns of :func:`research.papers.result.regression`, with the
    model's forward time as `t_target`. Raises
    :class:`UserError` for a pair without a draft model."""
    first = next(iter(greedy.values()))
    pair, drafts = load_pair(first.header.pair), draft_models(first)
    for model in (None, *drafts):
        runner = pair.open_runner(model, 1)
        for name, recording in greedy.items():
            prompts = [tokens.tolist() for tokens in recording.prompts.tokens[:MOST]]
            _written(runner, prompts[0], STEPS[0])  # warms up
            steps = [count for _ in prompts for count in STEPS]
            seconds = [_written(runner, tokens, count) for tokens in prompts for count in STEPS]
            columns = np.stack([np.zeros(len(steps)), steps, np.ones(len(steps))], axis=1)
            found = regression(columns, np.array(seconds))
            yield {"prompts": name, "model": model or "target", **found}


def _written(runner: ModelRunner, prompt: Sequence[int], count: int) -> float:
    """Seconds in which a model writes `count` tokens after a prompt, greedily."""
    runner.truncate(0, 0)
    start = perf_counter()
    runner.prefill([0], [prompt[:-1]])
    token = prompt[-1]
    for _ in range(count):
        [[token]] = runner.forward(Batch([0], [[token]])).choices()
    return perf_counter() - start


def unseen(prompts: Sequence[np.ndarray], trained: Sequence[np.ndarray]) -> np.ndarray:
    """Which of `prompts` (n,) bool have tokens that none of the `trained` prompts has."""
    known = {np.asarray(tokens, np.int64).tobytes() for tokens in trained}
    return np.array([np.asarray(t, np.int64).tobytes() not in known for t in prompts], bool)


def modelled_speedup(
    replay: Replay, profile: Profile, draft: str, policy: PolicySettings, prompts: np.ndarray
) -> float:
    """The speedup over autoregressive decoding on the numbered `prompts` (Eq. 3.1), with the
    forwards' times at the widths that they have on average over all prompts."""
    context, sampling = replay.recording.prompts.context, replay.header.sampling
    drafter = DraftModelSettings(draft=draft, policy=policy)
    configuration = Configuration(drafter=drafter, sampling=sampling)
    rounds, cost = replay.run(configuration), profile.under(configuration)
    counts = rounds.counts
    whole = cost.estimate_seconds(counts, draft, context)
    undrafted = replace(counts, n_draft=0, n_draft_tokens=0)
    verifying = cost.estimate_seconds(undrafted, draft, context)
    chosen = np.isin(rounds.prompt, np.arange(len(rounds.ids))[prompts])
    tokens, drafts = int(rounds.generated[chosen].sum()), int(rounds.draft_forwards[chosen].sum())
    total = int(chosen.sum()) * verifying / max(counts.n_target, 1)
    total += drafts * (whole - verifying) / max(counts.n_draft, 1)
    return profile.autoregressive_seconds(tokens, context) / total if total else 1.0


@framed
def chosen_settings(table: pd.DataFrame) -> Rows:
    """Of each `name` of :func:`heads` and set but dev: the speedup at the setting that is fastest
    on dev (`setting`, `speedup`), and the set's own best (`best_setting`, `best`)."""
    for name, each in table.groupby("name", sort=False):
        wide = each.pivot(index="setting", columns="prompts", values="speedup")
        place = int(wide[DEV].argmax())
        for prompts in each.loc[each["prompts"] != DEV, "prompts"].drop_duplicates():
            yield {
                "name": name,
                "prompts": prompts,
                "setting": wide.index[place],
                "speedup": wide[prompts].iloc[place],
                "best_setting": wide[prompts].idxmax(),
                "best": wide[prompts].max(),
            }


def best_head(table: pd.DataFrame) -> str:
    """The name of the head that is the fastest on dev."""
    dev = table[(table["prompts"] == DEV) & table["w_rej"].notna()]
    return str(dev["name"].iloc[int(dev["speedup"].argmax())])


def _train(recording: Recording, draft: str) -> dict[str, tuple[dict[str, Any], LoadedHead]]:
    """The heads by name, with their weights, depths and divergences."""
    examples = load_examples([recording], draft, ["specdecpp"])["specdecpp"]
    found = {}
    for weight, depth in product(WEIGHTS, DEPTHS):
        spec = HeadSpec(depth=depth, w_rej=weight)
        training = HeadTraining(spec, examples, SETTINGS)
        card = training.run().card
        facts = {"w_rej": spec.w_rej, "depth": spec.depth, "examples": card.examples["train"]}
        kl = {key: card.metrics[key] for key in ("train_kl", "eval_kl", "test_kl")}
        found[spec.label] = ({**facts, **kl}, LoadedHead(training.head, card))
    return found
