"""Along a long text, every round is put down where its text stood."""

from dataclasses import replace

import pandas as pd
import pytest

from research.long_form.study import LEAST, measure_long_form, ranges_for
from research.papers.sections.svip import long_texts
from specdec_core.base.errors import UserError
from specdec_core.config import Configuration
from specdec_core.drafting.draft_model.settings import DraftModelSettings
from specdec_core.drafting.policies.fixed import FixedSettings

EDGES = (16, 32, 64)
PROMPTS = [tuple(range(5, 12)), tuple(range(20, 30))]


@pytest.fixture(scope="module")
def long_form(tiny_pair):
    chain = Configuration(drafter=DraftModelSettings(policy=FixedSettings(max_tokens=3)))
    return measure_long_form(tiny_pair, [chain], PROMPTS, EDGES, repeats=2)


def test_every_configuration_writes_the_same_texts_to_their_end(long_form):
    rounds = long_form.rounds
    written = rounds.groupby(["configuration", "repeat", "text"])["generated"].sum()
    # A text's first token is read with its prompt.
    expected = {number: EDGES[-1] - len(prompt) - 1 for number, prompt in enumerate(PROMPTS)}
    assert len(written) == 2 * 2 * len(PROMPTS)
    assert all(count == expected[text] for (_, _, text), count in written.items())
    assert (rounds["context"] >= [len(PROMPTS[text]) + 1 for text in rounds["text"]]).all()


def test_a_range_has_the_rounds_that_begin_in_it(long_form):
    table = long_form.table().set_index(["configuration", "up_to"])
    base, chain = long_form.labels
    tokens = table.loc[base, "tokens"]
    # Autoregressively a token is a round, so ranges are cut exactly: 2 repeats of both texts.
    assert list(tokens) == [2 * (16 - 8 + 16 - 11), 2 * 2 * 16, 2 * 2 * 32]
    assert (table.loc[base, ["mat", "so_far"]] == 1).all(axis=None)
    assert (table.loc[chain, "mat"] > 1).all()
    assert (table.loc[chain, "mat"] <= 4).all()
    # The last range's speed from the beginning is that of whole texts.
    rounds = long_form.rounds
    seconds = rounds[["draft_seconds", "target_seconds", "other_seconds"]].sum(axis=1)
    sums = (
        rounds.assign(seconds=seconds)
        .groupby(["configuration", "repeat", "text"])[["seconds", "generated"]]
        .sum()
    )
    pace = (sums["seconds"] / sums["generated"]).unstack("repeat").median(axis=1).unstack("text")
    whole = pace.loc[base].sum() / pace.loc[chain].sum()
    assert table.loc[(chain, 64), "so_far"] == pytest.approx(whole)


@pytest.mark.parametrize("texts", [len(PROMPTS), LEAST])
def test_an_interval_needs_enough_texts(long_form, texts):
    two, numbers = long_form.rounds, range(0, texts, len(PROMPTS))
    rounds = pd.concat([two.assign(text=two["text"] + number) for number in numbers])
    table = replace(long_form, rounds=rounds).table()
    assert (table[["so_far_low", "so_far_high"]].notna() == (texts >= LEAST)).all(axis=None)
    assert ("too few texts for intervals" in long_texts(table).svg) == (texts < LEAST)


def test_ranges_end_with_what_the_pair_holds():
    assert ranges_for(2000, [(1,) * 130, (1,)]) == (256, 512, 1024, 2000)
    assert ranges_for(512, [(1,)]) == (128, 256, 512)


@pytest.mark.parametrize(
    ("edges", "message"), [((8, 64), "a prompt has 10 tokens"), ((64, 10**6), "is more than the")]
)
def test_ranges_that_cannot_be(tiny_pair, edges, message):
    with pytest.raises(UserError, match=message):
        measure_long_form(tiny_pair, [], PROMPTS, edges)
