from __future__ import annotations

import pytest

from research.papers.result import path_rate
from specdec_core.tokens.statistics import Generation, TokenOrigin
from tests.specdec_core.tokens.test_statistics import B, C, D, generation, round_of


def decoded(request_id: str = "a") -> Generation:
    """:func:`generation` after a first round, which has no candidates."""
    whole = generation(request_id)
    for r in whole.rounds:
        r.position += 1
    whole.rounds.insert(0, round_of(0, 0, 0, 1))
    whole.tokens.insert(0, 9)
    whole.origins.insert(0, B)
    return whole


class TestPathRate:
    def test_it_is_the_accepted_path_over_the_maximum_depth(self):
        # 6 of the 9 tokens were drafted, in the three rounds that could have drafted 4 each
        assert path_rate([decoded()], depth=4) == pytest.approx(6 / 12)
        assert path_rate([decoded("a"), decoded("b")], depth=6) == pytest.approx(12 / 36)

    def test_a_tree_of_many_nodes_is_as_deep_as_a_chain(self):
        wide = decoded()
        for r in wide.rounds[1:]:
            r.drafted = 40
        assert path_rate([wide], depth=4) == path_rate([decoded()], depth=4)

    def test_the_end_of_a_request_leaves_less_room(self):
        cut = decoded()
        cut.finish_reason = "length"
        # 7, 3 and 1 tokens could still be drafted
        assert path_rate([cut], depth=4) == pytest.approx(6 / (4 + 3 + 1))

    def test_tokens_that_the_target_began_with_count_on_neither_side(self):
        begun = generation()
        begun.rounds.insert(0, round_of(0, 0, 0, 0))
        begun.origins = [TokenOrigin.TARGET, D, D, B, TokenOrigin.TARGET, C, TokenOrigin.TARGET, D]
        assert path_rate([begun], depth=4) == pytest.approx(3 / 12)

    def test_a_round_that_only_begins_the_first_tree_does_not_count(self):
        begun = generation()
        begun.rounds.insert(0, round_of(0, 0, 0, 0))
        assert path_rate([begun], depth=4) == path_rate([decoded()], depth=4)

    def test_nothing_drafted_is_zero(self):
        assert path_rate([], depth=4) == path_rate([decoded()], depth=0) == 0
