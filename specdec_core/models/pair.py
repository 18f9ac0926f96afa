"""A target model, its drafts and their tokenizer, from hub ids, folders or `bundled:` names."""

from __future__ import annotations

import logging
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cache, cached_property
from time import perf_counter
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from specdec_core.base.errors import UserError
from specdec_core.config import PairSpec, Placement, RunnerSettings, draft_named
from specdec_core.models.eager import EagerRunner
from specdec_core.models.eagle import AnyHead
from specdec_core.models.eagle.loading import (
    check_method,
    head_positions,
    head_settings,
    load_head,
    names_head,
)
from specdec_core.models.eagle.runner import EagleRunner, ReadRows
from specdec_core.models.fingerprints import TARGET, fingerprint, fingerprints
from specdec_core.models.generation_settings import warn_of_unsupported
from specdec_core.models.loading import build, load_config, load_tokenizer, load_weights
from specdec_core.models.location import located
from specdec_core.models.packing import multiplied_dtypes, pack_linear_layers
from specdec_core.models.products import operator as products
from specdec_core.models.reading import reading
from specdec_core.models.reduced_draft.model import ReducedDraftConfig
from specdec_core.models.reduced_draft.storing import load_reduced, reduced_of
from specdec_core.models.reduced_draft.target_tables import target_embedding
from specdec_core.models.runner import Batch, CacheLost, ModelRunner
from specdec_core.models.supported import (
    check_causal,
    check_positions,
    check_supported,
    context_length,
)
from specdec_core.prompts.chat import end_of_turn
from specdec_core.tokens import operator as sampling

log = logging.getLogger(__name__)

Draft = PreTrainedModel | AnyHead

APART = (
    "an EAGLE head reads what the target has computed, so it drafts in the target's own process"
    " (no PEARL) and for a target that is not split"
)

# bfloat16 is preferred where a forward takes less than this part of its time in float32.
_CLEARLY = 0.93
_ANY = sys.maxsize  # positions


@dataclass
class Pair:
    """Loaded models. `drafts` keeps the order of the specification; the first is the default.
    `open_link` connects to an asynchronous draft, where there is one
    (:class:`specdec_core.drafting.pearl.link.SocketLink`)."""

    spec: PairSpec
    tokenizer: PreTrainedTokenizerBase
    target: PreTrainedModel
    drafts: dict[str, Draft] = field(default_factory=dict)
    compact: bool | None = None  # see EagerRunner
    pooled: bool | None = None  # see EagerRunner
    open_link: Callable[[], Any] | None = None

    def draft_name(self, name: str | None) -> str:
        """The name of a draft of the pair; of its first one for None. Raises :class:`UserError`
        where there is no such draft."""
        if name in self.spec.drafts and name not in self.drafts:
            raise UserError(f"draft {name}: {APART}")
        return draft_named(self.drafts, name, "drafter.draft")

    @cached_property
    def fingerprints(self) -> dict[str, str]:
        """The digests of the weights of `target` and of each draft, by name."""
        return fingerprints(self.spec)

    def open_runner(
        self,
        draft: str | None,
        slots: int,
        target: ModelRunner | ReadRows | None = None,
        max_length: int | None = None,
        cache_tokens: int | None = None,
    ) -> ModelRunner:
        """A runner with its own cache, for the draft of that name, or the target for None. A head
        drafts from the rows of `target`. A row holds `max_length` tokens, by default as many as the
        pair. A pooled cache has memory for `cache_tokens` tokens, by default for all rows. Raises
        :class:`UserError` for a head without a target in this process."""
        size = self.target.config.get_text_config(decoder=True).vocab_size
        length = self.max_length if max_length is None else max_length
        compiled = self.spec.runner.compile
        weights = self.fingerprints[TARGET if draft is None else draft] if compiled else None
        model = self.target if draft is None else self.drafts[draft]
        if isinstance(model, AnyHead):
            if not isinstance(target, ReadRows):
                raise UserError(f"draft {draft}: {APART}")
            # A graph also holds what the head has of its target.
            both = weights and f"{self.fingerprints[TARGET]} {weights}"
            return EagleRunner(model, target, slots, length, both, self.pooled, cache_tokens)
        features = self.feature_layers if draft is None else ()
        compact = True if compiled else self.compact
        eager = EagerRunner(
            model,
            slots,
            length,
            size,
            compact=compact,
            pooled=self.pooled,
            cache_tokens=cache_tokens,
            features=features,
        )
        # A target with a more padded vocabulary may generate tokens that a draft lacks.
        own: int = model.config.get_text_config(decoder=True).vocab_size
        eager.known = own if own < size else None
        if weights is None:
            return eager
        from specdec_core.models.compiled import CompiledRunner  # torch's compilers take a second

        return CompiledRunner(eager, weights, draft is not None)

    def open_alone(self, draft: str, slots: int) -> ModelRunner:
        """A runner for timing a draft. A head gets a target runner that holds a sequence of the
        greatest length in every row, so it has features for any token."""
        read = None
        if isinstance(self.drafts[draft], AnyHead):
            read = self.open_runner(None, slots)
            read.prefill(range(slots), [[1] * self.max_length] * slots)
        return self.open_runner(draft, slots, read)

    @torch.inference_mode()
    def logits(self, tokens: Sequence[int], draft: str | None = None) -> Tensor:
        """The logits (n, vocabulary) after each of n tokens, of the target or of a draft model, by
        a forward of the model's own code."""
        model = self.target if draft is None else self.draft_models[draft]
        logits: Tensor = model(input_ids=torch.tensor([tokens], device=model.device)).logits[0]
        return logits

    def reloaded(self, spec: PairSpec) -> Pair:
        """The same models loaded as `spec` says: this pair, where it is the same."""
        return self if spec == self.spec else load_pair(spec)

    @property
    def placement(self) -> Placement | None:
        """The devices of the models; None where they are in this process."""
        return None

    @property
    def losses(self) -> int:
        """How often a process of the models was lost so far; never where they are in this one."""
        return 0

    @contextmanager
    def undisturbed(self) -> Iterator[None]:
        """Raises :class:`CacheLost` at the end of the block if a process of the models was lost in
        it. An engine continues after a loss, but its times and the rounds of asynchronous drafting
        differ from those without a loss."""
        before = self.losses
        yield
        if self.losses != before:
            raise CacheLost("a process of the models was lost")

    @property
    def draft_models(self) -> dict[str, PreTrainedModel]:
        """The drafts that are language models."""
        return {n: d for n, d in self.drafts.items() if isinstance(d, PreTrainedModel)}

    @property
    def feature_layers(self) -> tuple[int, ...]:
        """The target's layers that heads among the drafts read."""
        heads = (draft for draft in self.drafts.values() if isinstance(draft, AnyHead))
        return tuple(sorted({layer for head in heads for layer in head.settings.feature_layers}))

    @cached_property
    def _end_of_turn(self) -> frozenset[int]:
        return end_of_turn(self.tokenizer)

    @property
    def eos_token_ids(self) -> frozenset[int]:
        """Tokens that end a sequence: the target's generation settings' or else the tokenizer's,
        and the one that the chat template writes after an answer, which settings may lack."""
        settings = self.target.generation_config
        eos = settings.eos_token_id if settings else None
        eos = self.tokenizer.eos_token_id if eos is None else eos
        own = [] if eos is None else [eos] if isinstance(eos, int) else eos
        return self._end_of_turn.union(own)

    @property
    def max_length(self) -> int:
        """The most tokens, prompt and output, that the target can hold. A draft may hold fewer."""
        return min(self.spec.runner.max_length, context_length(self.target.config) or _ANY)

    def follows(self, draft: str) -> int:
        """The most tokens of a sequence that the draft of that name can hold."""
        model = self.drafts[draft]
        if isinstance(model, AnyHead):
            limit: int | None = model.settings.max_position_embeddings
        else:
            limit = context_length(model.config)
        return min(self.spec.runner.max_length, limit or _ANY)


def max_length_of(spec: PairSpec) -> int:
    """:attr:`Pair.max_length`, from configurations alone. Raises :class:`UserError` for a missing
    model."""
    target = load_config(spec.target)
    return min(spec.runner.max_length, context_length(target) or _ANY)


def short_drafts(spec: PairSpec) -> dict[str, int]:
    """The drafts that have fewer positions than the target, by name, with their number of
    positions. From configurations alone. Raises :class:`UserError` for a missing model."""
    target = _positions(spec.target) or _ANY
    limits = {name: _positions(model) for name, model in spec.drafts.items()}
    return {name: limit for name, limit in limits.items() if limit and limit < target}


def _positions(name: str) -> int | None:
    """The positions that a model or head distinguishes; None: any number."""
    if names_head(name):
        return head_positions(name)
    return context_length(load_config(name))


def check_pair(spec: PairSpec, served: bool = False) -> PreTrainedTokenizerBase:
    """Check, from configurations and tokenizers alone, that the models exist, can be served and
    share one vocabulary. Warns of unsupported settings of the target's checkpoint, and of drafts
    with fewer positions. If another server runs the target (`served`), its architecture is not
    checked. Returns the target's tokenizer. Raises :class:`UserError`, which says what is wrong
    with which model."""
    others = []  # models with a tokenizer of their own: a reduced draft has its target's
    for name in (spec.target, *spec.drafts.values()):
        check_method(name)
        if names_head(name):
            continue
        config = load_config(name)
        if served and name == spec.target:
            continue
        check_supported(config, name)
        if isinstance(config, ReducedDraftConfig):
            if name == spec.target:
                raise UserError(f"{name}: a draft with a reduced vocabulary; it cannot be a target")
            reduced_of(config, name)
        elif name != spec.target:
            others.append(name)
        else:
            check_positions(config, name, spec.runner.max_length)
    tokenizer = load_tokenizer(spec.target)
    vocabulary = tokenizer.get_vocab()
    size = load_config(spec.target).get_text_config(decoder=True).vocab_size
    # Without tokens that were added to it, which a model of text may lack.
    if tokenizer.vocab_size > size:
        raise UserError(
            f"{spec.target}: its tokenizer has {tokenizer.vocab_size} tokens, but its model"
            f" {size}; take the tokenizer that the model was trained with"
        )
    for name in others:
        other = load_tokenizer(name).get_vocab()
        if other != vocabulary:
            unlike = sorted(set(vocabulary.items()) ^ set(other.items()), key=lambda item: item[1])
            raise UserError(
                f"draft {name} and target {spec.target} have different vocabularies"
                f" ({len(other)} and {len(vocabulary)} tokens, first difference at token"
                f" {unlike[0][1]}: {unlike[0][0]!r}); a pair must share its tokenizer"
            )
    warn_of_unsupported(spec.target, located(spec.target))
    length = max_length_of(spec)
    for name, limit in short_drafts(spec).items():
        if limit < length:
            _warn_of_short(spec.drafts[name], limit, length)
    return tokenizer


@cache
def _warn_of_short(name: str, limit: int, length: int) -> None:
    """Warn in one line, once for each draft."""
    log.warning(
        "%s: this draft has %s positions, and sequences may have %s tokens: it drafts nothing after"
        " the first %s",
        name,
        *(f"{number:,}" for number in (limit, length, limit)),
    )


def load_pair(spec: PairSpec) -> Pair:
    """Check and load the models of a pair; sets this process's torch threads."""
    torch.set_num_threads(spec.runner.threads)
    tokenizer = check_pair(spec)
    spec = resolve_dtypes(spec)
    runner = spec.runner
    target = _load_model(spec.target, runner.target_dtype, runner)
    if target.device.type == "cpu":
        sampling.available()  # not built by the first request
    return Pair(spec, tokenizer, target, load_drafts(spec, target))


def load_drafts(spec: PairSpec, target: PreTrainedModel | None = None) -> dict[str, Draft]:
    """The drafts of a pair with resolved device and data types, by name; heads only with a
    `target`. The embedding of a target without weights is read from its files."""
    drafts: dict[str, Draft] = {}
    for name, model in spec.drafts.items():
        if not names_head(model):
            drafts[name] = _load_model(model, spec.runner.draft_dtype, spec.runner, spec.target)
        elif target is not None:
            drafts[name] = _load_head(model, spec, target)
    return drafts


def eagle_heads_of(spec: PairSpec) -> tuple[str, ...]:
    """The drafts of a pair that are EAGLE heads, by name."""
    return tuple(name for name, model in spec.drafts.items() if names_head(model))


def feature_layers_of(spec: PairSpec) -> tuple[int, ...]:
    """:attr:`Pair.feature_layers`, from configurations alone. Raises :class:`UserError` for a
    missing model."""
    target, heads = load_config(spec.target), eagle_heads_of(spec)
    settings = [head_settings(spec.drafts[name], target) for name in heads]
    return tuple(sorted({layer for each in settings for layer in each.feature_layers}))


def _load_head(name: str, spec: PairSpec, target: PreTrainedModel) -> AnyHead:
    """A head in its target's data type, with the layers that both share."""
    here = target.device.type != "meta"
    weights = fingerprint(spec.target) if here else None  # a server may have adapted them
    head = load_head(name, target.config, weights, target.dtype)
    device = target.device if here else torch.device(spec.runner.device)
    head.to(device)
    if spec.runner.pack and not spec.runner.compile and device.type == "cpu":
        pack_linear_layers(head)
    if head.embed_tokens is None and here:
        head.embed_tokens = target.get_input_embeddings()
    elif head.embed_tokens is None:
        table = target_embedding(spec.target).to(device, target.dtype)
        head.embed_tokens = nn.Embedding.from_pretrained(table)
    if head.lm_head is None:
        head.lm_head = target.get_output_embeddings()
    return head


def _load_model(
    name: str, dtype: str, runner: RunnerSettings, target: str | None = None
) -> PreTrainedModel:
    """A model. `target` is the name of the model that it drafts for."""
    kind: Any = dtype if dtype == "auto" else getattr(torch, dtype)
    config: Any = load_config(name)
    model: PreTrainedModel
    if isinstance(config, ReducedDraftConfig) and target is not None:
        kind = config.dtype if kind == "auto" else kind
        model = load_reduced(name, target, kind)
    else:
        model = load_weights(name, kind)
    with reading(name, "run a first forward", located(name)):
        model.to(runner.device)  # type: ignore[arg-type]  # transformers' own types err
        check_causal(model, name)
    # A compiled graph has its own packed weights, and is not made from these.
    if runner.pack and not runner.compile and model.device.type == "cpu":
        pack_linear_layers(model)
    return model


def resolve_dtypes(spec: PairSpec) -> PairSpec:
    """Replace device and data types of `auto` by concrete ones, so that every process decodes in
    the same way: on a GPU the checkpoint's type; on a CPU the faster one, measured, or bfloat16 for
    compiled graphs that multiply by the project's operator, which takes no other type."""
    runner = spec.runner
    device = runner.device
    if device == "auto":
        device = "cuda" if torch.cuda.is_available() else "cpu"
    on_cpu = torch.device(device).type == "cpu"
    changes: dict[str, str] = {"device": device}
    first_draft = next((name for name in spec.drafts.values() if not names_head(name)), None)
    by_operator = runner.compile and on_cpu and products.available()
    for which, name, width in (("target", spec.target, 8), ("draft", first_draft, 1)):
        if name and on_cpu and getattr(runner, f"{which}_dtype") == "auto":
            faster = "bfloat16" if by_operator else _faster_dtype(name, width, runner.pack)
            changes[f"{which}_dtype"] = faster
    return spec.with_runner(**changes)


def _faster_dtype(name: str, width: int, pack: bool) -> str:
    """float32, or bfloat16 where it makes a forward of `width` tokens clearly faster, in a model of
    this shape with random weights and few layers. A draft model is fed one token at a time, a
    target a token and its candidates, but both are fed whole prompts too."""
    if torch.bfloat16 not in multiplied_dtypes():
        return "float32"
    config = load_config(name)
    text = config.get_text_config(decoder=True)
    text.num_hidden_layers = layers = min(text.num_hidden_layers, 2)
    if getattr(text, "layer_types", None):
        text.layer_types = text.layer_types[:layers]
    context = min(128, (context_length(config) or 256) // 2)
    runners = {}
    for dtype in ("float32", "bfloat16"):
        model = build(config, name).to(getattr(torch, dtype))
        if pack:
            pack_linear_layers(model)
        runners[dtype] = EagerRunner(model, slots=1, max_length=context + width)
        runners[dtype].prefill([0], [[0] * context])
    seconds: dict[str, list[float]] = {dtype: [] for dtype in runners}
    for _ in range(40):
        for dtype, runner in runners.items():
            start = perf_counter()
            runner.forward(Batch([0], [[0] * width]))
            seconds[dtype].append(perf_counter() - start)
            runner.truncate(0, context)
    # Noise or a tie must not decide: recordings and sweeps of a pair should agree. The least time
    # is the one least disturbed by other processes.
    faster = min(seconds["bfloat16"]) < _CLEARLY * min(seconds["float32"])
    return "bfloat16" if faster else "float32"
