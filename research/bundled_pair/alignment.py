"""How well a draft model follows its target on the target's own greedy trajectories.

Everything here is teacher-forced: one forward of each model over a trajectory gives, for each of
its N generated positions, whether the draft's best token is the target's, how confident the draft
was, and the distance of the two distributions. No speculative round is run.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F

from specdec_core.training.heads.metrics import auc


@dataclass(frozen=True)
class Trajectory:
    """A prompt and the target's output after it: token ids [prompt_length + N]."""

    tokens: torch.Tensor
    prompt_length: int

    @property
    def generated(self) -> int:
        return len(self.tokens) - self.prompt_length


@dataclass(frozen=True)
class Alignment:
    """A draft against a target over the N generated positions of some trajectories.

    `oracle_verification_rate` is SpecDec++'s (Thm 4.1): a draft that always stops just before its
    next rejection needs one target forward a disagreement, and one to end each trajectory, so
    (disagreements + trajectories) / N. The two AUCs say how well the draft's confidence (its top
    probability; low) and its entropy (high) separate disagreements from agreements: 0.5 is chance;
    NaN where either class is empty. Entropy and KL(target || draft) are in nats.
    """

    trajectories: int
    positions: int
    disagreements: int
    agreement: float
    oracle_verification_rate: float
    confidence_auc: float
    entropy_auc: float
    mean_confidence: float
    mean_entropy: float
    kl: float


@torch.no_grad()
def greedy_trajectories(
    target: Any, prompts: Sequence[Sequence[int]], new_tokens: int, *, rows: int = 32
) -> list[Trajectory]:
    """The target's greedy output after each prompt, to its end token or `new_tokens`.

    Prompts of like length are run together, padded on the left.
    """
    end = target.config.eos_token_id
    order = sorted(range(len(prompts)), key=lambda index: len(prompts[index]))
    trajectories: dict[int, Trajectory] = {}
    for start in range(0, len(order), rows):
        chosen = order[start : start + rows]
        longest = max(len(prompts[index]) for index in chosen)
        ids = torch.zeros(len(chosen), longest, dtype=torch.long)
        mask = torch.zeros_like(ids)
        for row, index in enumerate(chosen):
            ids[row, longest - len(prompts[index]) :] = torch.tensor(prompts[index])
            mask[row, longest - len(prompts[index]) :] = 1
        written = target.generate(
            input_ids=ids,
            attention_mask=mask,
            max_new_tokens=new_tokens,
            do_sample=False,
            pad_token_id=0 if end is None else end,
        )
        for row, index in enumerate(chosen):
            tail = written[row, longest:]
            ends = (tail == end).nonzero() if end is not None else tail.new_empty(0)
            if len(ends):
                tail = tail[: int(ends[0]) + 1]
            prompt = ids[row, longest - len(prompts[index]) :]
            trajectories[index] = Trajectory(torch.cat([prompt, tail]), len(prompt))
    return [trajectories[index] for index in range(len(prompts))]


@torch.no_grad()
def measure_alignment(target: Any, draft: Any, trajectories: Sequence[Trajectory]) -> Alignment:
    """Teacher-force both models over each trajectory and compare them at every generated position.

    `target` and `draft` are transformers causal LMs over one vocabulary. Raises `ValueError` when
    there is no generated position to compare at.
    """
    agreed, confidence, entropy, divergence = [], [], [], []
    for trajectory in trajectories:
        if not trajectory.generated:
            continue
        ids = trajectory.tokens[None, :-1]
        first = trajectory.prompt_length - 1
        q = F.log_softmax(draft(ids, use_cache=False).logits[0, first:].float(), dim=-1)
        p = F.log_softmax(target(ids, use_cache=False).logits[0, first:].float(), dim=-1)
        best, token = q.max(dim=-1)
        agreed.append(token == trajectory.tokens[trajectory.prompt_length :])
        confidence.append(best.exp())
        entropy.append(-(q.exp() * q).sum(-1))
        divergence.append((p.exp() * (p - q)).sum(-1))
    if not agreed:
        raise ValueError("no trajectory has a generated token to compare at")
    rejected = ~torch.cat(agreed)
    disagreements, positions = int(rejected.sum()), rejected.numel()
    return Alignment(
        trajectories=len(agreed),
        positions=positions,
        disagreements=disagreements,
        agreement=1 - disagreements / positions,
        oracle_verification_rate=(disagreements + len(agreed)) / positions,
        confidence_auc=auc(-torch.cat(confidence).numpy(), rejected.numpy()),
        entropy_auc=auc(torch.cat(entropy).numpy(), rejected.numpy()),
        mean_confidence=torch.cat(confidence).mean().item(),
        mean_entropy=torch.cat(entropy).mean().item(),
        kl=torch.cat(divergence).mean().item(),
    )
