"""A certificate is given to what is lossless, and to nothing else."""

import shutil
from datetime import UTC, datetime
from pathlib import Path

import pytest
from pydantic import ValidationError
from scipy.stats import binom

from specdec_core.base.errors import UserError
from specdec_core.base.observer import Observer
from specdec_core.config import Sampling
from specdec_core.engine import Request
from specdec_core.evidence.certificate.certificate import (
    Certificate,
    CertifiedServer,
    SampledDistribution,
    certificate_path,
    find_certificate,
)
from specdec_core.evidence.certificate.certify import Extent, check_all, speculated
from specdec_core.evidence.certificate.distribution import _p_value
from specdec_core.evidence.certificate.outputs import (
    Asked,
    Reference,
    Speculated,
    check_outputs,
    compared_greedy,
)
from specdec_core.models.fingerprints import served_fingerprints
from specdec_core.prompts.prompt_sets import Prompt, PromptSet
from specdec_core.tokens import verification
from tests.configurations import FOUR, LOSSY, drafting
from tests.specdec_core.kinds import configured

TEXTS = ("def main(", "class A:", "import os", "x = 1", "return tokenizer.")
EXTENT = Extent(max_new_tokens=32, texts=8, timed=1, repeats=1)


def checks_of(pair, configuration, extent=EXTENT):
    prompts = [Prompt(text, text) for text in TEXTS]
    return check_all(pair, configuration, prompts, extent, Observer())


@pytest.fixture(scope="module")
def certificate(tiny_pair):
    prompts = PromptSet(source="here", count=len(TEXTS), digest="d")
    checks = checks_of(tiny_pair, FOUR)
    # How fast it is on a busy machine is not what is tested.
    checks = checks.model_copy(update={"speed": checks.speed.model_copy(update={"high": 2.0})})
    return Certificate(
        pair=tiny_pair.spec,
        fingerprints=tiny_pair.fingerprints,
        configuration=FOUR,
        prompts=prompts,
        max_new_tokens=EXTENT.max_new_tokens,
        checks=checks,
        issued=datetime.now(UTC),
        environment={},
    )


def test_a_lossless_configuration_passes(certificate):
    checks = certificate.checks
    assert checks.greedy.passed
    assert checks.greedy.tokens > 100
    assert checks.sampled.passed
    assert {favour.kind for favour in checks.sampled.favours} > {"preferred by the draft draft"}
    assert checks.speed.ratio > 0


def sampled(pair, configuration, texts):
    prompts = [tuple(pair.tokenizer(text)["input_ids"]) for text in TEXTS]
    requests = [
        Request(str(n), prompts[n % len(prompts)], 24, seed=n, ignore_eos=True)
        for n in range(texts)
    ]
    asked, told = Asked([], requests), Observer()
    found = speculated(pair, configuration, asked, 8, told)
    return check_outputs(found, Reference([], None), asked, pair, "float32", 8, told).sampled


WARPED = {
    "rejection": Sampling(temperature=0.8, top_k=40, top_p=0.95),
    "gumbel": Sampling(temperature=0.8, top_k=40, top_p=0.95, coupling="gumbel"),
    "penalties": Sampling(temperature=1.0, frequency_penalty=1.0, min_p=0.01),
}


@pytest.mark.parametrize("sampling", WARPED.values(), ids=WARPED)
def test_warped_samples_of_a_lossless_configuration_pass(tiny_pair, sampling):
    configuration = FOUR.model_copy(update={"sampling": sampling})
    found = sampled(tiny_pair, configuration, 40)
    assert found.passed, found


def test_a_wrong_residual_is_found(tiny_pair, monkeypatch):
    monkeypatch.setattr(verification, "residual", lambda p, token, q: p)
    found = sampled(tiny_pair, FOUR, 100)
    assert not found.passed
    preferred = next(f for f in found.favours if f.kind.startswith("preferred"))
    assert preferred.shift > preferred.detectable


def test_tokens_that_top_k_leaves_out_are_found(tiny_pair, monkeypatch):
    """An engine that warps a draft's distribution, but not the target's."""

    def all_kept(logits, samplings):
        return logits.float().softmax(dim=-1)

    monkeypatch.setattr("specdec_core.engine.judging.distributions", all_kept)
    configuration = FOUR.model_copy(update={"sampling": Sampling(temperature=1.0, top_k=5)})
    found = sampled(tiny_pair, configuration, 20)
    assert found.impossible > 0
    assert not found.passed


def test_in_a_server_it_is_found_again_without_the_weights_of_the_target(certificate, bare_home):
    pair = certificate.pair.model_copy(update={"target": "elsewhere/model"})
    changes = {
        "pair": pair,
        "fingerprints": served_fingerprints(pair, pair.target),
        "server": CertifiedServer(name="vllm", version="1", settings={}, reference="itself"),
    }
    inside = certificate.model_copy(update=changes)
    inside.save()
    assert find_certificate(pair, FOUR, "vllm") == inside


def test_it_is_found_again_for_these_weights_alone(certificate, bare_home):
    pair, configuration = certificate.pair, certificate.configuration
    assert find_certificate(pair, configuration) is None
    certificate.save()
    assert find_certificate(pair, configuration) == certificate
    assert find_certificate(pair, LOSSY) is None
    moved = shutil.copytree(pair.target, bare_home / Path(pair.target).name)
    assert find_certificate(pair.model_copy(update={"target": str(moved)}), configuration)
    others = {**certificate.fingerprints, "target": "0" * 16}
    certificate.model_copy(update={"fingerprints": others}).save()
    assert find_certificate(pair, configuration) is None
    certificate_path(pair, configuration).write_text("{}")
    with pytest.raises(UserError, match="not a certificate"):
        find_certificate(pair, configuration)


def test_where_no_candidate_is_verified_nothing_is_certified(tiny_pair):
    """A first token comes with the prompt's prefill."""
    extent = Extent(max_new_tokens=1, texts=1, timed=1, repeats=1)
    with pytest.raises(UserError, match="no candidate was verified, so nothing was checked"):
        checks_of(tiny_pair, FOUR, extent)


def test_without_a_token_to_compare_no_distribution_is_shown():
    at = Sampling(temperature=1.0)
    drawn = SampledDistribution(sampling=at, texts=2, tokens=0, level=1e-3, favours=())
    assert not drawn.passed


def drafting_from(requests):
    """A schedule that drafts from this number of requests on."""
    return drafting("schedule", ranges={1: None, requests: 4})


def test_the_last_range_of_a_schedule_is_checked(tiny_pair):
    extent = Extent(max_new_tokens=16, texts=1, timed=1, repeats=1)
    checks = checks_of(tiny_pair, drafting_from(len(TEXTS)), extent)
    assert checks.greedy.slots == len(TEXTS) > extent.slots
    assert checks.greedy.passed
    assert checks.sampled.passed
    with pytest.raises(UserError, match="begins with 6 requests, but there are 5 prompts: give 6"):
        checks_of(tiny_pair, drafting_from(len(TEXTS) + 1), extent)


def test_a_schedule_below_another_drafter_is_checked_to_its_last_range(tiny_pair):
    inner = {"kind": "schedule", "ranges": {1: 2, len(TEXTS): 4}}
    below = configured({"kind": "hybrid", "lookup": {"kind": "suffix"}, "otherwise": inner})
    assert EXTENT.at_a_time(below, TEXTS) == len(TEXTS) > EXTENT.slots


def test_none_can_be_made_of_checks_that_failed(certificate):
    greedy = certificate.checks.greedy.model_copy(update={"differing": 1})
    content = certificate.model_dump()
    content["checks"]["greedy"] = greedy.model_dump()
    with pytest.raises(ValidationError, match="failed: greedy identity"):
        Certificate.model_validate(content)


@pytest.mark.parametrize("expected", [0.01, 0.3, 0.995])
def test_counts_of_rare_sets_raise_no_more_false_alarms_than_stated(expected):
    tokens, level = 186, 1e-3
    law = binom(tokens, expected)
    found = {count: _p_value(count, [expected] * tokens) for count in range(tokens + 1)}
    for count in (0, round(tokens * expected), tokens):
        likelier = 2 * min(law.cdf(count), law.sf(count - 1))
        assert found[count] == pytest.approx(min(1, likelier), abs=1e-12)
    assert sum(law.pmf(count) for count, p_value in found.items() if p_value < level) <= level
    assert _p_value(tokens if expected < 0.5 else 0, [expected] * tokens) < 1e-12


@pytest.mark.parametrize(("dtype", "ties"), [("float32", 0), ("bfloat16", 2)])
def test_margins_are_asked_for_as_far_as_they_tell_something(dtype, ties):
    """That of a running server costs a request."""
    asked = []

    def margin(tokens, preferred, other):
        asked.append((tokens, preferred, other))
        return 0.01

    requests = [Request(name, (1, 2), 3) for name in "ab"]
    found = Speculated([[3, 4, 5], [6, 7]], [])
    reference = Reference([[3, 9, 5], [8, 7]], margin)
    greedy = compared_greedy(found, reference, Asked(requests, []), dtype, 1)
    assert (greedy.differing, greedy.ties) == (2, ties)
    assert "prompt a, token 1: 4 in place of 9, whose logit is 0.01 higher" in greedy.first
    assert asked == [([1, 2, 3], 9, 4), ([1, 2], 8, 6)][: 1 if dtype == "float32" else 2]
