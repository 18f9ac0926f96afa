"""Plug-in for transformers: `generate`, with candidates from any drafter that drafts chains.

    from specdec_core.servers.transformers.plug_in import speculative

    generate = speculative(model, "configuration.yaml")
    generate(**tokenizer(text, return_tensors="pt"), max_new_tokens=100)

transformers decodes and verifies. This module is a `CandidateGenerator` for its assisted decoding,
passed as `custom_generate`. Streamers, logits processors, stopping criteria and outputs of
`generate` work. Greedy output is the model's. When sampling, candidates come with the distribution
that they were drawn from, so that transformers' acceptance (Leviathan et al., Algorithm 1) keeps
the model's distribution.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from pathlib import Path
from threading import Lock
from time import perf_counter
from typing import Any

import torch
from torch import Tensor
from transformers import GenerationConfig, PreTrainedModel
from transformers.generation import CandidateGenerator

from specdec_core.base.errors import UserError
from specdec_core.config import Configuration, PairConfiguration, PairSpec, Sampling
from specdec_core.drafting.bandit.settings import BanditSettings
from specdec_core.models.eagle import AnyHead
from specdec_core.models.pair import Pair, load_drafts
from specdec_core.servers.plug_in_drafter import PlugInDrafter, check_chains, opened
from specdec_core.servers.transformers.features import TargetFeatures
from specdec_core.tokens.token_tree import TokenTree

PROGRAM = "transformers"
_PADDING = 160  # places of a sequence's last candidates


def speculative(model: PreTrainedModel, chosen: PairConfiguration | Path | str) -> Speculative:
    """`model.generate`, with candidates by a configuration; it takes the same arguments, for one
    sequence at a time. The drafter keeps what it learns (bandits, shared suffixes) from call to
    call.

    Args:
        model: the target, a decoder-only language model.
        chosen: a pair and a configuration, or the YAML file that `specdec export --plugin` writes.
            The arguments of `generate` replace the configuration's sampling, and `model` the
            pair's target. Draft models propose nothing for sequences that are longer than
            `pair.runner.max_length`, or than they can hold.

    Raises:
        UserError: transformers cannot verify the candidates (trees, PEARL), the configuration is
            lossy, or a draft model is missing or has another vocabulary.
    """
    if not isinstance(chosen, PairConfiguration):
        chosen = PairConfiguration.load(chosen)
    check_chains(chosen.configuration, PROGRAM)
    device = {"device": str(model.device), "target_dtype": "float32"}
    spec = PairSpec(
        target=model.name_or_path or "target",
        drafts=chosen.configuration.drafts_of(chosen.pair.drafts),
        runner=chosen.pair.runner.model_copy(update=device),
    )
    tokenizer, spec = opened(spec)
    pair = Pair(spec, tokenizer, model, load_drafts(spec, model))
    return Speculative(pair, chosen.configuration)


class DraftCandidates(CandidateGenerator):
    """The chains of a drafter, for the one sequence that transformers decodes."""

    def __init__(self, pair: Pair, configuration: Configuration) -> None:
        self.model = pair.target
        drafts = configuration.drafts_of(pair.drafts)
        self.read: TargetFeatures | None = None
        if heads := [name for name, draft in drafts.items() if isinstance(draft, AnyHead)]:
            positions = max(map(pair.follows, heads)) + _PADDING
            self.read = TargetFeatures(pair.target, pair.feature_layers, positions)
        seconds = partial(_forward_seconds, pair.target)
        self.drafter = PlugInDrafter(pair, configuration, 1, self.read, seconds)
        drafter = configuration.drafter
        assert drafter is not None
        self._reads_rejected = drafter.reads_rejected
        # Heads need the prefill's features, and no arm of a bandit pays for the prefill.
        bandit = any(isinstance(part, BanditSettings) for part in drafter.walk())
        self._waits = self.read is not None or bandit
        self._sampling = Sampling()
        self._prompt = self._held = self._last = 0
        self._began = 0.0

    def begin(self, input_ids: Tensor, settings: GenerationConfig) -> None:
        """A sequence begins; it ends at `settings.max_length` tokens."""
        tokens = input_ids[0].tolist()
        self._sampling, self._last = _sampling(settings), int(settings.max_length or 0)
        self._prompt = self._held = len(tokens)
        seed = int(torch.randint(2**62, (1,))) if settings.do_sample else 0
        if self.read is not None:
            self.read.begin()
        self.drafter.begin(0, tokens, self._sampling, seed)

    def end(self) -> None:
        """The sequence has ended."""
        if self.read is not None:
            self.read.end()
        self.drafter.end(0)

    def after_forward(self) -> None:
        """The target has made a forward."""
        if self.read is not None:
            self.read.after_forward()

    def get_candidates(self, input_ids: torch.LongTensor, **_: Any) -> Any:
        """The sequence with candidates (1, length + candidates), and when sampling the logarithms
        of their distributions (1, candidates, vocabulary). The first candidates are verified in the
        prefill."""
        self._began = perf_counter()
        room = self._last - self._held - 1
        if (self._waits and self._held == self._prompt) or room <= 0:
            return input_ids, None
        tree = self.drafter.propose({0: room})[0]
        if not tree.tokens:
            return input_ids, None  # transformers takes no distributions of no candidates
        new = torch.cat([input_ids, input_ids.new_tensor([tree.tokens])], dim=1)
        return new, None if self._sampling.greedy else self._logits(tree)

    def update_candidate_strategy(
        self, input_ids: torch.LongTensor, scores: Tensor, num_matches: int
    ) -> None:
        """The target has added tokens to `input_ids`; `scores` (1, candidates + 1, vocabulary) are
        its own."""
        tokens = input_ids[0, self._held :].tolist()
        self._held += len(tokens)
        if self.read is not None:
            self.read.cut(self._held - 1)
        choices = scores[0].argmax(dim=-1).tolist() if self._reads_rejected else None
        self.drafter.add(0, tokens, choices, perf_counter() - self._began)

    def _logits(self, tree: TokenTree) -> Tensor:
        shape = len(tree), self.drafter.vocab_size
        probs = torch.zeros(shape, dtype=torch.float32, device=self.model.device)
        for node, q in enumerate(tree.draft_probs):
            if q is None:  # a deterministic proposal
                probs[node, tree.tokens[node]] = 1
            else:
                assert isinstance(q, Tensor)
                probs[node, : len(q)] = q
        return probs.log()[None]


@torch.inference_mode()
def _forward_seconds(model: PreTrainedModel, tokens: int) -> float:
    """Seconds of a forward of `tokens` tokens, as transformers runs it."""
    ids = torch.ones((1, tokens), dtype=torch.long, device=model.device)
    began = perf_counter()
    model(input_ids=ids, use_cache=True).logits[0, 0, 0].item()  # waits for the device
    return perf_counter() - began


class _Watched:
    """A model as transformers' assisted decoding sees it: with these candidates, which are told of
    its forwards."""

    def __init__(self, model: PreTrainedModel, candidates: DraftCandidates) -> None:
        self._model, self._candidates = model, candidates

    def __getattr__(self, name: str) -> Any:
        return getattr(self._model, name)

    def __call__(self, **inputs: Any) -> Any:
        outputs = self._model(**inputs)
        self._candidates.after_forward()
        return outputs

    def _get_candidate_generator(self, **_: Any) -> DraftCandidates:
        return self._candidates


class Speculative:
    """:func:`speculative` for models that are loaded."""

    def __init__(self, pair: Pair, configuration: Configuration) -> None:
        check_chains(configuration, PROGRAM)
        self.candidates, self._lock = DraftCandidates(pair, configuration), Lock()

    def forget(self) -> None:
        """Forget what the drafter learned in earlier calls."""
        self.candidates.drafter.forget()

    def __call__(self, *args: Any, **options: Any) -> Any:
        for name in ("assistant_model", "custom_generate", "prompt_lookup_num_tokens"):
            if options.get(name) is not None:
                raise UserError(f"{name}: the configuration already chooses the drafter")
        streamer = options.get("streamer")  # transformers hands none on to a function

        def decode(
            model: PreTrainedModel,
            input_ids: Tensor,
            logits_processor: Any,
            stopping_criteria: Any,
            generation_config: GenerationConfig,
            **model_kwargs: Any,
        ) -> Any:
            _check(input_ids, generation_config, model_kwargs)
            kind: Any = type(model)
            self.candidates.begin(input_ids, generation_config)
            try:
                return kind._assisted_decoding(
                    _Watched(model, self.candidates),
                    input_ids,
                    logits_processor=logits_processor,
                    stopping_criteria=stopping_criteria,
                    generation_config=generation_config,
                    streamer=streamer,
                    **model_kwargs,
                )
            finally:
                self.candidates.end()

        model: Any = self.candidates.model
        with self._lock:
            return model.generate(*args, custom_generate=decode, **options)


def _check(input_ids: Tensor, settings: GenerationConfig, inputs: Mapping[str, Any]) -> None:
    """Raises :class:`UserError` for what assisted decoding cannot do."""
    if (settings.num_beams or 1) > 1:
        raise UserError("num_beams: candidates are verified for one beam alone")
    if len(input_ids) > 1:
        raise UserError(
            f"a batch of {len(input_ids)} sequences: transformers verifies candidates of one at a"
            " time"
        )
    if settings.assistant_ensemble_weight is not None:
        raise UserError("assistant_ensemble_weight makes decoding lossy; leave it out")
    cache = inputs.get("past_key_values")
    if cache is not None and cache.get_seq_length():
        raise UserError("past_key_values: the drafter needs the prefill from the first token")


def _sampling(settings: GenerationConfig) -> Sampling:
    """How the draft models draw: as nearly like the target as this library can say."""
    if not settings.do_sample:
        return Sampling()
    return Sampling(
        temperature=settings.temperature or 1.0,
        top_k=settings.top_k or 0,
        top_p=settings.top_p or 1.0,
        min_p=settings.min_p or 0.0,
    )
