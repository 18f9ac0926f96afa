from functools import partial

from research.bundled_pair.alignment import greedy_trajectories, measure_alignment
from tests.conftest import generated, tiny_llama

tiny = partial(tiny_llama, hidden=16, layers=1, vocab=40)


def test_ragged_trajectories_are_what_each_prompt_gives_alone():
    model = tiny(1)
    prompts = [[5, 6, 7, 11, 12, 30], [9, 3], [4, 8, 2, 1]]
    together = greedy_trajectories(model, prompts, 10)
    for prompt, trajectory in zip(prompts, together, strict=True):
        assert trajectory.tokens.tolist() == [*prompt, *generated(model, prompt, 10)]
        assert trajectory.prompt_length == len(prompt)


def test_oracle_rate_counts_disagreements_and_one_a_prompt():
    target, draft = tiny(2), tiny(3)
    trajectories = greedy_trajectories(target, [[5, 6, 7], [9, 3, 4, 8]], 16)
    disagreements = positions = 0
    for trajectory in trajectories:
        choices = draft(trajectory.tokens[None]).logits[0].argmax(-1).detach()
        first = trajectory.prompt_length
        disagreements += int((choices[first - 1 : -1] != trajectory.tokens[first:]).sum())
        positions += trajectory.generated
    found = measure_alignment(target, draft, trajectories)
    assert (found.disagreements, found.positions) == (disagreements, positions)
    assert found.oracle_verification_rate == (disagreements + 2) / positions
