"""Every message between target and draft is decoded unchanged, and a pickle is refused."""

import pickle

import pytest
import torch

from specdec_core.config import Sampling
from specdec_core.drafting.draft_model.settings import DraftModelSettings
from specdec_core.drafting.pearl import messages
from specdec_core.drafting.pearl.messages import (
    Begin,
    Commit,
    Configure,
    Configured,
    Distribution,
    Drafted,
    End,
    Message,
    Pause,
    RequestDistribution,
    decode,
    encode,
)
from specdec_core.tokens.grammar import Grammar
from specdec_core.tokens.text_warper import TextRules

# What is compiled for a model stays where it is.
GRAMMAR = Grammar("regex", "a+", program=object())
RULES = TextRules(Sampling(logit_bias={3: -1.0}), 4, 1, frozenset({2}), GRAMMAR)
SPARSE, DENSE = torch.tensor([0.0] * 90 + [0.5]), torch.rand(100)
MESSAGES: list[Message] = [
    Configure(DraftModelSettings(), 4, 8, 2, 0.1, 320, frozenset({1, 2})),
    Configured(1024),
    Configured(0, "ein Entwurf für später"),
    Begin(1, 2, [3, 4], 9, Sampling(temperature=0.7, top_k=3), 2**70, RULES),
    Commit(1, [2, 3], 3, 2, [1, 2]),
    End(1, []),
    RequestDistribution(1, 2),
    Drafted(1, [(1, 0, 5, True, None), (2, 1, 5, False, 0.3)], 1, 2, 0.1, 0.2),
    Pause(1, 2),
    Distribution.of(0, 1, SPARSE),
    Distribution.of(0, 1, DENSE),
]


def test_messages_come_back_as_they_were():
    assert {type(message) for message in MESSAGES} == set(messages._KINDS)
    for message in MESSAGES:
        found = decode(encode(message))
        assert (type(found), found) == (type(message), message)
    for dense, message in zip((SPARSE, DENSE), MESSAGES[-2:], strict=True):
        found = decode(encode(message))
        assert torch.equal(found.tensor(), dense)


@pytest.mark.parametrize("kind", range(len(messages._KINDS)))
def test_a_pickle_is_no_message(kind):
    with pytest.raises(ValueError, match="Invalid JSON"):
        decode(bytes([kind]) + pickle.dumps(print))
