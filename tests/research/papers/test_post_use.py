"""Post-use's tables are computed from recordings, for every set and draft."""

from dataclasses import replace

import numpy as np
import pandas as pd
import pytest
import torch

from research.papers.draft_reuse import best_lengths, recycled
from research.papers.mcsd import values
from research.papers.post_use import by_confidence, confidences, phrases, prefixes, rounds
from research.papers.sections.post_use import POST_USE
from research.papers.studies import TIMES
from specdec_core.base.errors import UserError
from specdec_core.recordings.replay import Replay
from tests.research.papers.exhibits import drawn
from tests.specdec_core.cost.examples import constant_profile
from tests.specdec_core.recordings.test_record import record

PROMPTS = 4
PROFILE = constant_profile(0.9, 0.3)


@pytest.fixture(scope="module")
def greedy(tiny_pair, tmp_path_factory):
    folder = tmp_path_factory.mktemp("recording")
    return {"texts": record(tiny_pair, folder, prompts=PROMPTS, max_draft=12)}


def test_tables_are_those_of_each_set_and_draft(greedy):
    replay = Replay(greedy["texts"])
    found, expected = rounds(greedy, PROFILE), best_lengths(replay, 3.0)
    assert list(found["length"]) == list(expected.rounds["length"])
    assert set(found["fixed"]) == {expected.fixed}
    assert set(zip(found["prompts"], found["draft"], strict=True)) == {("texts", "draft")}
    drafted = prefixes(replay.track())
    assert confidences(greedy)["count"].sum() == len(drafted)
    accepted = (confidences(greedy)["acceptance"] * confidences(greedy)["count"]).sum()
    assert accepted == pytest.approx(drafted["accepted"].sum())
    assert list(phrases(greedy)["share"]) == list(recycled(replay)["share"])


def test_each_section_has_the_papers_finding_and_ours(greedy):
    found = drawn(POST_USE, {"greedy": greedy, TIMES: PROFILE})["post-use-f2a"]
    other = found["length"] != found["fixed"]
    said = POST_USE[0].section(found).terms["Verdict"]
    assert f"{other.mean():.0%} of the rounds have another best length" in said


def test_a_pair_of_heads_alone_has_no_such_tables(greedy):
    header = greedy["texts"].header.model_copy(update={"eagle_heads": ("draft",)})
    headed = {"texts": replace(greedy["texts"], header=header)}
    for table in (phrases, confidences, values):
        with pytest.raises(UserError, match="the pair has no draft model"):
            table(headed)


def test_prefixes_are_what_the_draft_model_writes(tiny_pair, greedy):
    replay, longest = Replay(greedy["texts"]), 4
    track, prompts = replay.track(), replay.recording.prompts
    table = prefixes(track, longest)
    expected = []
    for prompt, position, bound in zip(track.prompt, track.position, track.bound, strict=True):
        output = prompts.outputs[prompt].tolist()
        sequence = prompts.tokens[prompt].tolist() + output[:position]
        product, written = 1.0, []
        for length in range(1, min(longest, bound) + 1):
            with torch.inference_mode():
                logits = tiny_pair.drafts["draft"](torch.tensor([sequence + written])).logits[0, -1]
            q = logits.float().softmax(-1)
            written.append(int(q.argmax()))
            product *= float(q.max())
            accepted = written == output[position : position + length]
            expected.append((length, product, accepted))
    rows = list(table.itertuples(index=False, name=None))
    assert [(r[0], r[2]) for r in rows] == [(e[0], e[2]) for e in expected]
    assert np.allclose([r[1] for r in rows], [e[1] for e in expected], rtol=1e-4)


def test_bins_of_confidence_hold_every_prefix_once():
    rng = np.random.default_rng(0)
    product = np.append(rng.uniform(0, 1, 4000), [0.0, 1.0])
    accepted = rng.uniform(0, 1, len(product)) < product
    table = by_confidence(pd.DataFrame({"product": product, "accepted": accepted}), 10)
    assert table["count"].sum() == len(product)
    assert np.allclose(table["high"] - table["low"], 0.1)
    assert ((table["low"] <= table["product"]) & (table["product"] <= table["high"])).all()
    # accepted with the probability of the product: the curve is the diagonal
    assert np.allclose(table["acceptance"], table["product"], atol=0.08)
