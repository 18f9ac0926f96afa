"""Training the bundled pair: tokenizer, target, sharpening, own text, distillation, export.

Each phase leaves its result in the work folder, written under a temporary name and renamed, and is
skipped when that result is there; the long ones also leave checkpoints and go on from the last.
"""

import copy
import math
import platform
import statistics
import time
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from pydantic import BaseModel, ConfigDict
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import DynamicCache, LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

from specdec_core.models.alignment import Trajectory, greedy_trajectories, measure_alignment
from specdec_core.prompts import stdlib as corpus

OPENING = 32
"""How many generated tokens are also measured on their own, from the start of a trajectory."""

Report = Callable[[str, float, dict[str, float]], None]
"""Called with the phase, the share of it that is done (0 to 1) and its figures so far."""


class Shape(BaseModel):
    """Shape of a Llama with tied embeddings."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    width: int
    layers: int
    inner: int
    heads: int


class Settings(BaseModel):
    """Everything the recipe depends on, besides the interpreter's own source."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    seed: int = 0
    threads: int = 2
    modules: int | None = None
    vocabulary: int = 4096
    context: int = 2048

    target: Shape = Shape(width=384, layers=8, inner=1024, heads=6)
    drafts: dict[str, Shape] = {
        "draft-medium": Shape(width=256, layers=2, inner=704, heads=4),
        "draft-small": Shape(width=128, layers=1, inner=384, heads=2),
    }

    rows: int = 24
    row_tokens: int = 320
    target_tokens: int = 9_000_000
    target_minutes: float = 40.0
    matrix_rate: float = 0.02
    other_rate: float = 4e-3

    sharpness: float = 2.0
    own_text_tokens: int = 790_000
    corpus_text_tokens: int = 1_400_000
    text_rows: int = 96
    text_row_tokens: int = 320
    text_greedy: float = 0.6
    text_kept: int = 16

    distil_tokens: int = 12_000_000
    distil_minutes: float = 30.0
    distil_rows: int = 12
    distil_own_text: float = 0.6
    distil_matrix_rate: float = 0.02
    distil_other_rate: float = 4e-3
    argmax_weight: float = 0.5

    held_out_prompts: int = 128
    seen_prompts: int = 64
    new_tokens: int = 128
    checkpoint_seconds: float = 180.0


SMOKE = Settings(
    threads=1,  # models this small lose by waiting for a second one
    modules=12,
    vocabulary=512,
    context=256,
    target=Shape(width=32, layers=2, inner=64, heads=2),
    drafts={
        "draft-medium": Shape(width=16, layers=2, inner=32, heads=2),
        "draft-small": Shape(width=16, layers=1, inner=32, heads=2),
    },
    rows=4,
    row_tokens=64,
    target_tokens=64 * 4 * 10,
    own_text_tokens=512,
    corpus_text_tokens=512,
    text_rows=4,
    text_row_tokens=64,
    distil_tokens=64 * 4 * 10,
    distil_rows=4,
    held_out_prompts=6,
    seen_prompts=4,
    new_tokens=16,
    checkpoint_seconds=0.5,
)
"""The whole recipe in seconds: what it makes is of no use but to show that every phase runs."""


def save_atomically(path: Path, value: Any) -> None:
    """`torch.save` under a temporary name, then rename: a kill never leaves half a checkpoint."""
    temporary = path.with_suffix(".partial")
    torch.save(value, temporary)
    temporary.rename(path)


# --- tokenizer and rows -----------------------------------------------------------------------


def train_tokenizer(settings: Settings, work: Path) -> PreTrainedTokenizerFast:
    """Byte-level BPE of `settings.vocabulary` tokens, learnt on the seen modules alone."""
    folder = work / "tokenizer"
    if not folder.exists():
        raw = Tokenizer(models.BPE())
        raw.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
        raw.decoder = decoders.ByteLevel()
        trainer = trainers.BpeTrainer(
            vocab_size=settings.vocabulary,
            special_tokens=[corpus.END_OF_TEXT],
            initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
            show_progress=False,
        )
        raw.train_from_iterator(corpus.texts("seen", settings.modules), trainer)
        tokenizer = PreTrainedTokenizerFast(
            tokenizer_object=raw,
            bos_token=corpus.END_OF_TEXT,
            eos_token=corpus.END_OF_TEXT,
            pad_token=corpus.END_OF_TEXT,
            model_max_length=settings.context,
            clean_up_tokenization_spaces=False,
        )
        partial = folder.with_suffix(".partial")
        tokenizer.save_pretrained(partial)
        partial.rename(folder)
    trained: PreTrainedTokenizerFast = PreTrainedTokenizerFast.from_pretrained(folder)
    return trained


class Rows:
    """An endless, resumable stream of rows of tokens.

    The documents are concatenated in an order drawn anew for each epoch and cut into rows of
    `length` tokens at an offset drawn anew as well; batch n is the same whenever and however often
    it is asked for.
    """

    def __init__(self, documents: list[list[int]], length: int, seed: int) -> None:
        self.documents = [torch.tensor(document) for document in documents]
        self.length = length
        self.seed = seed
        self.per_epoch = sum(map(len, documents)) // length
        if not self.per_epoch:
            raise ValueError(f"the corpus is shorter than one row of {length} tokens")
        self._epoch = (-1, torch.empty(0, length, dtype=torch.long))

    def _rows_of(self, epoch: int) -> torch.Tensor:
        if self._epoch[0] != epoch:
            draw = torch.Generator().manual_seed(self.seed * 1_000_003 + epoch)
            order = torch.randperm(len(self.documents), generator=draw).tolist()
            stream = torch.cat([self.documents[index] for index in order])
            stream = stream.roll(int(torch.randint(self.length, (1,), generator=draw)))
            rows = stream[: self.per_epoch * self.length].view(-1, self.length)
            mixed = torch.randperm(len(rows), generator=draw)
            self._epoch = (epoch, rows[mixed])
        return self._epoch[1]

    def batch(self, number: int, size: int) -> torch.Tensor:
        """Rows `number * size` onward: [size, length] token ids."""
        first = number * size
        picked = []
        for index in range(first, first + size):
            epoch, row = divmod(index, self.per_epoch)
            picked.append(self._rows_of(epoch)[row])
        return torch.stack(picked)


# --- optimisation -----------------------------------------------------------------------------


def build(shape: Shape, settings: Settings, end: int) -> LlamaForCausalLM:
    """A Llama of this shape; the matrices that write to the residual stream start at zero."""
    model = LlamaForCausalLM(
        LlamaConfig(
            vocab_size=settings.vocabulary,
            hidden_size=shape.width,
            num_hidden_layers=shape.layers,
            intermediate_size=shape.inner,
            num_attention_heads=shape.heads,
            num_key_value_heads=shape.heads,
            max_position_embeddings=settings.context,
            tie_word_embeddings=True,
            bos_token_id=end,
            eos_token_id=end,
            pad_token_id=end,
        )
    )
    for layer in model.model.layers:
        torch.nn.init.zeros_(layer.self_attn.o_proj.weight)
        torch.nn.init.zeros_(layer.mlp.down_proj.weight)
    return model


@dataclass
class Optimiser:
    """Muon for the hidden matrices, AdamW for embeddings and norms, one schedule for both."""

    matrices: torch.optim.Optimizer
    others: torch.optim.Optimizer

    @classmethod
    def of(cls, model: torch.nn.Module, matrix_rate: float, other_rate: float) -> "Optimiser":
        hidden = [p for n, p in model.named_parameters() if p.ndim == 2 and "embed" not in n]
        rest = [p for n, p in model.named_parameters() if p.ndim != 2 or "embed" in n]
        return cls(
            torch.optim.Muon(hidden, lr=matrix_rate, weight_decay=0.05),
            torch.optim.AdamW(rest, lr=other_rate, betas=(0.9, 0.95), weight_decay=0.0),
        )

    def step(self, scale: float) -> None:
        """One update at `scale` times the base rates."""
        for optimiser in (self.matrices, self.others):
            for group in optimiser.param_groups:
                base = group.setdefault("base_rate", group["lr"])
                group["lr"] = base * scale
            optimiser.step()
            optimiser.zero_grad(set_to_none=True)

    def state(self) -> list[dict[str, Any]]:
        return [self.matrices.state_dict(), self.others.state_dict()]

    def restore(self, state: list[dict[str, Any]]) -> None:
        self.matrices.load_state_dict(state[0])
        self.others.load_state_dict(state[1])


@dataclass
class Clock:
    """How far a phase is, by tokens or by minutes, whichever is further on.

    The learning rate follows it, so that a phase on a busy machine still ends annealed.
    """

    tokens: int
    minutes: float
    seen: int = 0
    seconds: float = 0.0

    @property
    def share(self) -> float:
        by_time = self.seconds / (60 * self.minutes) if self.minutes else 0.0
        return min(1.0, max(self.seen / self.tokens, by_time))

    @property
    def rate(self) -> float:
        """A short warm-up, a plateau, then linearly to zero over the last three quarters."""
        return min(1.0, (self.share + 0.002) / 0.02, (1 - self.share) / 0.75)


def half_precision() -> AbstractContextManager[None]:
    return torch.autocast("cpu", torch.bfloat16)


def train_target(
    settings: Settings, work: Path, tokenizer: PreTrainedTokenizerFast, report: Report
) -> Path:
    """Next-token training on the seen modules; returns the finished weights' file."""
    done, checkpoint = work / "target.pt", work / "target.checkpoint.pt"
    if done.exists():
        return done
    torch.manual_seed(settings.seed)
    model = build(settings.target, settings, tokenizer.eos_token_id)
    optimiser = Optimiser.of(model, settings.matrix_rate, settings.other_rate)
    documents = corpus.encode_documents(tokenizer, corpus.texts("seen", settings.modules))
    rows = Rows(documents, settings.row_tokens + 1, settings.seed)
    clock = Clock(settings.target_tokens, settings.target_minutes)
    number, average = 0, math.log(settings.vocabulary)
    if checkpoint.exists():
        saved = torch.load(checkpoint, weights_only=True)
        model.load_state_dict(saved["model"])
        optimiser.restore(saved["optimiser"])
        number, average = saved["number"], saved["average"]
        clock.seen, clock.seconds = saved["seen"], saved["seconds"]
    kept = time.monotonic()
    while clock.share < 1:
        begun = time.monotonic()
        batch = rows.batch(number, settings.rows)
        with half_precision():
            logits = model(batch[:, :-1], use_cache=False).logits
        loss = F.cross_entropy(logits.float().flatten(0, 1), batch[:, 1:].flatten())
        loss.backward()
        optimiser.step(clock.rate)
        number += 1
        average += (loss.item() - average) * max(0.02, 1 / number)
        clock.seen += batch[:, 1:].numel()
        clock.seconds += time.monotonic() - begun
        figures = {
            "loss": average,
            "tokens": clock.seen,
            "tokens_per_second": clock.seen / clock.seconds,
        }
        report("target", clock.share, figures)
        if time.monotonic() - kept > settings.checkpoint_seconds:
            kept = time.monotonic()
            saved = {
                "model": model.state_dict(),
                "optimiser": optimiser.state(),
                "number": number,
                "average": average,
                "seen": clock.seen,
                "seconds": clock.seconds,
            }
            save_atomically(checkpoint, saved)
    facts = {"tokens": clock.seen, "seconds": clock.seconds, "training_loss": average}
    facts["epochs"] = number * settings.rows / rows.per_epoch
    facts["corpus_tokens"] = sum(map(len, documents))
    save_atomically(done, {"model": model.state_dict(), "facts": facts})
    return done


# --- sharpening and own text ------------------------------------------------------------------


def sharpen(settings: Settings, work: Path, tokenizer: PreTrainedTokenizerFast) -> LlamaForCausalLM:
    """The finished target with all logits multiplied by `settings.sharpness`.

    The scale lives in the final norm's weight, so it costs nothing at run time. Base models of this
    size are unsure everywhere; the models that people speculate with have been sharpened by
    post-training, and a draft distilled from a sharp teacher spends its capacity on the argmax and
    its confidence becomes "the target's choice is mine".
    """
    model = build(settings.target, settings, tokenizer.eos_token_id)
    model.load_state_dict(torch.load(work / "target.pt", weights_only=True)["model"])
    with torch.no_grad():
        model.model.norm.weight.mul_(settings.sharpness)
        # The teacher is the model that is shipped, rounding included.
        for parameter in model.parameters():
            parameter.copy_(parameter.bfloat16())
    model.eval()
    return model


def _definition_prefixes(settings: Settings, tokenizer: PreTrainedTokenizerFast) -> list[list[int]]:
    """Token ids before each definition of the seen modules ends: what prompts look like."""
    prefixes = []
    for module in corpus.modules_of("seen", settings.modules):
        texts = (corpus.text_up_to_anchor(module, anchor) for anchor in corpus.anchors(module))
        tails = [text[-2000:] for text in texts]
        if tails:
            prefixes.extend(tokenizer(tails, verbose=False)["input_ids"])
    return prefixes


@dataclass
class Taught:
    """Rows of text and what the teacher says comes next, its `text_kept` strongest tokens only.

    A sharp teacher puts nearly everything on them, and keeping them lets the drafts go over the
    rows many times without its forward. `tokens` [rows, length]; `choices` [rows, length, kept],
    ids, best first; `shares` [rows, length, kept] their probabilities, summing to 1.
    """

    tokens: torch.Tensor
    choices: torch.Tensor
    shares: torch.Tensor

    def save(self, path: Path) -> None:
        half = {"choices": self.choices.short(), "shares": self.shares.half()}
        save_atomically(path, {"tokens": self.tokens.short(), **half})

    @classmethod
    def load(cls, paths: list[Path]) -> "Taught":
        parts = [torch.load(path, weights_only=True) for path in paths]
        return cls(*(torch.cat([part[key] for part in parts]) for key in parts[0]))

    def rows(self, indices: torch.Tensor) -> "Taught":
        choices, shares = self.choices[indices].long(), self.shares[indices].float()
        return Taught(self.tokens[indices].long(), choices, shares)


def strongest(
    model: LlamaForCausalLM, hidden: torch.Tensor, kept: int
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Logits, and ids and probabilities of the `kept` strongest tokens, after final states.

    The head runs in float32: sharpened logits are large, and bfloat16 would round their differences
    away.
    """
    logits = F.linear(hidden.float(), model.lm_head.weight.float())
    best, choices = logits.topk(kept, dim=-1)
    return logits, choices, best.softmax(-1)


@torch.no_grad()
def read_rows(model: LlamaForCausalLM, tokens: torch.Tensor, kept: int) -> Taught:
    """The teacher on given rows [rows, length]."""
    choices, shares = [], []
    for row in tokens.split(8):
        hidden = model.model(row, use_cache=False).last_hidden_state
        _, ids, probabilities = strongest(model, hidden, kept)
        choices.append(ids)
        shares.append(probabilities)
    return Taught(tokens, torch.cat(choices), torch.cat(shares))


@torch.no_grad()
def continue_rows(
    model: LlamaForCausalLM, prefix: torch.Tensor, length: int, greedy_rows: int, kept: int
) -> Taught:
    """Prefixes [rows, n] written on to [rows, length]: the first rows greedily, others sampled.

    The teacher's distributions come out of the same forwards.
    """
    rows, given = prefix.shape
    tokens = torch.empty(rows, length, dtype=torch.long)
    tokens[:, :given] = prefix
    choices = torch.empty(rows, length, kept, dtype=torch.long)
    shares = torch.empty(rows, length, kept)
    cache = DynamicCache(config=model.config)
    done = 0
    while done < length:
        step = tokens[:, max(done, 0) : max(given, done + 1)]
        hidden = model.model(step, past_key_values=cache).last_hidden_state
        logits, ids, probabilities = strongest(model, hidden, kept)
        choices[:, done : done + step.shape[1]] = ids
        shares[:, done : done + step.shape[1]] = probabilities
        done += step.shape[1]
        if done < length:
            last = logits[:, -1]
            # Gumbel-max: an exact draw at temperature 1.
            last[greedy_rows:] -= torch.empty_like(last[greedy_rows:]).exponential_().log()
            tokens[:, done] = last.argmax(-1)
    return Taught(tokens, choices, shares)


class Teaching:
    """The chunks that the sharpened target writes or reads for the drafts to learn from.

    Own text goes on from prefixes of seen modules; half of them end with a definition, as prompts
    do, half anywhere. One file a chunk, whichever is done first: a killed job goes on with what is
    missing.
    """

    def __init__(
        self,
        settings: Settings,
        work: Path,
        tokenizer: PreTrainedTokenizerFast,
        target: LlamaForCausalLM,
    ) -> None:
        self.settings = settings
        length, size = settings.text_row_tokens, settings.text_rows
        documents = corpus.encode_documents(tokenizer, corpus.texts("seen", settings.modules))
        self.anywhere = Rows(documents, length, settings.seed + 1)
        self.read = Rows(documents, length, settings.seed + 3)
        self.definitions = _definition_prefixes(settings, tokenizer)
        self.teacher = build(settings.target, settings, tokenizer.eos_token_id).bfloat16().eval()
        self.teacher.load_state_dict(target.state_dict())
        chunk = size * length
        self.own = [
            work / f"own-{number:04d}.pt"
            for number in range(math.ceil(settings.own_text_tokens / chunk))
        ]
        self.corpus = [
            work / f"read-{number:04d}.pt"
            for number in range(math.ceil(settings.corpus_text_tokens / chunk))
        ]

    def read_on(self, number: int) -> None:
        """Write chunk `number` of corpus text unless it is there."""
        settings, path = self.settings, self.corpus[number]
        if not path.exists():
            rows = self.read.batch(number, settings.text_rows)
            read_rows(self.teacher, rows, settings.text_kept).save(path)

    def write_on(self, number: int) -> None:
        """Write chunk `number` of own text unless it is there."""
        settings, path = self.settings, self.own[number]
        if path.exists():
            return
        length, size = settings.text_row_tokens, settings.text_rows
        draw = torch.Generator().manual_seed(settings.seed * 7919 + number)
        torch.manual_seed(settings.seed * 7919 + number)
        given = int(torch.randint(length // 10, length // 2, (1,), generator=draw))
        prefix = self.anywhere.batch(number, size)[:, :given].clone()
        fitting = [ids for ids in self.definitions if len(ids) >= given]
        for row in range(0, size if fitting else 0, 2):
            pick = int(torch.randint(len(fitting), (1,), generator=draw))
            prefix[row] = torch.tensor(fitting[pick][-given:])
        greedy = round(size * settings.text_greedy)
        continue_rows(self.teacher, prefix, length, greedy, settings.text_kept).save(path)

    def all(self, report: Report) -> tuple[Taught, Taught]:
        """Own text and corpus text, every chunk made."""
        chunk = self.settings.text_rows * self.settings.text_row_tokens
        for name, make, paths in (
            ("read", self.read_on, self.corpus),
            ("write", self.write_on, self.own),
        ):
            for number in range(len(paths)):
                make(number)
                tokens = (number + 1) * chunk
                report(name, (number + 1) / len(paths), {"tokens": tokens})
        return Taught.load(self.own), Taught.load(self.corpus)


# --- distillation -----------------------------------------------------------------------------


def shuffled(count: int, seed: int, first: int, size: int) -> torch.Tensor:
    """Entries `first` to `first + size` of an endless stream of permutations of 0 … count - 1."""
    picked = []
    for index in range(first, first + size):
        epoch, place = divmod(index, count)
        draw = torch.Generator().manual_seed(seed * 1_000_003 + epoch)
        picked.append(torch.randperm(count, generator=draw)[place])
    return torch.stack(picked)


def distillation_loss(logits: torch.Tensor, taught: Taught, argmax_weight: float) -> torch.Tensor:
    """Cross-entropy with (1 - w) p + w onehot(argmax p), averaged over rows and positions.

    That is (1 - w) KL(p || q) + w CE(argmax p, q) up to p's own entropy: forward KL, with some of
    the weight moved to what greedy verification asks for. `logits` [rows, length, vocabulary].
    """
    wanted = taught.shares * (1 - argmax_weight)
    wanted[..., 0] += argmax_weight
    expected = (wanted * logits.gather(-1, taught.choices)).sum(-1)
    return (logits.logsumexp(-1) - expected).mean()


def distil(
    settings: Settings, work: Path, name: str, end: int, own: Taught, read: Taught, report: Report
) -> Path:
    """One draft from what the teacher said on its own and on corpus text; returns its file."""
    done, checkpoint = work / f"{name}.pt", work / f"{name}.checkpoint.pt"
    if done.exists():
        return done
    torch.manual_seed(settings.seed + 2)
    draft = build(settings.drafts[name], settings, end)
    optimiser = Optimiser.of(draft, settings.distil_matrix_rate, settings.distil_other_rate)
    from_own = round(settings.distil_rows * settings.distil_own_text)
    from_read = settings.distil_rows - from_own
    clock = Clock(settings.distil_tokens, settings.distil_minutes)
    number, average, following = 0, math.log(settings.vocabulary), 0.0
    if checkpoint.exists():
        saved = torch.load(checkpoint, weights_only=True)
        draft.load_state_dict(saved["model"])
        optimiser.restore(saved["optimiser"])
        number, average, following = saved["number"], saved["average"], saved["following"]
        clock.seen, clock.seconds = saved["seen"], saved["seconds"]
    kept = time.monotonic()
    while clock.share < 1:
        begun = time.monotonic()
        first = own.rows(shuffled(len(own.tokens), settings.seed, number * from_own, from_own))
        second = read.rows(shuffled(len(read.tokens), settings.seed, number * from_read, from_read))
        pairs = zip(vars(first).values(), vars(second).values(), strict=True)
        batch = Taught(*(torch.cat(pair) for pair in pairs))
        with half_precision():
            logits = draft(batch.tokens, use_cache=False).logits
        logits = logits.float()
        loss = distillation_loss(logits, batch, settings.argmax_weight)
        loss.backward()
        optimiser.step(clock.rate)
        agreed = logits[:from_own].argmax(-1) == batch.choices[:from_own, :, 0]
        number += 1
        speed = max(0.02, 1 / number)
        average += (loss.item() - average) * speed
        following += (agreed.float().mean().item() - following) * speed
        clock.seen += batch.tokens.numel()
        clock.seconds += time.monotonic() - begun
        figures = {
            "loss": average,
            "own_text_agreement": following,
            "tokens": clock.seen,
            "tokens_per_second": clock.seen / clock.seconds,
        }
        report(name, clock.share, figures)
        if time.monotonic() - kept > settings.checkpoint_seconds:
            kept = time.monotonic()
            saved = {
                "model": draft.state_dict(),
                "optimiser": optimiser.state(),
                "number": number,
                "average": average,
                "following": following,
                "seen": clock.seen,
                "seconds": clock.seconds,
            }
            save_atomically(checkpoint, saved)
    facts = {
        "tokens": clock.seen,
        "seconds": clock.seconds,
        "own_text_tokens": own.tokens.numel(),
        "corpus_text_tokens": read.tokens.numel(),
        "own_text_agreement": following,
    }
    save_atomically(done, {"model": draft.state_dict(), "facts": facts})
    return done


# --- evaluation and export --------------------------------------------------------------------


@torch.inference_mode()
def corpus_loss(model: Any, rows: torch.Tensor) -> float:
    """Mean next-token loss in nats over rows [n, length] of token ids."""
    total = 0.0
    for row in rows:
        logits = model(row[None, :-1], use_cache=False).logits[0].float()
        total += F.cross_entropy(logits, row[1:]).item()
    return total / len(rows)


def distinct_share(trajectories: list[Trajectory], n: int = 4) -> float:
    """Share of the generated n-grams that are distinct: how little the target repeats itself."""
    grams = [
        tuple(t.tokens[start : start + n].tolist())
        for t in trajectories
        for start in range(t.prompt_length, len(t.tokens) - n + 1)
    ]
    return len(set(grams)) / max(1, len(grams))


@torch.inference_mode()
def forward_seconds(
    models_by_name: dict[str, Any], *, context: int = 192, turns: int = 30, turn: int = 8
) -> dict[str, float]:
    """Median seconds of a forward of one cached token, one thread, the models taking turns.

    A turn is `turn` forwards in a row, as a draft takes them between two of the target's.
    """
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    prompt = torch.zeros(1, context, dtype=torch.long)
    caches = {name: DynamicCache(config=m.config) for name, m in models_by_name.items()}
    times: dict[str, list[float]] = {name: [] for name in models_by_name}
    for name, model in models_by_name.items():
        model(prompt, past_key_values=caches[name])
    for _ in range(turns):
        for name, model in models_by_name.items():
            for _ in range(turn):
                begun = time.perf_counter()
                model(prompt[:, :1], past_key_values=caches[name])
                times[name].append(time.perf_counter() - begun)
    torch.set_num_threads(threads)
    return {name: statistics.median(taken) for name, taken in times.items()}


def export(settings: Settings, work: Path, tokenizer: PreTrainedTokenizerFast, out: Path) -> None:
    """Write `out`/weights/<name>, Hugging Face folders in bfloat16, and `out`/prompts.json."""
    trained = {"target": sharpen(settings, work, tokenizer)}
    for name, shape in settings.drafts.items():
        trained[name] = build(shape, settings, tokenizer.eos_token_id)
        trained[name].load_state_dict(torch.load(work / f"{name}.pt", weights_only=True)["model"])
    for name, model in trained.items():
        folder = out / "weights" / name
        model.bfloat16().save_pretrained(folder)
        tokenizer.save_pretrained(folder)
    references = []
    for split in corpus.SPLITS:
        count = {"held_out": settings.held_out_prompts, "seen": settings.seen_prompts}[split]
        references += corpus.choose_references(split, tokenizer, count, modules=settings.modules)
    corpus.save_references(references, out / "prompts.json")


def evaluate(
    settings: Settings, tokenizer: PreTrainedTokenizerFast, out: Path, report: Report
) -> dict[str, Any]:
    """The exported models measured as they ship: loss, alignment by split, forward times.

    Alignment is in float32 over the bundled prompts' greedy trajectories.
    """
    loaded = {
        name: LlamaForCausalLM.from_pretrained(out / "weights" / name, dtype=torch.float32).eval()
        for name in ("target", *settings.drafts)
    }
    held_out = corpus.encode_documents(tokenizer, corpus.texts("held_out", settings.modules))
    count = min(96, sum(map(len, held_out)) // settings.row_tokens)
    rows = Rows(held_out, settings.row_tokens, settings.seed).batch(0, count)
    results: dict[str, Any] = {"held_out_tokens": rows.numel(), "held_out_loss": {}}
    for name, model in loaded.items():
        results["held_out_loss"][name] = corpus_loss(model, rows)
    soft = copy.deepcopy(loaded["target"])
    with torch.no_grad():
        soft.model.norm.weight.div_(settings.sharpness)
    results["held_out_loss"]["target before sharpening"] = corpus_loss(soft, rows)

    results |= {"alignment": {}, "distinct": {}}
    for done, split in enumerate(corpus.SPLITS, start=1):
        prompts = corpus.resolve_prompts(split, tokenizer, path=out / "prompts.json")
        ids = [tokenizer(text)["input_ids"] for _, text in prompts]
        whole = greedy_trajectories(loaded["target"], ids, settings.new_tokens)
        # What comes before a small model begins to repeat itself is the harder part.
        opening = [
            Trajectory(t.tokens[: t.prompt_length + OPENING], t.prompt_length) for t in whole
        ]
        for key, trajectories in ((split, whole), (f"{split}_first_{OPENING}", opening)):
            results["alignment"][key] = {
                name: measure_alignment(loaded["target"], loaded[name], trajectories).as_dict()
                for name in settings.drafts
            }
        results["distinct"][split] = distinct_share(whole)
        report("evaluate", done / 3, {})
    alternating = forward_seconds(loaded, turns=240, turn=1)
    results["alternating_ratio"] = {
        name: seconds / alternating["target"] for name, seconds in alternating.items()
    }
    results["forward_ms"] = {}
    for dtype in (torch.float32, torch.bfloat16):
        taken = forward_seconds({name: model.to(dtype) for name, model in loaded.items()})
        results["forward_ms"][str(dtype).removeprefix("torch.")] = {
            name: 1000 * seconds for name, seconds in taken.items()
        }
    report("evaluate", 1.0, {})
    return results


def facts(settings: Settings, work: Path, out: Path) -> dict[str, Any]:
    """What the card tells about the training: tokens, times, shapes and sizes."""
    shapes = {"target": settings.target, **settings.drafts}
    found: dict[str, Any] = {"python": platform.python_version(), "models": {}}
    for name, shape in shapes.items():
        model = LlamaForCausalLM.from_pretrained(out / "weights" / name)
        files = (out / "weights" / name).iterdir()
        training = torch.load(work / f"{name}.pt", weights_only=True)["facts"]
        found["models"][name] = {
            "parameters": model.num_parameters(),
            "bytes": sum(file.stat().st_size for file in files),
            **shape.model_dump(),
            **training,
        }
    return found


def train_pair(settings: Settings, work: Path, out: Path, report: Report) -> dict[str, Any]:
    """The whole recipe into `out` (weights, prompts); returns facts and figures.

    Finished phases found in `work` are not run again.
    """
    torch.set_num_threads(settings.threads)
    work.mkdir(parents=True, exist_ok=True)
    out.mkdir(parents=True, exist_ok=True)
    tokenizer = train_tokenizer(settings, work)
    report("tokenizer", 1.0, {})
    train_target(settings, work, tokenizer, report)
    target = sharpen(settings, work, tokenizer)
    own, read = Teaching(settings, work, tokenizer, target).all(report)
    for name in settings.drafts:
        distil(settings, work, name, tokenizer.eos_token_id, own, read, report)
    export(settings, work, tokenizer, out)
    results = evaluate(settings, tokenizer, out, report)
    return {"facts": facts(settings, work, out), "results": results}
