"""One device for one actor: the GPU that Ray gave it, else a core of the machine for itself."""

from __future__ import annotations

import errno
import logging
import os
import socket
import tempfile
import time
from contextlib import suppress
from functools import cache
from typing import Any

import torch

from specdec_core.config import PairSpec

logger = logging.getLogger(__name__)

# Seconds that a process may take to end after Ray has given its CPU to the next.
_LEAVING = 3.0

_held: list[socket.socket] = []  # a lock lasts as long as its open socket


@cache
def claim_device() -> torch.device:
    """The device of this process alone; called when an actor starts, and the same every time.

    On a GPU node it is the GPU that Ray made visible. Otherwise it is a core that no other such
    process on this machine has: the process is pinned to it, with one torch thread. The core is
    free again when the process ends. Where Ray was given more CPUs than the machine has cores, the
    process shares all cores, after a warning.
    """
    import ray

    if ray.get_runtime_context().get_accelerator_ids().get("GPU"):
        # The only one that this process sees.
        torch.cuda.set_device(0)
        return torch.device("cuda", 0)
    claim_core()
    torch.set_num_threads(1)
    return torch.device("cpu")


def placed_spec(spec: PairSpec) -> PairSpec:
    """A pair as this process runs it: on its own device, whichever devices another process sees. On
    a CPU core it has one thread: several threads would share the core."""
    changes: dict[str, Any] = {"device": claim_device().type}
    if changes["device"] == "cpu":
        changes["threads"] = 1
    return spec.with_runner(**changes)


def claim_core() -> int | None:
    """Pin this process to a core that no other process has claimed, and return its number; None,
    after a warning, if there is none."""
    cores = sorted(os.sched_getaffinity(0))
    deadline = time.monotonic() + _LEAVING
    while True:
        if (core := next(filter(_lock, cores), None)) is not None:
            for thread in os.listdir("/proc/self/task"):  # Ray's, too
                with suppress(ProcessLookupError):  # it has ended
                    os.sched_setaffinity(int(thread), {core})
            return core
        if time.monotonic() > deadline:
            break
        time.sleep(0.1)
    logger.warning(
        "all %d cores have an actor each already: one more shares them (Ray was given more CPUs"
        " than this machine has cores)",
        len(cores),
    )
    return None


def _lock(core: int) -> bool:
    """Whether this process got the lock of a core, which it keeps until it ends.

    The lock is an abstract Unix socket, which is not in the file system: no other user can prepare
    a file with its name. Processes with another folder for temporary files use other locks.
    """
    lock = socket.socket(socket.AF_UNIX)
    try:
        # A name has at most 108 bytes.
        lock.bind(f"\0specdec-core-{core}-{tempfile.gettempdir()}".encode()[:108])
    except OSError as error:
        lock.close()
        if error.errno != errno.EADDRINUSE:
            raise
        return False
    _held.append(lock)
    return True
