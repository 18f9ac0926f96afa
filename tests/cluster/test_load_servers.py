"""The servers of a comparison: ours as `specdec serve` takes it, vLLM's with the same tokens."""

from pathlib import Path

import pytest

from cluster.load_comparison import Contestant, compare_servers
from cluster.load_servers import other_servers, our_servers
from cluster.serving.cores import Cores
from jobs.choice import read_config
from specdec_core.config import AUTOREGRESSIVE, Configuration, PairSpec, RunnerSettings, parse
from specdec_core.evidence.load.plan import LoadPlan
from specdec_core.evidence.load.requests import LoadRecord
from specdec_core.evidence.load.result import LoadRow
from specdec_core.evidence.parts import Parts
from specdec_core.models.location import located
from specdec_core.models.pair import load_pair
from specdec_core.prompts.prompt_sets import load_prompts
from specdec_core.servers.server import Mode
from specdec_core.servers.table import SERVERS
from specdec_core.servers.vllm.process import VENV
from tests.local_server import engine_server

CHAIN = {"kind": "draft_model", "policy": {"kind": "confidence_product", "threshold": 0.3}}
HYBRID = {"kind": "hybrid", "lookup": {"kind": "suffix"}, "otherwise": CHAIN}
BY_LOAD = {
    "method": "draft_model",
    "num_speculative_tokens": 5,
    "num_speculative_tokens_per_batch_size": [[1, 1, 5], [2, 3, 2], [4, 1024, 0]],
}


def test_ours_are_started_with_their_file_slots_and_cores(tiny_pair, tmp_path):
    plan = LoadPlan(pair=tiny_pair.spec, rows=({"drafter": {"kind": "suffix"}},))
    contestants = list(our_servers(plan, tiny_pair, ["serve"], Cores((3,), (4,)), tmp_path))
    assert [contestant.row.autoregressive for contestant in contestants] == [True, False]
    for contestant in contestants:
        command = contestant.server(7).command(8123)
        assert command[0] == "serve"
        assert "--fresh" in command
        chosen, _ = read_config(Path(command[command.index("--config") + 1]))
        assert chosen.configuration == contestant.row.configuration
        assert chosen.pair == tiny_pair.spec
        for option, value in {"--slots": "7", "--port": "8123", "--cores": "3"}.items():
            assert command[command.index(option) + 1] == value


@pytest.mark.long
@pytest.mark.skipif(not VENV.exists(), reason="vLLM is not installed; `make bench-peers` does")
def test_vllm_writes_the_same_under_the_same_load(tmp_path):
    """On the bundled pair: vLLM has no attention for heads as narrow as the tiny pair's."""
    runner = RunnerSettings(target_dtype="float32", draft_dtype="float32", max_length=512)
    pair = load_pair(PairSpec(drafts={"small": "bundled:draft-small"}, runner=runner))
    plan = LoadPlan(
        pair=pair.spec, clients=(2,), requests=4, repeats=1, max_new_tokens=24, peers=("vllm",)
    )
    prompts = load_prompts(plan.prompts.source, plan.needed, pair.tokenizer)
    cores = Cores.divide(1)
    row = LoadRow(name="autoregressive", group="specdec", autoregressive=True)
    ours = Contestant(row, lambda slots: engine_server(pair, AUTOREGRESSIVE, slots))
    hybrid = parse(Configuration, {"drafter": HYBRID}, "test")
    vllm = SERVERS["vllm"]
    mine = [
        Mode("by load", BY_LOAD | {"model": located("bundled:draft-small")}, with_ours=True),
        vllm.plug_in_mode(hybrid, "plug-in"),
    ]
    plain, *own, export, plugged = other_servers(vllm, pair, cores, True, tmp_path, mine)
    draft = next(c for c in own if "draft model" in c.row.name)
    assert plugged.row.name == "plug-in"
    workload = plan.workload(prompts, pair)
    with Parts.open(tmp_path, {}, LoadRecord) as parts:
        servers = [ours, plain, draft, export, plugged]
        expected, *rows = compare_servers(plan, servers, workload, cores, parts)
    (load,) = plan.loads
    for found in rows:
        assert found.errors(load) == 0, found.runs
        assert found.equal_texts(load, expected) == (4, 4), found.name
