"""Penalties, bias, min-p, tokens that cannot come yet: target and drafts are warped alike at every
node of a tree, by the tokens of the node's path."""

from collections import Counter
from dataclasses import replace
from typing import Any

import pytest
import torch
import transformers
from scipy.stats import chisquare

from specdec_core.config import AUTOREGRESSIVE, Sampling
from specdec_core.engine import Engine, Request
from specdec_core.tokens.text_warper import TextWarper
from tests.conftest import generated
from tests.specdec_core.drafting.pearl.in_turns import InTurns, linked
from tests.specdec_core.kinds import configured
from tests.specdec_core.models.eagle.pair_heads import head_of
from tests.toy_pair import NEAR, PROMPT, VOCABULARY, toy_pair

DRAFTERS: dict[str, dict[str, Any]] = {
    "chain": {"kind": "draft_model", "policy": {"kind": "svip", "threshold": 3.0}},
    "tree": {"kind": "tree", "branching": [3, 2, 1]},
    "fork": {"kind": "fork"},
    "target tree": {"kind": "target_tree", "branching": [1, 3, 2]},
    "dynamic tree": {"kind": "dynamic_tree"},
    "lookup": {"kind": "prompt_lookup"},
    "cascade": {"kind": "cascade"},
    "post-use": {"kind": "post_use"},
    "hybrid": {"kind": "hybrid", "merge": True},
}
HEAD = {"EAGLE head": {"kind": "tree", "draft": "head"}}
NEW = 24
PROMPTS = [(*[7, 8, 9] * n, 20, 21, 7, 8) for n in (1, 4, 2)]
EDITED = {
    "repetition": Sampling(repetition_penalty=1.3),
    "all": Sampling(
        repetition_penalty=0.8, frequency_penalty=1.1, presence_penalty=-0.3, logit_bias={7: 2.5}
    ),
}


class Counts(transformers.LogitsProcessor):
    """Presence and frequency penalties as OpenAI defines them, of the output alone."""

    def __init__(self, sampling, prompt):
        self.sampling, self.prompt = sampling, prompt

    def __call__(self, ids, scores):
        for token, count in Counter(ids[0, self.prompt :].tolist()).items():
            scores[0, token] -= self.sampling.frequency_penalty * count
            scores[0, token] -= self.sampling.presence_penalty
        return scores


def written(pair, prompt, sampling):
    """What transformers writes greedily."""
    processors = transformers.LogitsProcessorList()
    if sampling.logit_bias:
        bias = {(token,): value for token, value in sampling.logit_bias}
        processors.append(transformers.SequenceBiasLogitsProcessor(bias))
    processors.append(transformers.MinNewTokensLengthLogitsProcessor(len(prompt), NEW, 0, "cpu"))
    if (penalty := sampling.repetition_penalty) != 1:
        processors.append(transformers.RepetitionPenaltyLogitsProcessor(penalty))
    processors.append(Counts(sampling, len(prompt)))
    return generated(pair.target, prompt, NEW, logits_processor=processors)


@pytest.fixture(scope="module")
def expected(tiny_pair):
    return {name: [written(tiny_pair, p, edit) for p in PROMPTS] for name, edit in EDITED.items()}


def requests(**options):
    asked = {"max_new_tokens": NEW, "min_tokens": NEW, **options}
    return [Request(str(n), prompt, seed=n, **asked) for n, prompt in enumerate(PROMPTS)]


@pytest.mark.parametrize("drafter", [None, *DRAFTERS, *HEAD])
def test_greedy_output_is_what_transformers_generates(tiny_pair, expected, drafter):
    """All requests share the batch, each with its own penalties."""
    asked = [
        replace(request, id=f"{name} {request.id}", sampling=sampling)
        for name, sampling in EDITED.items()
        for request in requests()
    ]
    pair = replace(tiny_pair, drafts={**tiny_pair.drafts, "head": head_of(tiny_pair)})
    engine = Engine(pair, configured(drafter and {**DRAFTERS, **HEAD}[drafter], Sampling()), 4)
    generations = engine.generate(asked)
    assert [g.tokens for g in generations] == [t for texts in expected.values() for t in texts]
    plain = [g.tokens for g in Engine(tiny_pair, AUTOREGRESSIVE, 3).generate(requests())]
    assert plain not in expected.values()
    if drafter is not None:
        assert sum(r.accepted for g in generations for r in g.rounds) > 0


def test_an_asynchronous_draft_is_warped_too(tiny_pair, expected):
    link = InTurns(tiny_pair, seed=1, dies=0.01)
    configuration = configured({"kind": "pearl"}, EDITED["all"])
    engine = Engine(linked(tiny_pair, link), configuration, 2)
    generations = engine.generate(requests())
    assert [g.tokens for g in generations] == expected["all"]
    assert sum(r.accepted for g in generations for r in g.rounds) > 10


# The draft is the target: every candidate is accepted, if both have the same distributions.


@pytest.fixture(scope="module")
def twins(tiny_pair):
    return replace(tiny_pair, drafts={"draft": tiny_pair.target})


@pytest.mark.parametrize(
    ("drafter", "temperature"), [("chain", 0.0), ("cascade", 0.8), ("target tree", 0.8)]
)
def test_a_draft_like_its_target_is_always_right(twins, drafter, temperature):
    chain = {**DRAFTERS[drafter], "branching": [1, 1, 1, 1]}
    if drafter != "target tree":
        del chain["branching"]
    sampling = EDITED["all"].model_copy(update={"temperature": temperature, "min_p": 0.01})
    generations = Engine(twins, configured(chain, sampling), 2).generate(requests())
    rounds = [r for g in generations for r in g.rounds]
    assert sum(r.drafted for r in rounds) > 40
    # In float32 p and q differ by what a forward of another width rounds otherwise.
    assert sum(r.drafted - r.accepted for r in rounds) <= 1


def test_that_notices_a_draft_that_is_not_warped(twins, monkeypatch):
    from specdec_core.drafting import chain

    monkeypatch.setattr(chain, "warped", lambda output, *_: output)
    sampling = EDITED["all"].model_copy(update={"temperature": 0.8})
    generations = Engine(twins, configured(DRAFTERS["chain"], sampling), 2).generate(requests())
    assert sum(r.drafted - r.accepted for g in generations for r in g.rounds) > 10


# Samples of all texts of four tokens, compared with their probabilities.

LENGTH = 4
ENDS = {"stop_tokens": frozenset({2, 5}), "min_tokens": 3}
SAMPLED: dict[str, tuple[Sampling, dict[str, Any]]] = {
    "repetition": (Sampling(temperature=1.0, repetition_penalty=3.0), {}),
    "counts": (Sampling(temperature=1.0, presence_penalty=1.0, frequency_penalty=1.5), {}),
    "bias": (Sampling(temperature=1.2, logit_bias={2: 1.5, 4: -100}, min_p=0.2), {}),
    "min-tokens": (Sampling(temperature=1.0, frequency_penalty=-0.7), ENDS),
    "coupled": (Sampling(temperature=1.0, frequency_penalty=2.0, coupling="gumbel"), {}),
}
TOY_DRAFTERS = {
    "chain": {"kind": "draft_model", "draft": NEAR, "policy": {"kind": "fixed", "max_tokens": 2}},
    "tree": {"kind": "tree", "draft": NEAR, "branching": [3, 2]},
}


def next_probs(logits, text, case):
    """The exact distribution (vocabulary,) after PROMPT and `text`, one token at a time."""
    sampling, options = SAMPLED[case]
    scores = logits.double().tolist()
    for token in range(VOCABULARY):
        if len(text) < options.get("min_tokens", 0) and token in options["stop_tokens"]:
            scores[token] = -float("inf")
        scores[token] += dict(sampling.logit_bias).get(token, 0)
        if token in (*PROMPT, *text):
            factor = sampling.repetition_penalty
            scores[token] = scores[token] / factor if scores[token] > 0 else scores[token] * factor
        scores[token] -= sampling.frequency_penalty * text.count(token)
        scores[token] -= sampling.presence_penalty * (token in text)
    probs = torch.tensor(scores).div(sampling.temperature).softmax(dim=-1)
    probs[probs < sampling.min_p * probs.max()] = 0
    return probs / probs.sum()


@torch.inference_mode()
def exact(pair, case):
    """The probability of each text that can be written."""
    final = SAMPLED[case][1].get("stop_tokens", frozenset())
    finished: dict[tuple[int, ...], float] = {}
    unfinished: dict[tuple[int, ...], float] = {(): 1.0}
    for length in range(LENGTH):
        texts = list(unfinished)
        logits = pair.target(torch.tensor([(*PROMPT, *text) for text in texts])).logits[:, -1]
        longer: dict[tuple[int, ...], float] = {}
        for text, row in zip(texts, logits, strict=True):
            for token, chance in enumerate(next_probs(row, text, case).tolist()):
                ended = token in final or length == LENGTH - 1
                (finished if ended else longer)[*text, token] = unfinished[text] * chance
        unfinished = longer
    return finished


def p_value(case, drafter, samples):
    """Of a chi-square goodness of fit. Texts expected less than 10 times are put together with
    those that differ in their first tokens alone: the last ones had candidates before them."""
    sampling, options = SAMPLED[case]
    pair = toy_pair()
    engine = Engine(pair, configured(TOY_DRAFTERS[drafter], sampling), 256)
    asked = [Request(str(n), PROMPT, LENGTH, seed=n, **options) for n in range(samples)]
    observed = Counter(tuple(g.tokens) for g in engine.generate(asked))
    wanted = Counter({text: samples * chance for text, chance in exact(pair, case).items()})
    if any(wanted[text] == 0 for text in observed):
        return 0.0  # a text that cannot be
    for length in range(LENGTH, 0, -1):
        rare = [text for text in wanted if len(text) == length and 0 < wanted[text] < 10]
        for text in rare:
            wanted[text[1:]] += wanted.pop(text)
            observed[text[1:]] += observed.pop(text, 0)
    kept = [text for text, count in wanted.items() if count > 0]
    total = sum(wanted[text] for text in kept)
    counts = [observed[text] for text in kept]
    return float(chisquare(counts, [wanted[text] * samples / total for text in kept]).pvalue)


@pytest.mark.parametrize(
    ("case", "drafter"),
    [
        *(("repetition", "chain"), ("repetition", "tree"), ("counts", "chain")),
        *(("bias", "tree"), ("min-tokens", "tree"), ("coupled", "chain")),
    ],
)
def test_samples_have_the_targets_warped_distribution(case, drafter):
    assert p_value(case, drafter, 800) > 1e-3


def none_at_the_target(monkeypatch):
    from specdec_core.engine import judging

    monkeypatch.setattr(judging, "warped", lambda output, *_: output)


def by_other_paths(change):
    def bug(monkeypatch):
        whole = TextWarper.warp
        monkeypatch.setattr(TextWarper, "warp", lambda *given: whole(*given[:3], change(given[3])))

    return bug


without_paths = by_other_paths(lambda paths: [()] * len(paths))
of_another_node = by_other_paths(lambda paths: [*paths[1:], paths[0]])


@pytest.mark.parametrize(
    ("drafter", "bug"),
    [("chain", none_at_the_target), ("chain", without_paths), ("tree", of_another_node)],
)
def test_the_test_notices_wrong_warping(monkeypatch, drafter, bug):
    bug(monkeypatch)
    assert p_value("counts", drafter, 800) < 1e-9
