"""Measuring a pair's profile on this machine."""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import torch

from specdec_core.base.errors import UserError
from specdec_core.base.observer import SILENT, Observer
from specdec_core.config import AUTOREGRESSIVE, Configuration, PolicySettings
from specdec_core.cost.forward import ForwardCost, Measurement
from specdec_core.cost.profile import Profile, policy_key
from specdec_core.drafting.draft_model.settings import DraftModelSettings
from specdec_core.drafting.heads.storage import load_pair_head
from specdec_core.drafting.policies.fixed import FixedSettings
from specdec_core.drafting.policies.policy import PolicyOutcome, build_policy
from specdec_core.drafting.policies.signals import Signals
from specdec_core.engine import Engine, Request
from specdec_core.measure.losses import again_if_lost
from specdec_core.models.pair import Pair
from specdec_core.models.runner import Batch, ModelRunner, time_forward
from specdec_core.tokens.statistics import Round

WIDTHS = (1, 2, 3, 5, 8, 12, 16, 24, 33)  # up to a tree of 32 candidates
CONTEXTS = (64, 256, 512)
BATCHES = (1, 2, 4, 8, 16)
PREFILLS = (16, 64, 256, 512)  # tokens of a prompt
# The most tokens of a forward where batches are unset: for large forwards few widths suffice.
_MOST_TOKENS = 144


def profile_pair(
    pair: Pair,
    widths: Sequence[int] = WIDTHS,
    contexts: Sequence[int] | None = None,
    batches: Sequence[int] | None = None,
    repeats: int = 7,
    observer: Observer = SILENT,
) -> Profile:
    """Measure forwards of every model of `pair` at every width, context and batch, fit them, and
    measure what the engine adds.

    The models take turns within a repeat, so that a change of the machine's load falls on all of
    them alike; a measurement is the median of its repeats. Contexts unset are :data:`CONTEXTS` as
    far as the pair can hold them, batches unset :data:`BATCHES`, the larger of them at the smaller
    widths only. A step is a repeat. Where a model's process is lost, all is measured again. Sizes
    that are not positive or do not fit are a :class:`UserError`.
    """
    room = pair.max_length - max(widths)
    if contexts is None:
        contexts = [context for context in CONTEXTS if context <= room] or [max(room, 1)]
    most = math.inf if batches else max(_MOST_TOKENS, max(widths))
    batches = batches or BATCHES
    sizes = {"widths": widths, "contexts": contexts, "batches": batches, "repeats": (repeats,)}
    for name, values in sizes.items():
        if min(values) < 1:
            raise UserError(f"profile {name} must be at least 1 (got {min(values)})")
    if max(contexts) > room:
        raise UserError(
            f"{max(widths)} tokens after a context of {max(contexts)} are more than the"
            f" {pair.max_length} that the pair can hold"
        )
    shapes = [
        (width, batch)
        for batch in sorted(set(batches))
        for width in sorted(set(widths))
        if width * batch <= most or width == min(widths)
    ]
    once = partial(_profile, pair, shapes, sorted(set(contexts)), repeats, observer)
    return again_if_lost(once, observer)


def _profile(
    pair: Pair,
    shapes: Sequence[tuple[int, int]],
    contexts: Sequence[int],
    repeats: int,
    observer: Observer,
) -> Profile:
    """Forwards of each shape (width, batch) of `shapes`, the largest last, at each context."""
    rows = shapes[-1][1]
    runners = {_TARGET: pair.open_runner(None, rows)}
    runners |= {name: pair.open_alone(name, rows) for name in pair.drafts}
    measured: dict[str, list[Measurement]] = {name: [] for name in runners}
    observer.stage("measuring forwards", len(contexts) * (repeats + 1))
    for context in contexts:
        samples: dict[tuple[str, int, int], list[float]] = {
            (name, *shape): [] for name in runners for shape in shapes
        }
        for runner in runners.values():
            fill(runner, context)
        for _ in range(repeats + 1):
            for name, runner in runners.items():
                time_forward(runner, *shapes[-1])  # its weights are back in the caches
                for shape in shapes:
                    samples[name, *shape].append(time_forward(runner, *shape))
            observer.step()
        for (name, width, batch), times in samples.items():
            seconds = statistics.median(times[1:])  # the first one warmed up
            measured[name].append(
                Measurement(width=width, context=context, batch=batch, seconds=seconds)
            )
    prefills = _time_prefills(runners, pair.max_length, min(repeats, 3))
    costs = {
        name: ForwardCost.fit(measurements).with_prefill(prefills[name])
        for name, measurements in measured.items()
    }
    asked = pair.spec.runner
    profile = Profile(
        target=costs.pop(_TARGET),
        drafts=costs,
        device=runners[_TARGET].hardware,
        target_dtype=_dtype(pair.target, asked.target_dtype),
        draft_dtype=_dtype(next(iter(pair.drafts.values()), pair.target), asked.draft_dtype),
        threads=asked.threads,
        mixes=runners[_TARGET].mixes,
    )
    profile = profile.model_copy(update=_overheads(profile, pair))
    return profile.model_copy(update={"row_overhead": _row_overhead(profile, pair, rows)})


def measure_policies(
    pair: Pair, configurations: Iterable[Configuration], rounds: int = 60
) -> dict[str, float]:
    """Seconds that the length policies of `configurations` take for a candidate token, by
    :func:`policy_key`: deciding after each of a round's candidates and observing the outcome.
    Policies that only a replay can follow have none. Raises :class:`UserError` for an unknown head.
    """
    measured: dict[str, tuple[str, PolicySettings]] = {}
    for configuration in configurations:
        for draft, settings in configuration.policies:
            if settings.decodes:
                draft = pair.draft_name(draft)
                measured.setdefault(policy_key(draft, settings), (draft, settings))
    policies = {
        key: build_policy(settings, partial(load_pair_head, pair, draft))
        for key, (draft, settings) in measured.items()
    }
    outputs = {}
    for draft in {draft for draft, _ in measured.values()}:
        runner = pair.open_alone(draft, 1)
        runner.watch_hidden(True)
        output = runner.forward(Batch([0], [[1, 1]], wanted=[1]))
        assert output.hidden is not None  # it is watched
        outputs[draft] = output.logits, output.hidden
        runner.watch_hidden(False)
    outcome = PolicyOutcome(_CANDIDATES, _CANDIDATES - 1, _CANDIDATES)
    seconds: dict[str, list[float]] = {key: [] for key in policies}
    with torch.inference_mode():
        for _ in range(rounds):
            for key, policy in policies.items():
                logits, hidden = outputs[measured[key][0]]
                start = time.perf_counter()
                policy.limit(0)
                for position in range(1, _CANDIDATES + 1):
                    policy.go_on(Signals([0], [1], [position], logits, None, hidden))
                policy.observe(0, outcome)
                seconds[key].append((time.perf_counter() - start) / _CANDIDATES)
    return {key: statistics.median(times) for key, times in seconds.items()}


_CANDIDATES = 4  # of a round
_TARGET = "\0target"  # never a draft's name


def _dtype(model: Any, asked: str) -> str:
    """The data type that was asked for, or else the model's; one on other devices has the first."""
    return asked if asked != "auto" else str(model.dtype).removeprefix("torch.")


def fill(runner: ModelRunner, context: int) -> None:
    """Fill every row to `context` cached tokens; their values do not change a forward's time."""
    missing = [[1] * (context - length) for length in runner.lengths]
    runner.prefill(range(len(missing)), missing)


def _time_prefills(
    runners: Mapping[str, ModelRunner], room: int, repeats: int
) -> dict[str, dict[int, float]]:
    """Median seconds of prefilling one row with :data:`PREFILLS` tokens, as far as there is room,
    by runner. The first repeat only warms up."""
    lengths = [tokens for tokens in PREFILLS if tokens < room] or [max(room - 1, 1)]
    samples: dict[str, dict[int, list[float]]] = {
        name: {tokens: [] for tokens in lengths} for name in runners
    }
    for _ in range(repeats + 1):
        for name, runner in runners.items():
            for tokens, times in samples[name].items():
                runner.truncate(0, 0)
                _wait(runner)
                start = time.perf_counter()
                runner.prefill([0], [[1] * tokens])
                _wait(runner)
                times.append(time.perf_counter() - start)
    return {
        name: {tokens: statistics.median(times[1:]) for tokens, times in by_length.items()}
        for name, by_length in samples.items()
    }


def _wait(runner: ModelRunner) -> None:
    """Wait for the runner's device to finish what it was given."""
    if runner.device.type == "cuda":
        torch.cuda.synchronize(runner.device)


def _row_overhead(profile: Profile, pair: Pair, rows: int) -> float:
    """Seconds that autoregressive steps of `rows` requests take beyond their forward and a step's
    overhead, for each request after the first."""
    if rows == 1:
        return 0.0
    engine, beyond = Engine(pair, slots=rows), list[float]()
    request, context = _short_request(pair)
    for number in range(rows):
        engine.add(replace(request, id=str(number)))
    while not engine.idle:
        start = time.perf_counter()
        engine.step(texts=False)
        seconds = time.perf_counter() - start
        if len(engine.last.decoding) == rows and not engine.last.reading:
            beyond.append(seconds - profile.target.seconds(1, context, rows))
    if not beyond:
        return 0.0
    return max(statistics.median(beyond) - profile.round_overhead, 0.0) / (rows - 1)


def _short_request(pair: Pair) -> tuple[Request, float]:
    """A request to measure the engine's overheads with, and its tokens in the cache half-way."""
    prompt, tokens = min(64, pair.max_length // 2), min(32, pair.max_length // 2)
    request = Request("profile", (1,) * prompt, tokens, ignore_eos=True)
    return request, prompt + tokens / 2


def _overheads(profile: Profile, pair: Pair) -> dict[str, Any]:
    """`round_overhead` and `draft_overhead` from short runs of the engine.

    A round's is what autoregressive rounds take beyond their forwards; a drafting step's is what
    remains of drafting rounds after all forwards and the rounds' overhead.
    """
    request, context = _short_request(pair)
    policy = FixedSettings(max_tokens=4)
    runs = {_TARGET: AUTOREGRESSIVE} | {
        name: Configuration(drafter=DraftModelSettings(draft=name, policy=policy))
        for name in profile.drafts
    }
    engine = Engine(pair)
    rounds: dict[str, list[Round]] = {name: [] for name in runs}
    for _ in range(3):
        for name, configuration in runs.items():
            engine.configure(configuration)
            (generation,) = engine.generate([request])
            rounds[name] += generation.rounds[1:]  # the first one prefills

    def beyond_target(r: Round) -> float:
        return r.seconds - profile.t_target(1 + r.drafted, context)

    # A median over rounds, because what disturbs the machine falls on some of them.
    per_round = max(statistics.median(map(beyond_target, rounds.pop(_TARGET))), 0.0)
    per_draft = {
        name: statistics.median(
            (beyond_target(r) - per_round) / r.draft_forwards for r in drafted if r.draft_forwards
        )
        - profile.t_draft(name, context)
        for name, drafted in rounds.items()
    }
    return {
        "round_overhead": per_round,
        "draft_overhead": {name: max(seconds, 0.0) for name, seconds in per_draft.items()},
    }
