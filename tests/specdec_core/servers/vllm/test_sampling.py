"""Behind candidates that the plug-in is certain of, vLLM draws from the target's distribution."""

import json
import logging
import math
import subprocess
import tomllib
from itertools import product
from pathlib import Path

import numpy as np
import pytest
import torch

from specdec_core.servers.vllm.process import VENV, inherited_environment, library_environment
from specdec_core.servers.vllm.repairs import ENTRY_POINT, GROUP, NAME, repair
from specdec_core.servers.vllm.sampling import Spreading, expanded
from tests.peers import vllm_installed

PROGRAM = Path(__file__).with_name("sampling_counts.py")
LOGITS = [[1.0, 0.2, -0.5, 0.7], [0.0, 1.5, 0.3, -1.0], [0.4, -0.2, 0.9, 0.1]]  # after 0, 1, 2
CHAIN = [3, 1]
TEMPERATURES = [0.5, 1.7]
REQUESTS = 10_000  # of each temperature


def exact(temperature):
    """The chance of each text that a step can write, by the target alone."""
    weights = np.exp(np.array(LOGITS) / temperature)
    p = weights / weights.sum(axis=1, keepdims=True)
    texts: dict[str, float] = {}
    for tokens in product(range(4), repeat=3):
        agreed = next((n for n, token in enumerate(CHAIN) if tokens[n] != token), len(CHAIN))
        text = " ".join(map(str, tokens[: agreed + 1]))
        chance = float(np.prod([p[n, token] for n, token in enumerate(tokens)]))
        texts[text] = texts.get(text, 0.0) + chance
    return texts


def counted(tmp_path, repaired):
    """What was drawn, and what vLLM logged, with the entry point or with none."""
    asked = {
        "logits": LOGITS,
        "temperatures": TEMPERATURES,
        "requests": REQUESTS,
        "candidates": CHAIN,
    }
    environment = inherited_environment() | library_environment(tmp_path)
    if not repaired:
        environment["VLLM_PLUGINS"] = "none"
    done = subprocess.run(
        [str(VENV / "bin" / "python"), "-P", str(PROGRAM)],
        env=environment,
        input=json.dumps(asked),
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr[-2000:]
    return dict(json.loads(done.stdout.splitlines()[-1])), done.stdout + done.stderr


def deviation(counts, chances):
    """The largest difference between a text's count and what is expected, in standard errors;
    infinite where a text was written that cannot be."""
    if not counts.keys() <= chances.keys():
        return math.inf
    return max(
        abs(counts.get(text, 0) - REQUESTS * chance) / (REQUESTS * chance * (1 - chance)) ** 0.5
        for text, chance in chances.items()
    )


def written_to_a_copy(x, cu_num_tokens, num_tokens, replace_from=0, replace_to=0):
    """As vLLM's."""
    output = x.new_full((num_tokens,), 0.625)
    output.long().copy_(expanded(x, cu_num_tokens, num_tokens, replace_from, replace_to))
    return output


def not_replaced(x, cu_num_tokens, num_tokens, replace_from=0, replace_to=0):
    return expanded(x, cu_num_tokens, num_tokens, 0, 0)


@pytest.mark.parametrize("own", [written_to_a_copy, not_replaced])
def test_a_function_that_is_wrong_is_replaced_and_logged(own, caplog):
    spreading = Spreading(own, logging.getLogger("vllm.test"))
    with caplog.at_level(logging.INFO):
        for _ in range(2):
            found = spreading(torch.tensor([0.5, 0.0, 2.0]), torch.tensor([1, 3, 3]), 3, 0, 1)
            assert found.tolist() == [0.5, 1.0, 1.0]
    assert [record.getMessage()[-9:] for record in caplog.records] == [" repaired"]


def test_a_function_that_is_right_stays(caplog):
    def right(*args, **options):
        return expanded(*args, **options)

    spreading = Spreading(right, logging.getLogger("vllm.test"))
    with caplog.at_level(logging.INFO):
        assert spreading.chosen is right
    assert caplog.messages == [
        "specdec: this vLLM spreads temperatures over candidates rightly; nothing to repair"
    ]


def test_each_token_gets_the_temperature_of_its_request():
    temperatures, ends = torch.tensor([0.5, 0.0, 2.0]), torch.tensor([2, 2, 5])
    assert expanded(temperatures, ends, 5).tolist() == [0.5, 0.5, 2.0, 2.0, 2.0]
    assert expanded(temperatures, ends + 1, 6, 0, 1).tolist() == [0.5] * 3 + [2.0] * 3
    assert expanded(temperatures, torch.tensor([1, 2, 2]), 2, 0, 1).tolist() == [0.5, 1.0]


def test_the_entry_point_is_the_one_that_is_installed():
    project = tomllib.loads((Path(__file__).parents[4] / "pyproject.toml").read_text())["project"]
    assert project["entry-points"][GROUP] == {NAME: ENTRY_POINT}
    assert f"{repair.__module__}:{repair.__name__}" == ENTRY_POINT
    assert "vllm" in project["optional-dependencies"]


@pytest.mark.long
@vllm_installed
@pytest.mark.parametrize("repaired", [True, False])
def test_vllm_draws_from_the_targets_distribution_once_repaired(tmp_path, repaired):
    counts, logged = counted(tmp_path, repaired)
    assert ("specdec: this vLLM draws at wrong temperatures" in logged) == repaired
    found = [deviation(counts[f"{t:g}"], exact(t)) for t in TEMPERATURES]
    if repaired:
        assert max(found) < 4.5  # 20 texts: 1e-4 by chance
    else:
        # What vLLM does by itself. Were it mended, the repair could go.
        assert max(found) > 10
