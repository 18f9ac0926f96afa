"""Along a long text, every round is put down where its text stood."""

import pandas as pd
import pytest

from research.long_form.parts import LongText, LongTexts
from research.long_form.study import measure_long_form, ranges_for
from specdec_core.base.errors import UserError
from specdec_core.base.observer import Observer
from specdec_core.config import Configuration
from specdec_core.drafting.draft_model.settings import DraftModelSettings
from specdec_core.drafting.policies.fixed import FixedSettings
from specdec_core.drafting.policies.heads import SpecDecPlusPlusSettings
from specdec_core.engine import Request
from tests.conftest import save_random_head

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
    assert (table.loc[base, ["mat", "speedup", "so_far"]] == 1).all(axis=None)
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


class Interrupt(Observer):
    """Stops a run after so many texts."""

    def __init__(self, texts):
        self.left, self.done = texts, 0

    def stage(self, name, steps=None, done=0):
        self.done = max(self.done, done)

    def step(self):
        self.left -= 1
        if not self.left:
            raise KeyboardInterrupt


def test_an_interrupted_run_goes_on_with_the_texts_it_has(tiny_pair, long_form, tmp_path):
    chain = [c for c in long_form.configurations if c.drafter is not None]
    arguments = (tiny_pair, chain, PROMPTS, EDGES, 1.0, 2)
    with pytest.raises(KeyboardInterrupt):
        measure_long_form(*arguments, observer=Interrupt(3), kept=tmp_path)
    seconds = {path: pd.read_parquet(path) for path in tmp_path.iterdir()}
    assert len(seconds) == 3
    observer = Interrupt(-1)
    result = measure_long_form(*arguments, observer=observer, kept=tmp_path)
    assert observer.done == 3
    times = set(result.rounds["target_seconds"])
    assert all(set(frame["target_seconds"]) <= times for frame in seconds.values())
    counts = ["configuration", "text", "repeat", "context", "drafted", "accepted"]
    pd.testing.assert_frame_equal(
        result.rounds[counts].reset_index(drop=True),
        long_form.rounds[counts].reset_index(drop=True),
    )
    assert not list(tmp_path.iterdir())


def test_a_text_of_a_head_that_was_trained_anew_is_not_gone_on_with(tiny_pair, tmp_path):
    policy = SpecDecPlusPlusSettings(head=str(tmp_path / "head"))
    drafting = Configuration(drafter=DraftModelSettings(policy=policy))
    texts, request = LongTexts(tmp_path / "texts", tiny_pair), Request("r", PROMPTS[0], 8)
    text = LongText(pd.DataFrame({"drafted": [1]}), (5,))
    save_random_head(tiny_pair, "specdecpp", tmp_path / "head")
    texts.keep(drafting, request, 0, text)
    assert texts.get(drafting, request, 0) is not None
    save_random_head(tiny_pair, "specdecpp", tmp_path / "head", seed=1)
    assert texts.get(drafting, request, 0) is None


def test_ranges_end_with_what_the_pair_holds():
    assert ranges_for(2000, [(1,) * 130, (1,)]) == (256, 512, 1024, 2000)
    assert ranges_for(512, [(1,)]) == (128, 256, 512)


@pytest.mark.parametrize(
    ("edges", "message"), [((8, 64), "a prompt has 10 tokens"), ((64, 10**6), "is more than the")]
)
def test_ranges_that_cannot_be(tiny_pair, edges, message):
    with pytest.raises(UserError, match=message):
        measure_long_form(tiny_pair, [], PROMPTS, edges)
