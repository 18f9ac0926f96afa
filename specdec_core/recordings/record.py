"""Run both models over real prompts once, and record what every draft length would have met.

For each prompt: the target's output; one teacher-forced pass of the target and of each draft over
it; the draft's continuation after each disagreement; and, to train acceptance heads, a draft pass
over a mixture of the target's tokens and the draft's (SpecDec++, §4.4).
"""

from __future__ import annotations

import random
import sys
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import torch
from torch import Tensor

from specdec_core.base.errors import UserError
from specdec_core.config import Configuration
from specdec_core.engine import Engine, Request
from specdec_core.engine.scheduler import Limits
from specdec_core.models.eagle import AnyHead
from specdec_core.models.local_runner import LocalRunner
from specdec_core.models.pair import Pair
from specdec_core.models.runner import Batch, ModelRunner
from specdec_core.prompts.prompt import Prompt, PromptSet
from specdec_core.recordings.schema import (
    DRAFTS,
    EVERY_ROW,
    EXAMPLE,
    EXAMPLES,
    NOTHING,
    PROMPTS,
    TRAJECTORY_ONLY,
    Header,
    Recording,
    Shard,
    save_header,
    write_shard,
)
from specdec_core.recordings.unrolled import ChainStart, HeadRecorder, draft_chains
from specdec_core.tokens.acceptance import Places
from specdec_core.tokens.sampling import RandomStream, warp

_CHUNK = 128  # positions of a teacher-forced forward
_BRANCHES = 8  # continuations drafted together
_SLOTS = 8  # prompts completed together
_SLOTS_ALONE = 32  # the same, for a target without drafts


def record_requests(
    pair: Pair, requests: Sequence[Request], folder: Path, /, **facts: Any
) -> Recording:
    """A recording of `requests` in `folder`, made in this process; `facts` are of its header.
    Raises :class:`UserError` for requests of other lengths or sampling than the header's."""
    decode = pair.tokenizer.decode
    prompts = [Prompt(asked.id, str(decode([*asked.tokens]))) for asked in requests]
    known = {
        "pair": pair.spec,
        "fingerprints": pair.fingerprints,
        "eos_token_ids": tuple(pair.eos_token_ids),
        "prompts": PromptSet.of(folder.name, prompts),
        "max_new_tokens": requests[0].max_new_tokens,
    }
    header = Header(**{**known, **facts})
    for asked in requests:
        if asked.max_new_tokens != header.max_new_tokens:
            raise UserError(f"{asked.id}: max_new_tokens: the requests of a recording share them")
        if asked.sampling not in (None, header.sampling):
            raise UserError(f"{asked.id}: sampling: the requests of a recording share it")
    save_header(header, folder)
    write_shard(Recorder(pair, header).record(list(enumerate(requests))), folder, 0)
    return Recording.open(folder)


class Recorder:
    """Records prompts with the models of `pair`, as `header` says. For a server's answers, the
    target of `pair` needs no weights, and the columns of its logits stay empty."""

    def __init__(self, pair: Pair, header: Header) -> None:
        # One request alone, as replays are compared with, attends by torch.
        self.pair, self.header = replace(pair, compact=False), header
        self.vocab_size = pair.target.config.get_text_config(decoder=True).vocab_size
        self.engine: Engine | None = None
        if header.served is None:
            # Many sequences share the memory of a few that have the greatest length.
            limits = Limits(
                _SLOTS if pair.drafts else _SLOTS_ALONE, cache_tokens=_SLOTS * pair.max_length
            )
            self.engine = Engine(self.pair, Configuration(sampling=header.sampling), limits=limits)
        self.drafts: dict[str, ModelRunner] = {}
        self.heads: dict[str, HeadRecorder] = {}
        for name, draft in pair.drafts.items():
            if isinstance(draft, AnyHead):
                layers, size = pair.feature_layers, self.vocab_size
                self.heads[name] = HeadRecorder(draft, layers, size, pair.max_length, header)
                continue
            self.drafts[name] = self.pair.open_runner(name, 1 + _BRANCHES)
            self.drafts[name].watch_hidden(True)

    @torch.inference_mode()
    def record(
        self,
        requests: Sequence[tuple[int, Request]],
        outputs: Sequence[Sequence[int]] | None = None,
        features: Sequence[Tensor | None] = (),
    ) -> Shard:
        """Record some prompts; each comes with its number in the prompt set. `outputs` are a
        server's answers; unset, the target's. For heads, `features` are the server's target's of
        each prompt and output (n, layers · width). Raises :class:`UserError` for a prompt that does
        not fit."""
        if outputs is None:
            assert self.engine is not None
            generations = self.engine.generate([request for _, request in requests])
            outputs = [generation.tokens for generation in generations]
        parts: dict[str, list[pa.Table]] = {}
        features = features or [None] * len(outputs)
        for (number, request), output, known in zip(requests, outputs, features, strict=True):
            for part, table in self._record(number, request, list(output), known):
                parts.setdefault(part, []).append(table)
        return {part: pa.concat_tables(tables) for part, tables in parts.items()}

    def _record(
        self, number: int, request: Request, output: list[int], features: Tensor | None
    ) -> Iterator[tuple[str, pa.Table]]:
        prompt = list(request.tokens)
        yield (
            PROMPTS,
            pa.table(
                {
                    "prompt": pa.array([number], pa.int32()),
                    "id": [request.id],
                    "tokens": pa.array([prompt], pa.list_(pa.int32())),
                    "output": pa.array([output], pa.list_(pa.int32())),
                }
            ),
        )
        p = None
        if self.engine is not None and (self.heads or self.drafts):
            forced = _forced(self.engine.target, prompt, output)
            p = self._distributions(torch.cat([logits for logits, _ in forced]))
            if self.heads:
                target, length = self.engine.target, len(prompt) + len(output) - 1
                assert isinstance(target, LocalRunner), "a head is recorded beside its target"
                features = target.features([0] * length, range(length))
        for name, head in self.heads.items():
            assert features is not None  # the server's, without an engine
            draw, rows = _DraftTokens(self, request), self._rows(name, request)
            for chain in head.chains(prompt, output, features, self._distributions, draw):
                t, tokens, q, hidden = chain.position, chain.tokens, chain.q, chain.hidden
                here = None if p is None else p[t : t + 1]
                compared = _compare(here, q[:1], tokens[:1], output[t : t + 1])
                rows.add([t], tokens[:1], q[:1], hidden[:1], compared)
                if len(tokens) > 1 and t < rows.known:
                    rows.add([t] * (len(tokens) - 1), tokens[1:], q[1:], hidden[1:])
            yield f"{DRAFTS}/{name}", rows.table(number)
        for name, runner in self.drafts.items():
            draw, rows = _DraftTokens(self, request), self._rows(name, request)
            chunks = list(_forced(runner, prompt, output))
            q = self._distributions(torch.cat([logits for logits, _ in chunks]))
            hidden = torch.cat([states for _, states in chunks if states is not None])
            drafted = draw(q, range(len(output)))
            compared = _compare(p, q, drafted, output)
            rows.add(range(len(output)), drafted, q, hidden, compared)
            if self.header.continuations:
                self._continue(runner, draw, rows, output, drafted)
            yield f"{DRAFTS}/{name}", rows.table(number)
            if self.header.mixing:
                yield (
                    f"{EXAMPLES}/{name}",
                    self._examples(runner, number, request, output, drafted, rows.known, p, q),
                )

    def _rows(self, draft: str, request: Request) -> _Rows:
        positions = self.header.short_drafts.get(draft, sys.maxsize)
        return _Rows(self.header.top_k, max(positions - len(request.tokens) + 1, 0))

    def _distributions(self, logits: Tensor) -> Tensor:
        """The distributions that are sampled from; at temperature 1 when decoding is greedy."""
        sampling = self.header.sampling
        return logits.float().softmax(dim=-1) if sampling.greedy else warp(logits, sampling)

    def _continue(
        self,
        runner: ModelRunner,
        draw: _DraftTokens,
        rows: _Rows,
        output: Sequence[int],
        drafted: Sequence[int],
    ) -> None:
        """Continue drafting after each disagreement. Row 0 of `runner` holds prompt and output."""
        ends = set(self.header.eos_token_ids)
        last = self.header.max_new_tokens - 2  # the target adds a token to every round
        starts = [
            ChainStart(y, t + 1, min(self.header.max_draft - 1, last - t, rows.known - 1 - t))
            for t, (y, x) in enumerate(zip(drafted, output, strict=True))
            if y != x and y not in ends
        ]
        starts = [start for start in starts if start.most > 0]
        for first in range(0, len(starts), _BRANCHES):
            batch = starts[first : first + _BRANCHES]
            held = [draw.prompt_tokens + start.position - 1 for start in batch]
            runner.fork(0, range(1, 1 + len(batch)), held)
            for chain in draft_chains(runner, batch, ends, self._distributions, draw):
                places = [chain.position - 1] * len(chain.tokens)
                rows.add(places, chain.tokens, chain.q, chain.hidden)

    def _examples(
        self,
        runner: ModelRunner,
        number: int,
        request: Request,
        output: Sequence[int],
        drafted: Sequence[int],
        known: int,
        p: Tensor | None,
        q: Tensor,
    ) -> pa.Table:
        """The token-mixed sequence Z of a prompt, and the state of each of its tokens. The draft's
        are among the first `known` only."""
        stream = random.Random(f"{request.seed}:mixing")
        agrees = np.equal(drafted, output)
        acceptance = agrees.astype(np.float32)
        accepted = agrees
        if not self.header.sampling.fixed_output:
            assert p is not None  # a server's answers are greedy
            chosen = torch.tensor(drafted, device=q.device)[:, None]
            ratio = p.gather(1, chosen) / q.gather(1, chosen)
            acceptance = ratio[:, 0].clamp(max=1).cpu().numpy()
            accepted = np.array([stream.random() < a for a in acceptance])
        from_draft = np.array([stream.random() >= self.header.mixing for _ in output])
        from_draft[known:] = False
        mixed = np.where(from_draft, drafted, output).tolist()
        # A token's state exists once it was fed: one position after the one it was drawn at.
        forced = _forced(runner, list(request.tokens), [*mixed, 0])
        states = [hidden for _, hidden in forced if hidden is not None]
        values = {
            "prompt": np.full(len(output), number),
            "position": np.arange(len(output)),
            "acceptance": acceptance,
            "y_accepted": accepted,
            "from_draft": from_draft,
        }
        columns = {name: pa.array(values[name], kind) for name, kind in EXAMPLE.items()}
        columns["hidden"] = _vectors(torch.cat(states)[1:])
        return pa.table(columns)


def _forced(
    runner: ModelRunner, prompt: Sequence[int], output: Sequence[int]
) -> Iterator[tuple[Tensor, Tensor | None]]:
    """Logits (n, vocabulary) before each token of `output`, and the hidden states (n, dimension)
    that the output layer read, where they are watched; in chunks, in row 0 of `runner`."""
    runner.truncate(0, 0)
    runner.prefill([0], [prompt[:-1]])
    fed = [prompt[-1], *output[:-1]]
    for start in range(0, len(fed), _CHUNK):
        chunk = fed[start : start + _CHUNK]
        after = runner.forward(Batch([0], [chunk]))
        yield after.logits, None if after.hidden is None else after.hidden.float()


class _DraftTokens:
    """Draws draft tokens from the draft's distributions at positions of the output."""

    def __init__(self, recorder: Recorder, request: Request) -> None:
        self.sampling = recorder.header.sampling
        self.prompt_tokens = len(request.tokens)
        self.stream = RandomStream(request.seed, recorder.vocab_size)
        self.stream.uniform = random.Random(f"{request.seed}:draft").random

    def __call__(self, q: Tensor, positions: Sequence[int]) -> list[int]:
        n = len(positions)
        places = [self.prompt_tokens + position for position in positions]
        at = Places(
            [self.sampling] * n, [self.stream] * n, places, lambda: q, lambda: q.argmax(dim=-1)
        )
        at.probs = q
        return at.draw().tolist()


def _compare(
    p: Tensor | None, q: Tensor, drafted: Sequence[int], output: Sequence[int]
) -> dict[str, Tensor]:
    """The columns of the trajectory that compare the output and the target's distributions p with
    the draft's q (N, vocabulary); without p those that need q alone."""
    y = torch.tensor(drafted, device=q.device)[:, None]
    x = torch.tensor(output, device=q.device)[:, None]
    q_x = torch.where(x < q.shape[1], q.gather(1, x.clamp(max=q.shape[1] - 1)), 0.0)
    columns = {"target_token": x[:, 0], "rank": (q > q_x).sum(dim=-1)}
    if p is None:
        return columns
    shared = p[:, : q.shape[1]]  # a draft model may lack the target's padding entries
    # 0 · log 0 is 0, but q · log 0 is −∞
    cross = torch.where(q > 0, q * shared.log(), 0.0).sum(dim=-1)
    return columns | {
        "target_probability": p.gather(1, x)[:, 0],
        "draft_token_target_probability": p.gather(1, y)[:, 0],
        "overlap": torch.minimum(shared, q).sum(dim=-1),
        "cross_entropy": -cross,
        "target_entropy": torch.special.entr(p).sum(dim=-1),
    }


class _Rows:
    """Collects a prompt's rows of one draft, which drafts at the first `known` positions."""

    def __init__(self, top_k: int, known: int) -> None:
        self.top_k, self.known = top_k, known
        self.parts: dict[str, list[Any]] = {}

    def add(
        self,
        positions: Sequence[int],
        tokens: Sequence[int],
        q: Tensor,
        hidden: Tensor,
        compared: dict[str, Tensor] | None = None,
    ) -> None:
        """Tokens drafted from `q` (n, vocabulary): tokens of the trajectory, `compared` with the
        target's, or else the tokens of one continuation."""
        n = len(tokens)
        steps = np.zeros(n, int) if compared is not None else np.arange(n) + 1
        chosen = torch.tensor(tokens, device=q.device)[:, None]
        top = q.topk(min(self.top_k, q.shape[1]), dim=-1).values
        top = torch.nn.functional.pad(top, (0, self.top_k - top.shape[1]))
        values = {
            "position": np.asarray(positions),
            "step": steps,
            "draft_token": np.asarray(tokens),
            "entropy": torch.special.entr(q).sum(dim=-1),
            "top_probability": top[:, 0],
            "probability": q.gather(1, chosen)[:, 0],
            "top_probs": top,
            "hidden": hidden.float(),
        }
        for name in TRAJECTORY_ONLY:
            values[name] = (compared or {}).get(name, [None] * n)
        if compared is not None and (beyond := values["position"] >= self.known).any():
            nothing = {"draft_token": NOTHING, "rank": q.shape[1], "probability": 0}
            if "overlap" in compared:
                nothing["overlap"] = 0
            for name, none in nothing.items():
                own = torch.as_tensor(values[name]).cpu()
                values[name] = own.masked_fill(torch.from_numpy(beyond), none)
        for name, value in values.items():
            value = value.cpu().numpy() if isinstance(value, Tensor) else value
            self.parts.setdefault(name, []).append(value)

    def table(self, number: int) -> pa.Table:
        n = sum(map(len, self.parts["step"]))
        columns = {"prompt": pa.array(np.full(n, number), pa.int32())}
        for name, kind in (EVERY_ROW | TRAJECTORY_ONLY).items():
            if name != "prompt":
                chunks = [pa.array(part, kind) for part in self.parts[name]]
                columns[name] = pa.concat_arrays(chunks)
        for name in ("top_probs", "hidden"):
            columns[name] = _vectors(np.concatenate(self.parts[name]))
        return pa.table(columns)


def _vectors(values: Tensor | np.ndarray) -> pa.FixedSizeListArray:
    """(n, d) as a column of n lists."""
    values = values.float().cpu().numpy() if isinstance(values, Tensor) else values
    flat = pa.array(np.ascontiguousarray(values, dtype=np.float32).reshape(-1))
    return pa.FixedSizeListArray.from_arrays(flat, values.shape[1])
