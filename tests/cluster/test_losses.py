"""What a stage loses with a process of its models, or with a node that has one: nothing.

A stage runs while a shard of the target, the draft's process or a node is killed, and gives the
tokens and counts of models in one process. What is timed meanwhile is timed again.
"""

import json
import os
import signal
from concurrent.futures import ProcessPoolExecutor
from functools import cache
from multiprocessing import get_context
from threading import Timer

import httpx
import pytest
import ray
import ray.serve
from ray.cluster_utils import Cluster

from cluster.placed_engine import loaded_pair, placed_engine
from cluster.placement import Placement
from cluster.recording import run_recording
from cluster.serving import deployment
from cluster.serving.start import Start
from cluster.session import QUIET
from cluster.sweep.run import run_sweep
from research.papers.plan import PaperPlan
from research.papers.run import run_papers
from specdec_core.config import AUTOREGRESSIVE
from specdec_core.engine import Engine, Request
from specdec_core.engine.scheduler import Limits
from specdec_core.engine.turns import requests_of
from specdec_core.evidence.bench.benchmark import BenchPlan, run_bench
from specdec_core.evidence.certificate.certify import Extent, check_all
from specdec_core.measure.profiling import profile_pair
from specdec_core.models.pair import load_pair
from specdec_core.prompts.prompt_sets import load_prompts
from specdec_core.recordings.plan import SHARD, RecordingPlan
from specdec_core.recordings.replay import Replay
from specdec_core.search.observer import SweepObserver
from specdec_core.servers.process import free_port
from specdec_core.tokens.statistics import Counts, TokenOrigin
from tests.cluster.test_faults import actors
from tests.commands import prompts_file, sweep_plan
from tests.configurations import FOUR, PEARL
from tests.observers import Heard

PLACEMENT = Placement.model_validate({"target": {"devices": 2, "split": "layers"}})
NODES = 6  # the models take three and the measuring process one, and two may be lost
TOKENS = 160
SOON = 0.3  # seconds after the first step of a stage


@cache
def nodes() -> Cluster:
    """Nodes with a core each, beside a head without one."""
    os.environ.update(QUIET)
    # Ray tells of a dead node after seconds, not after a minute.
    noticing = {"health_check_period_ms": 500, "health_check_failure_threshold": 8}
    head = {"num_cpus": 0, "include_dashboard": False, "_system_config": noticing}
    found = Cluster(initialize_head=True, head_node_args=head)
    ray.init(found.address, log_to_driver=False, logging_level="ERROR")
    return found


def leave() -> None:
    ray.shutdown()
    nodes().shutdown()


class Loss(Heard, SweepObserver):
    """Kills `what` soon after the first step of each of the stages `during`."""

    def __init__(self, what: str, *during: str) -> None:
        super().__init__()
        self.what, self.during = what, during
        self.timers: list[Timer] = []
        self.happened = 0

    def step(self) -> None:
        super().step()
        following = self.during[len(self.timers) :]
        if following and self.stages[-1].startswith(following[0]):
            self.timers.append(Timer(SOON, self.kill))
            self.timers[-1].start()

    def recorded(self, prompts: int, tokens: int) -> None:
        self.step()

    def kill(self) -> None:
        title = {"draft": "Draft", "measuring": "MeasuringProcess"}.get(self.what, "Shard")
        every = [*nodes().worker_nodes, nodes().head_node]  # which may have what measures
        node = next(node for node in every if title in actors(node))
        if self.what == "node":
            nodes().remove_node(node, allow_graceful=False)
        else:
            os.kill(actors(node)[title], signal.SIGKILL)
        self.happened += 1

    @property
    def noticed(self) -> bool:
        return any("was lost; what it disturbed is measured again" in w for w in self.warnings)


def generate(spec, prompts, home, what):
    whole, loss = load_pair(spec), Loss(what)
    request = Request("a", tuple(whole.tokenizer("def main():")["input_ids"]), TOKENS)
    [expected] = Engine(whole).generate([request])
    tokens = []
    with placed_engine(spec, PEARL, Limits(1), PLACEMENT) as engine:
        for chunk in engine.stream(request):
            tokens += chunk.tokens
            if not loss.happened and TokenOrigin.DRAFT in chunk.origins:
                loss.kill()
    assert tokens == expected.tokens
    return loss


def serve(spec, prompts, home, what):
    """A stream goes on, with the text of an answer before the loss."""
    loss, text = Loss(what), ""
    start = Start(deployment.deployment_of(spec, PEARL), placement=PLACEMENT)
    greedy = {"prompt": "def main():", "temperature": 0, "ignore_eos": True}
    body = {"model": start.name, "max_tokens": TOKENS, **greedy}
    with deployment.serving(start, port=free_port()) as url, client_at(url) as client:
        whole = client.post("/v1/completions", json=body).json()["choices"][0]["text"]
        with client.stream("POST", "/v1/completions", json={**body, "stream": True}) as answer:
            for line in answer.iter_lines():
                if line.startswith("data: {"):
                    text += json.loads(line.removeprefix("data: "))["choices"][0]["text"]
                    if not loss.happened:
                        loss.kill()
    ray.serve.shutdown()
    assert text == whole
    return loss


def client_at(url):
    return httpx.Client(base_url=url, timeout=300, trust_env=False)


def record(spec, prompts, home, what):
    loss, whole = Loss(what, "recording"), load_pair(spec)
    values = {"pair": spec, "prompts": {"source": str(prompts)}, "max_new_tokens": TOKENS}
    plan = RecordingPlan.model_validate(values)
    recording = run_recording(plan, home, observer=loss, placement=PLACEMENT)
    requests = requests_of(load_prompts(str(prompts)), whole, TOKENS)
    expected = Engine(whole, FOUR).generate(requests)
    outputs = [output.tolist() for output in recording.prompts.outputs]
    assert outputs == [generation.tokens for generation in expected]
    assert Replay(recording).run(FOUR).counts == Counts.of(expected)
    return loss


def sweep(spec, prompts, home, what):
    """One configuration is counted before the loss, the other one during it; the measuring
    process counts none."""
    during = ("timing",) if what == "measuring" else ("counting", "timing")
    loss, whole = Loss(what, *during), load_pair(spec)
    chain = {"kind": "draft_model", "policy": {"kind": "fixed", "max_tokens": 4}}
    search = [{"drafter": each} for each in (chain, {"kind": "pearl", "window": 4, "wait": 2})]
    once = {"finalists": 2, "repeats": 1, "race": {"seconds": 0, "further": 0, "challengers": 0}}
    live = {"prompts": {"source": str(prompts), "limit": 3}, "replay": False, "cluster": PLACEMENT}
    plan = sweep_plan(spec, prompts, max_new_tokens=TOKENS, search=search, **once, **live)
    result, _ = run_sweep(plan, home, observer=loss)
    requests = requests_of(load_prompts(str(prompts), 3), whole, TOKENS)
    assert len(result.trials) == 3  # with autoregressive decoding
    for trial in result.trials:
        counts, configuration = Counts(**trial.counts), trial.configuration
        if configuration.asynchronous:  # its rounds depend on timing
            assert counts.n == Counts.of(Engine(whole).generate(requests)).n
            assert counts.n_accepted
        else:
            assert counts == Counts.of(Engine(whole, configuration).generate(requests))
    assert len(result.timings) == 2
    assert all(timing.differing_outputs == 0 for timing in result.timings)
    assert loss.noticed
    return loss


def certify(spec, prompts, home, what):
    loss = Loss(what, "2 contestants", "sampled texts")
    extent = Extent(max_new_tokens=TOKENS // 2, texts=1, timed=3, repeats=1)
    with loaded_pair(spec, PLACEMENT, [PEARL]) as pair:
        checks = check_all(pair, PEARL, load_prompts(str(prompts)), extent, loss)
    assert checks.greedy.differing == 0
    assert checks.sampled.passed
    assert loss.noticed
    return loss


def profile(spec, prompts, home, what):
    loss, sizes = Loss(what, "measuring forwards"), {"widths": (1, 4), "contexts": (16,)}
    with loaded_pair(spec, PLACEMENT, [FOUR]) as pair:
        measured = profile_pair(pair, **sizes, batches=(1,), repeats=400, observer=loss)
    assert measured.device == "cpu × 2"
    assert len(measured.target.measurements) == len(measured.drafts["draft"].measurements) == 2
    assert loss.noticed
    return loss


def bench(spec, prompts, home, what):
    loss, whole = Loss(what, "3 contestants"), load_pair(spec)
    plan = BenchPlan(pair=spec, chosen=(FOUR, PEARL), repeats=1, max_new_tokens=TOKENS)
    texts = load_prompts(str(prompts), 4)
    with loaded_pair(spec, PLACEMENT, [FOUR, PEARL]) as pair:
        result = run_bench(plan, texts, pair, (), "lost", "bench", loss)
    expected = [generation.tokens for generation in generated(whole, AUTOREGRESSIVE, prompts, 4)]
    for row in result.rows:
        assert [[tokens] for tokens in expected] == [take.outputs for take in row.takes[0]]
    assert loss.noticed
    return loss


def papers(spec, prompts, home, what):
    loss, whole = Loss(what, "decoding"), load_pair(spec)
    kinds = {each.label: each.drafter.model_dump(mode="json") for each in (FOUR, PEARL)}
    rows = [{"name": name, "drafter": drafter} for name, drafter in kinds.items()]
    words = {"title": "Methods", "paper": "A paper", "prompts": ["here"], "columns": ["speedup"]}
    values = {
        "pair": spec,
        "prompts": {"here": {"source": str(prompts), "limit": 4}},
        "tables": {"methods": {**words, "rows": rows}},
        "cluster": PLACEMENT,
        "max_new_tokens": TOKENS,
        "repeats": 1,
    }
    result, _ = run_papers(PaperPlan.model_validate(values), home, observer=loss)
    assert len(result.measured) == 3
    assert not result.differences
    for measured in result.measured:
        counts = Counts(**measured.counts)
        if measured.configuration.asynchronous:  # its rounds depend on timing
            assert counts.n == Counts.of(generated(whole, AUTOREGRESSIVE, prompts, 4)).n
        else:
            assert counts == Counts.of(generated(whole, measured.configuration, prompts, 4))
    assert loss.noticed
    return loss


def generated(whole, configuration, prompts, limit):
    requests = requests_of(load_prompts(str(prompts), limit), whole, TOKENS)
    return Engine(whole, configuration).generate(requests)


def lose(stage, what, spec, prompts, home):
    """In a process of its own."""
    while len(nodes().worker_nodes) < NODES:
        nodes().add_node(num_cpus=1)
    loss = stage(spec, prompts, home, what)
    for timer in loss.timers:
        timer.join()
    assert loss.happened == max(len(loss.during), 1)


@pytest.fixture(scope="module")
def driver():
    """A process with a cluster of its own, as other tests' Ray may run in theirs."""
    with ProcessPoolExecutor(1, get_context("spawn")) as process:
        yield process
        process.submit(leave).result()


STAGES = (generate, record, profile, sweep, certify, bench, papers)
CELLS = [(stage, what) for stage in STAGES for what in ("shard", "draft", "node")]


@pytest.mark.long
@pytest.mark.parametrize(
    ("stage", "what"),
    # A node may also have the server, with which its streams end, or the measuring process.
    [*CELLS, (serve, "shard"), (serve, "draft"), (sweep, "measuring"), (papers, "measuring")],
)
def test_a_stage_loses_nothing(driver, stage, what, tiny_spec, tmp_path):
    prompts = prompts_file(tmp_path, [f"def f{n}(x):" for n in range(SHARD + 2)])
    driver.submit(lose, stage, what, tiny_spec, prompts, tmp_path / "home").result()
