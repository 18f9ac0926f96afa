"""Generator functions as parallel Ray tasks."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any

import ray
from ray.exceptions import RayError, RayTaskError

from cluster.session import ray_session, resources

ATTEMPTS = 3  # at a call that is lost with its process or node


def in_parallel(
    function: Callable[..., Iterator[Any]],
    calls: Mapping[str, tuple[Any, ...]],
    threads: int,
    device: str,
    failed: Callable[[str, str], None],
) -> Iterator[tuple[str, Any]]:
    """Call `function` with each of `calls`, in a process with `threads` threads, and on a GPU where
    `device` allows one. Yields each value of a call with the call's label.

    A call starts again when its process is lost. `failed` gets the label of a call that raised an
    error, and the reason.
    """
    if not calls:
        return
    with ray_session():
        needs = resources(threads, device)
        task = ray.remote(
            num_returns="streaming",
            num_cpus=needs["CPU"],
            num_gpus=needs["GPU"],
            max_retries=0,  # a repeated generator would begin anew in the middle of its values
            max_calls=0,  # the process is kept for the next call
        )(function)
        attempts = dict.fromkeys(calls, ATTEMPTS)
        running: dict[Any, str] = {task.remote(*call): label for label, call in calls.items()}
        try:
            while running:
                generator: Any = ray.wait(list(running))[0][0]
                label = running[generator]
                try:
                    value = ray.get(next(generator))
                except StopIteration:
                    del running[generator]
                except RayTaskError as error:
                    del running[generator]
                    lines = str(error.cause).strip().splitlines()
                    failed(label, lines[-1] if lines else type(error.cause).__name__)
                except RayError:  # the process is lost
                    del running[generator]
                    attempts[label] -= 1
                    if attempts[label]:
                        running[task.remote(*calls[label])] = label
                    else:
                        failed(label, "its worker was lost")
                else:
                    yield label, value
        finally:
            for generator in running:
                ray.cancel(generator)
