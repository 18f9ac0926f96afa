"""The draft vocabulary."""

import pytest
import torch

from specdec_core.training.recorded.vocabulary import count_tokens, coverage, draft_vocabulary


def test_the_vocabulary_is_the_most_frequent_tokens_and_those_that_end_a_text():
    counts = count_tokens([[5, 5, 5, 3], [3, 5, 8], []], vocab_size=10)
    assert counts.tolist() == [0, 0, 0, 2, 0, 4, 0, 0, 1, 0]
    assert draft_vocabulary(counts, 2).tolist() == [3, 5]
    assert draft_vocabulary(counts, 2, always=[9]).tolist() == [5, 9]
    assert draft_vocabulary(counts, 5).tolist() == [0, 1, 3, 5, 8]  # the lower of equals
    assert coverage(counts, torch.tensor([3, 8])) == pytest.approx(3 / 7)
