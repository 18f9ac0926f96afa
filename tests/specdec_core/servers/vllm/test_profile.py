"""A profile of vLLM says what its steps took."""

from threading import Event

import pytest

from specdec_core.base.errors import UserError
from specdec_core.config import Configuration
from specdec_core.drafting.draft_model.settings import DraftModelSettings
from specdec_core.drafting.policies.fixed import FixedSettings
from specdec_core.drafting.prompt_lookup import PromptLookupSettings
from specdec_core.servers.step_profile import LENGTHS, NGRAM, PLAIN, assembled, shapes
from specdec_core.servers.table import SERVERS
from specdec_core.servers.vllm import profile as vllm_profile
from specdec_core.servers.vllm.process import VllmPeer
from specdec_core.servers.vllm.profile import FEW_WIDTHS
from tests.observers import Heard

OVERHEAD, LOOKUP, BEGUN, EACH, DRAFT_READS = 2e-3, 4e-4, 1e-3, 5e-4, 2e-5
WIDTHS = (1, 2, 3, 5, 8)
SHAPES = [(rows, context) for context, rows in shapes((64, 256, 512), (1, 4, 8), (1, 8))]


def step(rows, context, width):
    """Seconds of a step of the target in this made-up engine."""
    return OVERHEAD + 4e-3 + 2e-4 * rows * width + 1e-6 * rows * context


def reading(tokens):
    """Seconds of the step that reads a prompt."""
    return OVERHEAD + 4e-3 + 1e-4 * tokens


def test_times_of_steps_are_split_and_put_together_again(tiny_pair):
    widths = {context: WIDTHS if context == 256 else FEW_WIDTHS for _, context in SHAPES}
    assert (len(SHAPES), SHAPES[0]) == (7, (1, 256))
    steps = {
        PLAIN: {(r, c, 0): step(r, c, 1) for r, c in SHAPES},
        NGRAM: {(r, c, w - 1): step(r, c, w) + LOOKUP for r, c in SHAPES for w in widths[c]},
        "draft": {
            (r, c, k): step(r, c, 1 + k) + BEGUN + EACH * k for r, c in SHAPES for k in LENGTHS
        },
    }
    prompts = {
        PLAIN: {tokens: reading(tokens) for tokens in (32, 128)},
        "draft": {t: reading(t) + DRAFT_READS * t + BEGUN + EACH for t in (32, 128)},
    }
    profile = assembled(tiny_pair, steps, prompts, OVERHEAD, "vllm 0.32.0")
    assert profile.device == "cpu, vllm 0.32.0"
    assert profile.whole_chains
    drafting = profile.prefill_seconds([64], ["draft"]) - profile.prefill_seconds([64])
    assert drafting == pytest.approx(64 * DRAFT_READS, rel=1e-3)
    first = profile.t_target() + OVERHEAD
    assert profile.prefill_seconds([64]) + first == pytest.approx(reading(64), rel=1e-3)
    chain = DraftModelSettings(draft="draft", policy=FixedSettings(max_tokens=4))
    for drafter, seconds in (
        (chain, step(1, 256, 5) + BEGUN + 4 * EACH),
        (PromptLookupSettings(), step(1, 256, 5) + LOOKUP),
    ):
        under = profile.under(Configuration(drafter=drafter))
        forwards = 4 if drafter is chain else 0
        assert under.round_seconds(4, forwards, forwards, "draft", 256) == pytest.approx(seconds)
    assert profile.autoregressive_seconds(10, 64) == pytest.approx(10 * step(1, 64, 1))
    # Four rows were measured at one context, between one row and eight.
    four = profile.target.seconds(3, 512, 4) + OVERHEAD
    assert four == pytest.approx(step(4, 512, 3), rel=1e-3)


def test_contexts_that_do_not_fit_are_refused_before_vllm_starts(tiny_pair):
    with pytest.raises(UserError, match="more than the"):
        SERVERS["vllm"].profile(tiny_pair, contexts=(tiny_pair.max_length,))


def test_a_draft_with_which_vllm_does_not_start_is_left_out(tiny_pair, monkeypatch):
    def start(peer):
        if "draft" in peer.name:
            raise UserError(f"{peer.name}: no such architecture")

    def call(peer, method, **asked):
        if method == "prefill":
            return reading(asked["tokens"])
        times = [step(asked["rows"], asked["context"], 1 + n) for n in asked["lengths"]]
        return [{"step": seconds, "forward": seconds - OVERHEAD} for seconds in times]

    monkeypatch.setattr(VllmPeer, "open", start)
    monkeypatch.setattr(VllmPeer, "call", call)
    heard = Heard()
    profile = SERVERS["vllm"].profile(tiny_pair, observer=heard)
    assert (profile.drafts, NGRAM in profile.proposals) == ({}, True)
    assert heard.warnings == ["no step costs of draft: vLLM draft: no such architecture"]


def test_a_start_that_fails_ends_the_others_at_once(tiny_pair, monkeypatch):
    closed, opened = Event(), []

    def start(peer):
        opened.append(peer)
        if len(opened) == 1:  # it starts for as long as nobody closes it
            assert closed.wait(30)
        raise UserError("no memory")

    monkeypatch.setattr(VllmPeer, "open", start)
    monkeypatch.setattr(VllmPeer, "close", lambda peer: closed.set())
    monkeypatch.setattr(vllm_profile.os, "sched_getaffinity", lambda pid: {0, 1})
    with pytest.raises(UserError, match="no memory"):
        SERVERS["vllm"].profile(tiny_pair)
    assert closed.is_set()
