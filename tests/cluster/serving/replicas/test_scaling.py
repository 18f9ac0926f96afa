"""Ray Serve starts a second engine under load, and stops one that is not needed."""

from __future__ import annotations

import re
from concurrent.futures import ThreadPoolExecutor

import pytest

from cluster.serving.replicas.number import Replicas
from specdec_core.config import PairSpec
from tests.cluster.serving.replicas.test_replicas import BODIES, answer, health, http, served, wait


@pytest.mark.long
def test_a_replica_comes_under_load_and_goes_when_idle(
    ray_running: None, tiny_spec: PairSpec
) -> None:
    def replicas() -> int:
        return len(health(url)["replicas"])

    def both_answer() -> bool:
        """Send 16 requests at once, of which a replica decodes four together."""
        bodies = [{**BODIES[0], "prompt": "x" * n} for n in range(1, 17)]
        [*pool.map(lambda body: answer(url, body), bodies)]
        page = http.get(f"{url}/metrics").text
        ended = re.findall(r'request_success_total{.*finished_reason="length".*} (\S+)', page)
        return len(ended) == 2 and all(float(count) > 0 for count in ended)

    with served(tiny_spec, Replicas(1, 2, up=1, down=10)) as url, ThreadPoolExecutor(16) as pool:
        assert replicas() == 1
        wait(both_answer)
        wait(lambda: replicas() == 1)
        assert http.get(f"{url}/ready").json() == {"ready": True}
