"""Plug-in for vLLM: any drafter of chains as its `custom_class` proposer.

    --speculative-config '{"method": "custom_class", "num_speculative_tokens": 8,
                           "model": "specdec_core.servers.vllm.plug_in.Proposer"}'

The variable SPECDEC_CONFIGURATION names the YAML file with `pair` and `configuration`. vLLM decodes
and verifies; this module loads and caches the draft models. vLLM imports it by name and it imports
nothing of vLLM before a proposer is made.

The candidates depend on the sequence alone: a draft model proposes its most likely token. So vLLM's
verification keeps the target's distribution at any temperature.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Sequence
from time import perf_counter
from typing import Any

import numpy as np
import torch

from specdec_core.base.errors import UserError
from specdec_core.config import Configuration, PairConfiguration
from specdec_core.models.eagle import AnyHead
from specdec_core.models.eagle.loading import names_head
from specdec_core.models.loading import load_skeleton
from specdec_core.models.pair import Pair, load_drafts
from specdec_core.servers.plug_in_drafter import PlugInDrafter, check_chains, opened
from specdec_core.servers.server import DraftFile, check_priced
from specdec_core.servers.vllm import repairs
from specdec_core.servers.vllm.features import CachedFeatures
from specdec_core.servers.vllm.settings import VARIABLE

PROGRAM = "vLLM"


def check(configuration: Configuration, drafts: Iterable[DraftFile] = ()) -> None:
    """Raises :class:`UserError` for a configuration that the plug-in cannot draft by; `drafts` are
    those that it runs."""
    check_chains(configuration, PROGRAM)
    if configuration.drafter is not None and configuration.drafter.reads_rejected:
        raise UserError(
            f"{configuration.label} learns from the target's tokens after rejected candidates,"
            f" which {PROGRAM} does not tell"
        )
    for draft in drafts:  # a refused draft model is vLLM's to load, not the plug-in's
        if draft.refused is not None and names_head(draft.place):
            raise UserError(draft.refused)


class Proposer:
    """Proposes candidates for the requests of a vLLM worker.

    vLLM passes neither the request of a row of its batch, nor the end of a request. So a request is
    found by its sequence before the latest tokens; vLLM passes their number. A request that is not
    found among the rows has ended or was preempted; its slot is free.

    Raises:
        UserError: the configuration is missing, or the plug-in cannot draft by it.
    """

    def __init__(self, vllm_config: Any) -> None:
        chosen = _chosen()
        configuration = chosen.configuration
        drafts = configuration.drafts_of(chosen.pair.drafts)
        check(configuration)
        check_priced(configuration, PROGRAM)
        model, speculative = vllm_config.model_config, vllm_config.speculative_config
        device = str(vllm_config.device_config.device)
        self.most, self.max_length = speculative.num_speculative_tokens, model.max_model_len
        spec = chosen.pair.model_copy(update={"target": model.model, "drafts": drafts})
        spec = spec.with_runner(device=device, target_dtype="float32", max_length=self.max_length)
        tokenizer, spec = opened(spec)
        half = device == "cpu" and model.dtype == torch.float16  # a head does not run so there
        target: Any = load_skeleton(spec.target)
        target.to(torch.float32 if half else model.dtype)
        pair = Pair(spec, tokenizer, target, load_drafts(spec, target))
        self.slots = vllm_config.scheduler_config.max_num_seqs
        self.features: CachedFeatures | None = None
        if any(isinstance(draft, AnyHead) for draft in pair.drafts.values()):
            vocabulary = target.config.get_text_config(decoder=True).vocab_size
            self.features = CachedFeatures(pair.feature_layers, vocabulary, self.slots)
            self.features.watch(vllm_config)
        self.drafter = PlugInDrafter(pair, configuration, self.slots, self.features)
        self._held: dict[bytes, list[int]] = {}  # the slots of each sequence
        self._began = perf_counter()
        repairs.repair()  # vLLM may have no entry point that calls it

    def load_model(self, *_: Any, **__: Any) -> None:
        """vLLM has loaded its model, which the drafter does not need."""

    def forget(self) -> None:
        """Forget what was learned from earlier requests, while no request is decoded."""
        self.drafter.forget()
        self._held = {}

    def propose(
        self,
        sampled_token_ids: Sequence[Sequence[int]],
        num_tokens_no_spec: np.ndarray,
        token_ids_cpu: np.ndarray,
        slot_mappings: Any = None,
    ) -> list[list[int]]:
        """Candidates for each row of the batch; none for a row in prefill.

        Args:
            sampled_token_ids: (rows,) the tokens that the step added to each sequence.
            num_tokens_no_spec: (rows,) the lengths of the sequences, with these.
            token_ids_cpu: (rows, longest) the sequences.
        """
        seconds, self._began = perf_counter() - self._began, perf_counter()
        rows = [row for row, new in enumerate(sampled_token_ids) if len(new)]
        sequences = {row: token_ids_cpu[row, : num_tokens_no_spec[row]] for row in rows}
        before = {row: sequences[row][: -len(sampled_token_ids[row])] for row in rows}
        slots = self._found(before)
        if self.features is not None:
            # The last token was not fed yet.
            fed = {slots[row]: len(sequence) - 1 for row, sequence in sequences.items()}
            self.features.follow({slots[row]: row for row in rows}, fed)
        rooms = {}
        for row in rows:
            new, slot = [int(token) for token in sampled_token_ids[row]], slots[row]
            self.drafter.add(slot, new, seconds=seconds)
            rooms[slot] = max(min(self.most, self.max_length - len(sequences[row]) - 1), 0)
        self._held = {}
        for row in rows:
            self._held.setdefault(sequences[row].tobytes(), []).append(slots[row])
        trees = self.drafter.propose(rooms)
        return [
            trees[slots[row]].tokens if row in slots else []
            for row in range(len(sampled_token_ids))
        ]

    def _found(self, before: dict[int, np.ndarray]) -> dict[int, int]:
        """The slot of each row: the slot with the same sequence, or else a new one."""
        slots = {}
        for row, sequence in before.items():
            if same := self._held.get(sequence.tobytes()):
                slots[row] = same.pop()
        for slot in self.drafter.sequences.keys() - slots.values():
            self.drafter.end(slot)
        free = (slot for slot in range(self.slots) if slot not in self.drafter.sequences)
        for row, slot in zip([row for row in before if row not in slots], free, strict=False):
            slots[row] = slot
            self.drafter.begin(slot, before[row].tolist())
        return slots


def _chosen() -> PairConfiguration:
    file = os.environ.get(VARIABLE)
    if not file:
        raise UserError(f"{VARIABLE} must name the file that `specdec export --plugin` wrote")
    return PairConfiguration.load(file)
