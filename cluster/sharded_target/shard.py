"""A shard: the actor on one of the target's devices, with a part of the weights and caches."""

from __future__ import annotations

import inspect
import os
from collections.abc import Sequence
from contextlib import closing, suppress
from functools import cached_property, partial
from itertools import chain
from typing import Any

import psutil
import ray
import torch
import torch.distributed as dist
from torch import Tensor

from cluster.devices import claim_device, placed_spec
from cluster.session import listening_address
from cluster.sharded_target import operators
from cluster.sharded_target.exchange import (
    Address,
    Exchange,
    NcclExchange,
    SocketExchange,
    all_agree,
)
from cluster.sharded_target.messages import LARGEST, Call, ShardFailed, decode, encode
from cluster.sharded_target.shard_weights import load_heads, load_layers
from cluster.sharded_target.store import BoardStore
from specdec_core.base.errors import UserError
from specdec_core.base.wire import LinkLost, WireListener, connect
from specdec_core.config import PairSpec
from specdec_core.models.eager import EagerRunner
from specdec_core.models.fingerprints import fingerprint
from specdec_core.models.loading import load_skeleton, load_tokenizer
from specdec_core.models.packing import pack_linear_layers
from specdec_core.models.pair import Pair, load_drafts, load_pair
from specdec_core.models.runner import Batch, ModelRunner, Output

# The calls of a group: methods of the runner, and of the shard.
_OF_RUNNER = {"truncate", "keep", "fork", "expect", "watch_hidden"}
_OF_SHARD = {"open", "close", "mixes", "prefill", "forward", "logits"}


class Shard:
    """Rank `rank` of `parts`. Every rank gets the same calls in the same order. A single part runs
    the whole model, packed or compiled, as the engine's process would. The rank that answers also
    runs the drafts of `spec`, if any; calls to their runners do nothing on the other ranks.
    """

    def __init__(self, spec: PairSpec, split: str, rank: int, parts: int) -> None:
        self.split, self.rank, self.parts = split, rank, parts
        self.device = claim_device()
        self.spec = placed_spec(spec)
        # With split heads the first rank has the logits, with split layers the last rank.
        self.answers = rank == (parts - 1 if split == "layers" else 0)
        self.runners: dict[int, ModelRunner] = {}
        self.apart: set[int] = set()  # runners of drafts, on the rank that answers
        self.outputs: dict[int, list[Output]] = {}  # of each runner's last call of forward
        self._listener: WireListener | None = None

    def address(self) -> Address:
        """Where the other ranks reach this one."""
        self._listener = WireListener(listening_address(), LARGEST, patience=None)
        return self._listener.host, self._listener.port, self._listener.key

    def load(
        self, addresses: Sequence[Address] = (), board: ray.actor.ActorHandle | None = None
    ) -> None:
        """Connect to the other ranks, at these addresses and through `board`, and load this rank's
        part of the model."""
        spec = self.spec
        dtype = spec.runner.target_dtype
        if not addresses:
            pair = load_pair(spec.model_copy(update={"drafts": {}}))
            self.model = pair.target
            self._open = lambda slots, tokens: pair.open_runner(None, slots, cache_tokens=tokens)
        else:
            self.exchange = self._join(addresses, board)
            kind = dtype if dtype == "auto" else getattr(torch, dtype)
            load = load_heads if self.split == "heads" else load_layers
            self.model = load(spec.target, kind, self.exchange)
            if spec.runner.pack and not spec.runner.compile and self.device.type == "cpu":
                pack_linear_layers(self.model)
            self._open = self._open_part

    def _open_part(self, slots: int, cache_tokens: int | None) -> ModelRunner:
        """A runner of this rank's part, which all ranks open. Raises :class:`UserError` where no
        graph holds it on a GPU: alone, this rank cannot change to eager forwards."""
        runner = self.spec.runner
        eager = EagerRunner(
            self.model,
            slots,
            runner.max_length,
            compact=True if runner.compile else None,
            cache_tokens=cache_tokens,
            agree=partial(all_agree, self.exchange, self.device),
        )
        if not runner.compile:
            return eager
        from specdec_core.models.compiled import CompiledRunner  # torch's compilers take a second
        from specdec_core.models.compiled.failures import CannotCompile

        try:
            return CompiledRunner(eager, self._digest)
        except CannotCompile as reason:
            raise UserError(
                f"{self.spec.target}: no compiled graphs of its parts ({reason}): use --no-compile"
                " (runner.compile: false)"
            ) from None

    @cached_property
    def _digest(self) -> str:
        """What identifies the weights of this rank's part, and the exchanges in its graphs."""
        part = fingerprint(self.spec.target), self.split, str(self.rank), str(self.parts)
        return " ".join((*part, inspect.getsource(operators)))

    @cached_property
    def drafts(self) -> Pair:
        """The pair with its drafts alone, which are loaded when they are first needed."""
        spec = self.spec
        return Pair(
            spec, load_tokenizer(spec.target), load_skeleton(spec.target), load_drafts(spec)
        )

    def _join(self, addresses: Sequence[Address], board: ray.actor.ActorHandle | None) -> Exchange:
        assert self._listener is not None
        gpu = self.device.type == "cuda"
        if gpu or self.split == "heads":  # transformers splits heads by a process group
            os.environ["LOCAL_RANK"] = "0"  # of the devices that it sees
            if not gpu and (interface := _interface(self._listener.host)):
                os.environ.setdefault("GLOO_SOCKET_IFNAME", interface)
            assert board is not None
            self._store = BoardStore(board)  # PyTorch keeps only its own part of it
            dist.init_process_group(
                "nccl" if gpu else "gloo",
                store=self._store,
                rank=self.rank,
                world_size=self.parts,
                device_id=self.device if gpu else None,
            )
        if gpu:
            self._listener.close()
            return NcclExchange(self.rank, self.parts)
        return SocketExchange(self._listener, self.rank, addresses)

    def serve(self, host: str, port: int, key: bytes) -> None:
        """Serve the calls of the group at that address until the group is gone. The rank with the
        logits answers; the other ranks only report errors. Raises :class:`LinkLost` where the group
        cannot be reached."""
        with closing(connect(host, port, key, LARGEST, patience=None)) as wire, suppress(LinkLost):
            while True:
                for message in wire.receive(None):
                    answer = self._do(decode(message))
                    if self.answers or isinstance(answer, ShardFailed):
                        wire.send(encode(answer))

    def _do(self, calls: Sequence[Call]) -> Any:
        """Make `calls`; returns the answer to the last one."""
        answer = None
        try:
            for runner, name, arguments in calls:
                if runner in self.apart and not self.answers:
                    continue
                if name in _OF_RUNNER:
                    answer = getattr(self.runners[runner], name)(*arguments)
                elif name in _OF_SHARD:
                    answer = getattr(self, name)(runner, *arguments)
                else:
                    raise ValueError(f"{name}: no call of a shard")
        except Exception as error:
            return ShardFailed.by(operators.cause_of(error))
        return answer

    def open(
        self,
        number: int,
        slots: int,
        cache_tokens: int | None,
        draft: str | None = None,
        max_length: int | None = None,
    ) -> None:
        if draft is None:
            self.runners[number] = self._open(slots, cache_tokens)
            return
        self.apart.add(number)
        if self.answers:
            self.runners[number] = self.drafts.open_runner(
                draft, slots, None, max_length, cache_tokens
            )

    def close(self, number: int) -> None:
        self.runners.pop(number, None)
        self.outputs.pop(number, None)

    def mixes(self, number: int) -> bool:
        return self.runners[number].mixes

    def prefill(self, number: int, batches: Sequence[Batch]) -> None:
        """Forwards of `batches`, one after the other, until the device has computed them."""
        for batch in batches:
            self.runners[number].forward(batch)
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)

    def forward(
        self, number: int, batches: Sequence[Batch], logits: bool
    ) -> tuple[list[int], Tensor | None, Tensor | None] | None:
        """Forwards of `batches`, one after the other: with split layers, the next rank runs each
        while this rank runs the following one. The most likely tokens (n,), by
        :meth:`Output.choices`; the logits if requested, and hidden states if watched."""
        runner = self.runners[number]
        outputs = self.outputs[number] = [runner.forward(batch) for batch in batches]
        if not self.answers:
            return None
        chosen = [*chain(*(own for output in outputs for own in output.choices()))]
        hidden = [output.hidden for output in outputs if output.hidden is not None]
        return chosen, self.logits(number) if logits else None, _joined(hidden) if hidden else None

    def logits(self, number: int) -> Tensor | None:
        """Logits of the last call of :meth:`forward`."""
        if not self.answers:
            return None
        return _joined([output.logits for output in self.outputs[number]])


def _joined(parts: Sequence[Tensor]) -> Tensor:
    return parts[0] if len(parts) == 1 else torch.cat(list(parts))


def _interface(address: str) -> str | None:
    """The network interface with this address; gloo would take the one that the host's name
    resolves to."""
    for name, addresses in psutil.net_if_addrs().items():
        if address in (entry.address for entry in addresses):
            return name
    return None
