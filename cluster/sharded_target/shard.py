"""A shard: the actor on one of the target's devices, with a part of the weights and caches."""

from __future__ import annotations

import os
import pickle
import traceback
from collections.abc import Sequence
from contextlib import closing, suppress
from dataclasses import dataclass
from functools import partial
from itertools import chain
from typing import Any

import psutil
import ray
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from cluster.devices import claim_device, placed_spec
from cluster.sharded_target.exchange import Exchange, NcclExchange, SocketExchange, all_agree
from cluster.sharded_target.shard_weights import load_heads, load_layers
from specdec_core.base.wire import LinkLost, connect
from specdec_core.config import PairSpec
from specdec_core.models.eager import EagerRunner
from specdec_core.models.location import located
from specdec_core.models.packing import PackedLinear, pack_linear_layers
from specdec_core.models.pair import load_pair
from specdec_core.models.runner import Batch, ModelRunner, Output

# A call of a shard: the number of a runner, a method of :class:`Shard` and its arguments.
Call = tuple[int, str, tuple[Any, ...]]


@dataclass(frozen=True)
class Failed:
    """A shard's answer when a call has raised an error."""

    error: Exception

    @classmethod
    def by(cls, error: Exception) -> Failed:
        """`error`, with its traceback as a note."""
        error.add_note("".join(traceback.format_exception(error)))
        try:
            pickle.loads(pickle.dumps(error))
        except Exception:  # some errors cannot be pickled, or not be built from their arguments
            return cls(RuntimeError("".join(traceback.format_exception(error))))
        return cls(error)


@dataclass(frozen=True)
class ShardFacts:
    """What a shard is and holds."""

    rank: int
    node: str
    pid: int
    device: str
    parameters: int
    weight_bytes: int


class Shard:
    """Rank `rank` of `parts`. Every rank gets the same calls in the same order. A single part runs
    the whole model, packed or compiled, as the engine's process would.
    """

    def __init__(self, spec: PairSpec, split: str, rank: int, parts: int) -> None:
        self.split, self.rank, self.parts = split, rank, parts
        self.device = claim_device()
        self.spec = placed_spec(spec)
        # Logits are with every rank where heads are split, with the last where layers are.
        self.answers = rank == (parts - 1 if split == "layers" else 0)
        self.runners: dict[int, ModelRunner] = {}
        self.outputs: dict[int, Output] = {}  # of each runner's last forward
        self._store: dist.TCPStore | None = None

    def address(self) -> tuple[str, int]:
        """The address at which the ranks meet, opened by rank 0."""
        host = ray.util.get_node_ip_address()
        self._store = dist.TCPStore(host, 0, self.parts, is_master=True, wait_for_workers=False)
        return host, self._store.port

    def load(self, address: tuple[str, int] | None) -> ShardFacts:
        """Join the other ranks and load this one's part of the model."""
        spec = self.spec
        name, dtype = located(spec.target), spec.runner.target_dtype
        if address is None:
            device = spec.runner.model_copy(update={"device": self.device.type})
            pair = load_pair(spec.model_copy(update={"drafts": {}, "runner": device}))
            self.model = pair.target
            self._open = lambda slots, tokens: pair.open_runner(None, slots, cache_tokens=tokens)
        else:
            exchange = self._join(address)
            kind = dtype if dtype == "auto" else getattr(torch, dtype)
            load = load_heads if self.split == "heads" else load_layers
            self.model = load(name, kind, exchange)
            if spec.runner.pack and self.device.type == "cpu":
                pack_linear_layers(self.model)
            length, agree = spec.runner.max_length, partial(all_agree, exchange, self.device)
            self._open = lambda slots, tokens: EagerRunner(
                self.model, slots, length, cache_tokens=tokens, agree=agree
            )
        weights = _weights(self.model)
        return ShardFacts(
            rank=self.rank,
            node=ray.get_runtime_context().get_node_id(),
            pid=os.getpid(),
            device=str(self.device),
            parameters=sum(p.numel() for p in weights),
            weight_bytes=sum(p.numel() * p.element_size() for p in weights),
        )

    def _join(self, address: tuple[str, int]) -> Exchange:
        os.environ["LOCAL_RANK"] = "0"  # of the devices that this process sees, it has the first
        store = self._store or dist.TCPStore(*address, self.parts, is_master=False)
        gpu = self.device.type == "cuda"
        host = ray.util.get_node_ip_address()
        if not gpu and (interface := _interface(host)):
            os.environ.setdefault("GLOO_SOCKET_IFNAME", interface)
        dist.init_process_group(
            "nccl" if gpu else "gloo",
            store=store,
            rank=self.rank,
            world_size=self.parts,
            device_id=self.device if gpu else None,
        )
        if gpu:
            return NcclExchange(self.rank, self.parts)
        return SocketExchange(host, self.rank, self.parts)

    def serve(self, host: str, port: int, key: bytes) -> None:
        """Serve the calls of the group at that address until it is gone. The rank that has the
        logits answers; the others only report errors. Raises :class:`LinkLost` where the group
        cannot be reached."""
        with closing(connect(host, port, key, patience=None)) as wire, suppress(LinkLost):
            while True:
                for calls in wire.receive(None):
                    answer = self._do(calls)
                    if self.answers or isinstance(answer, Failed):
                        wire.send(answer)

    def _do(self, calls: Sequence[Call]) -> Any:
        """Make `calls`; what the last of them returns."""
        answer = None
        try:
            for runner, name, arguments in calls:
                answer = getattr(self, name)(runner, *arguments)
        except Exception as error:
            return Failed.by(error)
        return answer

    def alive(self) -> bool:
        return True

    # A runner's calls: the operations of :class:`ModelRunner`.

    def open(self, number: int, slots: int, cache_tokens: int | None) -> None:
        runner = self.runners[number] = self._open(slots, cache_tokens)
        if isinstance(runner, EagerRunner):
            # All ranks decide how rows are run before there are any.
            with torch.inference_mode():
                runner.prepare()

    def close(self, number: int) -> None:
        self.runners.pop(number, None)
        self.outputs.pop(number, None)

    def expect(self, number: int, parents: Sequence[int]) -> None:
        self.runners[number].expect(parents)

    def mixes(self, number: int) -> bool:
        return self.runners[number].mixes

    def watch_hidden(self, number: int, watch: bool) -> None:
        if self.answers:
            self.runners[number].watch_hidden(watch)

    def truncate(self, number: int, row: int, length: int) -> None:
        self.runners[number].truncate(row, length)

    def blank(self, number: int, row: int, length: int) -> None:
        self.runners[number].blank(row, length)

    def keep(self, number: int, row: int, start: int, kept: Sequence[int]) -> None:
        self.runners[number].keep(row, start, kept)

    def fork(self, number: int, row: int, rows: Sequence[int], lengths: Sequence[int]) -> None:
        self.runners[number].fork(row, rows, lengths)

    def forward(
        self, number: int, batch: Batch, logits: bool
    ) -> tuple[list[int], Packed | None, Packed | None] | None:
        """The most likely tokens (n,), by :meth:`Output.choices`; the logits if requested, and
        hidden states if watched."""
        output = self.outputs[number] = self.runners[number].forward(batch)
        if not self.answers:
            return None
        hidden = None if output.hidden is None else pack(output.hidden)
        return list(chain(*output.choices())), self.logits(number) if logits else None, hidden

    def logits(self, number: int) -> Packed | None:
        """Logits of the last forward."""
        return pack(self.outputs[number].logits) if self.answers else None


def _weights(model: nn.Module) -> list[Tensor]:
    """The weights that this process holds: tied ones once, packed layers in their packed form."""
    local = (p.to_local() if isinstance(p, DTensor) else p for p in model.parameters())
    packed = [m._packed for m in model.modules() if isinstance(m, PackedLinear)]
    return [*{p.data_ptr(): p for p in local}.values(), *packed]


@dataclass(frozen=True)
class Packed:
    """A tensor in a message."""

    content: bytearray
    shape: tuple[int, ...]
    dtype: torch.dtype

    def tensor(self, device: torch.device) -> Tensor:
        return torch.frombuffer(self.content, dtype=self.dtype).view(self.shape).to(device)


def pack(tensor: Tensor) -> Packed:
    """`tensor` for a message; copied from its device."""
    content = tensor.cpu().contiguous().view(torch.uint8).numpy()
    return Packed(bytearray(content), tuple(tensor.shape), tensor.dtype)


def _interface(address: str) -> str | None:
    """The network interface with this address; gloo would take the one that the host's name
    resolves to."""
    for name, addresses in psutil.net_if_addrs().items():
        if address in (entry.address for entry in addresses):
            return name
    return None
