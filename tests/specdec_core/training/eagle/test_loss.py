"""The loss, its gradients, and acceptance, against their definitions."""

import pytest
import torch

from specdec_core.training.eagle.acceptance import expected_length, rounds
from specdec_core.training.recorded.loss import draft_loss, probabilities


def test_probabilities_are_the_targets_of_all_its_tokens():
    torch.manual_seed(0)
    last, output = torch.randn(150, 8), torch.randn(30, 8)
    chosen = torch.tensor([2, 3, 5, 29])
    whole = (last @ output.T).softmax(-1)
    found = probabilities(last, (last @ output.T).logsumexp(-1), output[chosen])
    torch.testing.assert_close(found, whole[:, chosen])


def cross_entropy(p, q):
    return -(p * q.log()).sum()


def acceptance(p, q):
    return -(p.sum(-1) * torch.minimum(p, q).sum(-1).log()).sum()


@pytest.mark.parametrize("defined", [cross_entropy, acceptance])
def test_a_loss_and_its_gradients_are_those_of_its_definition(defined):
    torch.manual_seed(0)
    target = torch.randn(50, 12).softmax(-1)[:, :9]  # three tokens cannot be proposed
    places = torch.randint(50, (140,))
    given = torch.randn(140, 8), torch.randn(9, 8)
    results = []
    for plain in (True, False):
        states, weight = (value.clone().requires_grad_() for value in given)
        if plain:
            loss = defined(target[places], (states @ weight.T).softmax(-1))
        else:
            loss = draft_loss(defined.__name__, states, weight, target, places)
        (loss / 140).backward()
        results.append((loss.detach(), states.grad, weight.grad))
    for expected, found in zip(*results, strict=True):
        torch.testing.assert_close(found, expected)


@pytest.mark.parametrize("kind", ["cross_entropy", "acceptance"])
def test_a_position_without_a_token_that_can_be_proposed_has_no_loss(kind):
    states = torch.randn(2, 4, requires_grad=True)
    loss = draft_loss(kind, states, torch.randn(3, 4), torch.zeros(2, 3), torch.tensor([0, 1]))
    loss.backward()
    assert loss == 0
    assert not states.grad.any()


def test_expected_length_counts_what_survives():
    assert expected_length([0.5, 0.5, 1.0]) == 0.5 + 0.25 + 0.25
    assert expected_length([]) == 0


def test_rounds_are_those_of_decoding_the_texts():
    """Against drawing what is accepted, round by round; of a greedy text in one way only."""
    torch.manual_seed(0)
    follows = torch.rand(3, 9, 2)
    follows[1] = (follows[1] < 0.5).float()
    lengths = torch.tensor([9, 8, 0])
    for text, length in enumerate(lengths):
        for start in range(9):
            follows[text, start, max(int(length) - start, 0) :] = 0
    found = rounds(follows.cumprod(2), lengths)

    def decode(text):
        count = place = 0
        while place < lengths[text]:
            draws = (torch.rand(2) < follows[text, place]).long().cumprod(0)
            place, count = place + int(draws.sum()) + 1, count + 1
        return count

    assert found[1] == decode(1)
    assert found[2] == 0
    drawn = torch.tensor([float(decode(0)) for _ in range(4000)])
    assert abs(found[0] - drawn.mean()) < 4 * drawn.std() / 4000**0.5


def test_a_round_yields_less_than_a_chain_from_any_token():
    """Chains from any token count a long easy stretch by its tokens; rounds count it by rounds."""
    easy = torch.ones(1, 60, 5)
    for start in range(60):
        easy[0, start, 60 - start :] = 0
    survival = torch.cat([torch.zeros(1, 60, 5), easy], 1)
    from_any = float(1 + survival.sum(2).mean())
    assert 120 / float(rounds(survival, torch.tensor([120]))) < 0.6 * from_any
