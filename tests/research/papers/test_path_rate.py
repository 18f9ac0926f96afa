"""α of improved MCSD is the accepted path over the maximum depth."""

import pytest

from research.papers.result import path_rate
from specdec_core.tokens.statistics import TokenOrigin
from tests.specdec_core.tokens.test_statistics import B, C, D, generation, round_of


def decoded(drafted=None, first_generates=1):
    """:func:`generation` after a first round, which has no candidates."""
    whole = generation("a")
    for r in whole.rounds:
        r.position += first_generates
        r.drafted = drafted or r.drafted
    whole.rounds.insert(0, round_of(0, 0, 0, first_generates))
    if first_generates:
        whole.tokens.insert(0, 9)
        whole.origins.insert(0, B)
    return whole


def test_it_is_the_accepted_path_over_the_maximum_depth():
    # 6 of the 9 tokens were drafted, in the three rounds that could have drafted 4 each
    assert path_rate([decoded()], depth=4) == pytest.approx(6 / 12)
    assert path_rate([decoded(), decoded()], depth=6) == pytest.approx(12 / 36)
    assert path_rate([decoded(drafted=40)], depth=4) == pytest.approx(6 / 12)  # a wide tree
    assert path_rate([decoded(first_generates=0)], depth=4) == pytest.approx(6 / 12)
    assert path_rate([], depth=4) == path_rate([decoded()], depth=0) == 0


def test_the_end_of_a_request_leaves_less_room():
    cut = decoded()
    cut.finish_reason = "length"
    # 7, 3 and 1 tokens could still be drafted
    assert path_rate([cut], depth=4) == pytest.approx(6 / (4 + 3 + 1))


def test_tokens_that_the_target_began_with_count_on_neither_side():
    begun = decoded(first_generates=0)
    begun.origins = [TokenOrigin.TARGET, D, D, B, TokenOrigin.TARGET, C, TokenOrigin.TARGET, D]
    assert path_rate([begun], depth=4) == pytest.approx(3 / 12)
