"""One way to be connected to Ray: the cluster that is there, or a quiet local one."""

from __future__ import annotations

import logging
import os
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import ray
from ray.exceptions import RayTaskError

from specdec_core.errors import UserError

# Ray and Tune read these when they start, and a local cluster hands them to its workers.
QUIET = {
    "RAY_USAGE_STATS_ENABLED": "0",
    "RAY_AIR_NEW_OUTPUT": "0",  # Tune's older console output, which verbose=0 silences altogether
    "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "0",
    "TUNE_DISABLE_AUTO_CALLBACK_LOGGERS": "1",
    # Ctrl-C ends a sweep at once: what is finished is on disk, Tune has nothing to save.
    "TUNE_DISABLE_SIGINT_HANDLER": "1",
    "RAY_CHDIR_TO_TRIAL_DIR": "0",  # models may be given as relative folders
    "RAY_worker_niceness": "0",  # else 15, and times are those of a process that others displace
    "TOKENIZERS_PARALLELISM": "false",
}


@contextmanager
def ray_session() -> Iterator[None]:
    """Connect to the cluster that `RAY_ADDRESS` names (set inside a Ray job), else start a local
    one and stop it at the end. A connection that is already there is used and left alone."""
    for name in ("ray.tune", "ray.train", "ray.data"):
        logging.getLogger(name).setLevel(logging.ERROR)
    if ray.is_initialized():
        yield
        return
    for name, value in QUIET.items():
        os.environ.setdefault(name, value)
    address = os.environ.get("RAY_ADDRESS") or "local"
    local = {"num_cpus": os.cpu_count(), "include_dashboard": False} if address == "local" else {}
    quiet: dict[str, Any] = {"logging_level": logging.ERROR, "log_to_driver": False}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)
        try:
            ray.init(address=address, **local, **quiet)
        except (ConnectionError, ValueError) as error:
            reason = " ".join(str(error).split())
            raise UserError(f"no Ray cluster at {address} (RAY_ADDRESS): {reason}") from None
    try:
        yield
    finally:
        ray.shutdown()


def get(references: Any) -> Any:
    """`ray.get`, with bad input found by a worker as the :class:`UserError` that it is."""
    try:
        return ray.get(references)
    except RayTaskError as error:
        if isinstance(error.cause, UserError):
            raise UserError(str(error.cause)) from None
        raise


def resources(threads: int, device: str) -> dict[str, float]:
    """What a process that decodes asks of the cluster: its threads, and a GPU where there are any
    and it may use one. Raises :class:`UserError` for more threads than any cluster node has."""
    has_gpu = device != "cpu" and ray.cluster_resources().get("GPU", 0) >= 1
    most = max(node["Resources"].get("CPU", 0) for node in ray.nodes() if node["Alive"])
    if threads > most:
        raise UserError(f"runner.threads: {threads} asked for, the cluster's nodes have {most:g}")
    return {"CPU": threads, "GPU": int(has_gpu)}
