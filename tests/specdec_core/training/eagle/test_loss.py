"""The loss, its gradients, and acceptance, against their definitions."""

from __future__ import annotations

import torch

from specdec_core.training.eagle.acceptance import expected_length
from specdec_core.training.recorded.loss import cross_entropy, probabilities


def test_probabilities_are_the_targets_of_all_its_tokens() -> None:
    torch.manual_seed(0)
    last, output = torch.randn(150, 8), torch.randn(30, 8)
    chosen = torch.tensor([2, 3, 5, 29])
    whole = (last @ output.T).softmax(-1)
    found = probabilities(last, (last @ output.T).logsumexp(-1), output[chosen])
    torch.testing.assert_close(found, whole[:, chosen])


def test_the_loss_and_its_gradients_are_those_of_cross_entropy() -> None:
    torch.manual_seed(0)
    target = torch.randn(50, 12).softmax(-1)[:, :9]  # three tokens cannot be proposed
    places = torch.randint(50, (140,))
    given = torch.randn(140, 8), torch.randn(9, 8)
    results = []
    for plain in (True, False):
        states, weight = (value.clone().requires_grad_() for value in given)
        if plain:
            loss = -(target[places] * (states @ weight.T).log_softmax(-1)).sum()
        else:
            loss = cross_entropy(states, weight, target, places)
        (loss / 140).backward()
        results.append((loss.detach(), states.grad, weight.grad))
    for expected, found in zip(*results, strict=True):
        torch.testing.assert_close(found, expected)


def test_expected_length_counts_what_survives() -> None:
    assert expected_length([0.5, 0.5, 1.0]) == 0.5 + 0.25 + 0.25
    assert expected_length([]) == 0
