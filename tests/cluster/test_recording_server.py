"""Servers are recorded and certified over HTTP."""

import json
import re
import shutil
from collections.abc import Iterator

import pytest
import torch
from safetensors.torch import save_file
from starlette.responses import JSONResponse, PlainTextResponse
from starlette.types import Message

from cluster.certified_server import WEIGHTS, check_running
from cluster.recording import run_recording
from cluster.serving.http.service import Service
from jobs import certify, export
from specdec_core import config
from specdec_core.base.errors import UserError
from specdec_core.base.observer import Observer
from specdec_core.engine import Engine, Request
from specdec_core.evidence.certificate.certificate import find_certificate
from specdec_core.evidence.certificate.certify import Extent
from specdec_core.evidence.certificate.outputs import Asked, Reference, Speculated, compared_greedy
from specdec_core.evidence.certificate.served import server_outputs
from specdec_core.models.eagle.formats.speculators import EagleCard
from specdec_core.models.eagle.loading import save_head
from specdec_core.models.pair import Pair, load_pair
from specdec_core.prompts.prompt import Prompt
from specdec_core.prompts.source import PromptSource
from specdec_core.recordings.plan import RecordingPlan
from specdec_core.recordings.replay import Replay
from specdec_core.recordings.schema import OF_LOGITS
from specdec_core.servers.answers import ServerAddress, served_layers
from specdec_core.servers.completions import AnswerServer
from specdec_core.servers.process import running
from specdec_core.servers.table import SERVERS
from tests.commands import assert_shown, config_file, far_profile, printed, prompts_file
from tests.configurations import FOUR, drafting
from tests.local_server import LocalServer, engine_server, fleet_of, server_of
from tests.peers import vllm_installed
from tests.specdec_core.models.eagle.pair_heads import head_of

pytestmark = pytest.mark.usefixtures("ray_running")
PROMPTS = [f"def add_{i}(a, b): return a + {i}" for i in range(10)]
CHAIN = {"kind": "draft_model", "policy": {"kind": "fixed", "max_tokens": 3}}
DRAFTERS = [
    None,
    CHAIN,
    CHAIN | {"policy": {"kind": "confidence", "threshold": 0.1, "max_tokens": 6}},
    CHAIN | {"policy": {"kind": "svip", "threshold": 1.5, "max_tokens": 6}},
    {"kind": "tree", "branching": [2, 2]},
    {"kind": "prompt_lookup"},
    {"kind": "suffix", "memory": "all"},
    {"kind": "bandit", "arms": [CHAIN, {"kind": "prompt_lookup"}]},
]


def served(pair, name="tiny"):
    """The target of a pair behind our HTTP application."""
    return server_of(Service(fleet_of(Engine(pair, config.AUTOREGRESSIVE, 4)), name))


async def whole_body(receive):
    body, more = b"", True
    while more:
        message = await receive()
        body, more = body + message["body"], message.get("more_body", False)
    return body


class OpenAiAlone:
    """An application that refuses fields: those that OpenAI's protocol does not have, or others."""

    def __init__(self, application, refused=("return_token_ids", "repetition_penalty")):
        self.application, self.refused = application, refused

    async def __call__(self, scope, receive, send):
        if scope["type"] != "http" or scope["method"] != "POST":
            await self.application(scope, receive, send)
            return
        body = await whole_body(receive)
        if json.loads(body).keys() & {*self.refused}:
            refusal = JSONResponse({"error": {"message": "unknown field"}}, 400)
            await refusal(scope, receive, send)
            return
        parts: Iterator[Message] = iter([{"type": "http.request", "body": body}])

        async def again():
            return next(parts, None) or await receive()

        await self.application(scope, again, send)


@pytest.fixture(scope="module")
def url(tiny_pair):
    with running(served(tiny_pair)) as url:
        yield url


@pytest.fixture(scope="module")
def plan(tiny_spec, tmp_path_factory):
    """A plan for a target whose weights are not here."""
    folder = tmp_path_factory.mktemp("plan")
    shutil.copytree(tiny_spec.target, folder / "target")
    for weights in (folder / "target").glob("*.safetensors"):
        weights.unlink()
    path = prompts_file(folder, PROMPTS)
    spec = tiny_spec.model_copy(update={"target": str(folder / "target")})
    source = PromptSource(source=str(path))
    return RecordingPlan(pair=spec, prompts=source, max_new_tokens=12, max_draft=6)


@pytest.fixture(scope="module")
def recording(plan, url, tmp_path_factory):
    home = tmp_path_factory.mktemp("home")
    return run_recording(plan, home, address=ServerAddress(url=url, clients=3))


def test_it_holds_the_same_tokens_and_replays_the_same_counts(recording, plan, tiny_spec, tmp_path):
    local = run_recording(plan.model_copy(update={"pair": tiny_spec}), tmp_path)
    assert (recording.header.served, local.header.served) == ("tiny", None)
    assert recording.table("prompts") == local.table("prompts")
    for part in ("drafts/draft", "examples/draft"):
        ours, theirs = recording.table(part), local.table(part)
        given = [name for name in theirs.column_names if name not in OF_LOGITS]
        assert ours.select(given) == theirs.select(given)
        for name in OF_LOGITS & {*ours.column_names}:
            assert ours[name].null_count == len(ours)
    for drafter in DRAFTERS:
        option = config.parse(config.Configuration, {"drafter": drafter}, "test")
        counts = [Replay(each).run(option).counts for each in (recording, local)]
        assert counts[0] == counts[1], drafter


def test_a_servers_settings_are_ranked_on_it_without_the_targets_weights(
    recording, plan, command, tmp_path
):
    options = ["--config", config_file(tmp_path, plan.pair), "--profile", far_profile(tmp_path)]
    found = ["--to", "vllm", "--fastest", "--traces", recording.folder, "--out", tmp_path / "out"]
    printed(command(export.main, tmp_path, *found, *options))
    settings = json.loads((tmp_path / "out" / "speculative_config.json").read_text())
    assert settings["model"] == plan.pair.drafts["draft"]


def test_what_needs_the_targets_logits_is_refused_by_name(recording):
    trace = recording.trace("draft")
    with pytest.raises(UserError, match=r"^overlap needs the target's logits, .* server's tiny"):
        _ = trace.overlap


def test_the_same_command_resumes_it(recording, plan, url, tmp_path):
    folder = unfinished(recording, tmp_path / "copy")
    again = run_recording(plan, tmp_path, out=folder, address=ServerAddress(url=url))
    assert again.table("prompts") == recording.table("prompts")


def unfinished(recording, folder):
    shutil.copytree(recording.folder, folder)
    (folder / "finished").unlink()
    (folder / "prompts" / "shard-00001.parquet").unlink()
    return folder


def test_another_model_or_another_answer_is_refused(recording, plan, tiny_pair, tmp_path):
    folder = unfinished(recording, tmp_path / "copy")
    other = Pair(tiny_pair.spec, tiny_pair.tokenizer, tiny_pair.drafts["draft"])
    for server, message in (
        (served(tiny_pair, "large"), r"has the answers of tiny, not of large; give"),
        (served(other), r"http://127.*: answers prompt prompts/0 otherwise than in .*copy;"),
    ):
        with running(server) as url, pytest.raises(UserError, match=message):
            run_recording(plan, tmp_path, out=folder, address=ServerAddress(url=url))


class WritesStates:
    """An application that writes hidden states beside its answers, as vLLM does."""

    def __init__(self, application, pair, layers, folder):
        self.application, self.pair, self.layers = application, pair, layers
        self.folder, self.written = folder, 0

    async def __call__(self, scope, receive, send):
        if scope["type"] != "http" or scope["method"] != "POST":
            await self.application(scope, receive, send)
            return
        asked = json.loads(await whole_body(receive))
        wanted = asked.pop("kv_transfer_params", None) == {"include_output_tokens": True}
        body, answer = json.dumps(asked).encode(), b""
        parts: Iterator[Message] = iter([{"type": "http.request", "body": body}])

        async def again():
            return next(parts, None) or await receive()

        async def keep(message):
            nonlocal answer
            answer += message.get("body", b"")

        await self.application(scope, again, keep)
        content = json.loads(answer)
        [choice] = content["choices"]
        path = self._write([*asked["prompt"], *(choice["token_ids"][:-1] if wanted else ())])
        content["kv_transfer_params"] = {"hidden_states_path": str(path)}
        await JSONResponse(content)(scope, again, send)

    @torch.inference_mode()
    def _write(self, tokens):
        self.written += 1
        states = self.pair.target(torch.tensor([tokens]), output_hidden_states=True).hidden_states
        kept = torch.stack([states[layer][0] for layer in self.layers], dim=1)
        path = self.folder / f"{self.written}.safetensors"
        save_file({"hidden_states": kept, "token_ids": torch.tensor(tokens)}, path)
        path.with_name(f"{path.name}.lock").touch()
        return path


def with_head(plan, pair, folder, embedding=False, **changes):
    """The plan with a head of the pair's target beside the draft model."""
    head = head_of(pair, **changes)
    save_head(head, folder, EagleCard(target=pair.spec.target), embedding=embedding)
    drafts = {"head": str(folder), **plan.pair.drafts}
    return plan.model_copy(update={"pair": plan.pair.model_copy(update={"drafts": drafts})})


def recorded_from(application, plan, home):
    with running(LocalServer(lambda: application)) as url:
        return run_recording(plan, home, address=ServerAddress(url=url, clients=3))


@pytest.mark.parametrize(
    "weights",
    [
        pytest.param(False, id="no weights"),
        pytest.param(True, id="weights", marks=pytest.mark.long),
    ],
)
def test_heads_are_recorded_by_the_hidden_states_that_a_server_writes(
    plan, tiny_spec, tiny_pair, tmp_path, weights
):
    """A head without an embedding takes the target's, if that is on this machine."""
    headed = with_head(plan, tiny_pair, tmp_path / "head", not weights, feature_layers=(0, 1))
    here = headed.pair.model_copy(update={"target": tiny_spec.target})
    local = headed.model_copy(update={"pair": here})
    (states := tmp_path / "states").mkdir()
    application = WritesStates(served(tiny_pair).application(), tiny_pair, (0, 1), states)
    theirs = recorded_from(application, local if weights else headed, tmp_path / "served")
    ours = run_recording(local, tmp_path / "local")
    assert not [*states.iterdir()]  # what was read is removed
    same_tokens(ours, theirs)
    option = config.parse(config.Configuration, {"drafter": CHAIN | {"draft": "head"}}, "test")
    assert Replay(ours).run(option).counts == Replay(theirs).run(option).counts


def same_tokens(ours, theirs):
    """Two recordings with a head have the same tokens."""
    assert ours.table("prompts") == theirs.table("prompts")
    tokens = ["prompt", "position", "step", "draft_token", "target_token", "rank"]
    for part in ("drafts/head", "drafts/draft"):
        assert ours.table(part).select(tokens) == theirs.table(part).select(tokens)


def test_hidden_states_that_heads_cannot_read_are_refused(plan, tiny_pair, tmp_path):
    (states := tmp_path / "states").mkdir()
    application = WritesStates(served(tiny_pair).application(), tiny_pair, (0,), states)
    width, last = tiny_pair.target.config.hidden_size, tiny_pair.target.config.num_hidden_layers
    for number, (layers, message) in enumerate(
        (
            ((0, 1), rf"gives {width} values .* layers 0, 1, which .* have 2 × {width}$"),
            ((0, last), "^head: a head reads what the target's output layer reads"),
        )
    ):
        headed = with_head(plan, tiny_pair, tmp_path / str(number), feature_layers=layers)
        with pytest.raises(UserError, match=message):
            recorded_from(application, headed, tmp_path)
    assert not (tmp_path / "traces").exists()


@vllm_installed
def test_vllm_gives_hidden_states_for_heads(plan, tmp_path):
    runner = config.RunnerSettings(target_dtype="float32", device="cpu", max_length=128)
    drafts = {"draft": "bundled:draft-small"}
    pair = load_pair(config.PairSpec(target="bundled:draft-medium", drafts=drafts, runner=runner))
    own = plan.model_copy(update={"pair": pair.spec})
    headed, vllm = with_head(own, pair, tmp_path / "head", feature_layers=(0, 1)), SERVERS["vllm"]
    served = vllm.served(pair, vllm.answering(served_layers(headed.pair)), (), tmp_path)
    with running(served.process("vLLM", 3)) as url:
        address = ServerAddress(url=url, clients=3)
        theirs = run_recording(headed, tmp_path / "served", address=address)
    same_tokens(run_recording(headed, tmp_path / "local"), theirs)


HEADED = config.PairSpec(target="bundled:target", drafts={"head": "bundled:smollm2-eagle"})
NOWHERE = "http://127.0.0.1:9"


@pytest.mark.parametrize(
    ("change", "address", "message"),
    [
        ({"sampling": config.Sampling(temperature=1.0)}, {}, "sampling needs the target's logits"),
        ({"pair": HEADED}, {}, r"http.*: writes no hidden states, which an EAGLE head reads \("),
        ({}, {"url": NOWHERE}, f"{NOWHERE}: does not answer"),
        ({}, {"model": "large"}, r"no model 'large' \(it has: tiny\)"),
    ],
)
def test_what_a_server_cannot_give_is_one_line(plan, url, tmp_path, change, address, message):
    server = ServerAddress.model_validate({"url": url} | address)
    with pytest.raises(UserError, match=message) as refused:
        run_recording(plan.model_copy(update=change), tmp_path, address=server)
    assert "\n" not in str(refused.value)
    assert not (tmp_path / "traces").exists()


def test_answers_without_token_ids_are_tokenised():
    """A server may have written the same text with other tokens."""
    runner = config.RunnerSettings(target_dtype="float32", max_length=128)
    pair = load_pair(config.PairSpec(drafts={}, runner=runner))
    tokenizer, ends = pair.tokenizer, pair.eos_token_ids
    equal = 0
    with (
        running(served(pair)) as url,
        running(LocalServer(lambda: OpenAiAlone(served(pair).application()))) as plain,
    ):
        by_ids = AnswerServer(url, tokenizer, ends)
        by_text = AnswerServer(f"{plain}/v1/", tokenizer, ends)
        for text in PROMPTS[:4]:
            prompt = tokenizer(text)["input_ids"]
            tokens = [server.complete(prompt, 12) for server in (by_ids, by_text)]
            assert tokenizer.decode(tokens[0]) == tokenizer.decode(tokens[1])
            equal += tokens[0] == tokens[1]
    assert equal


def test_a_text_that_does_not_give_its_tokens_is_refused(tiny_pair):
    """The random target writes bytes that are no text."""
    tokenizer = tiny_pair.tokenizer
    with running(LocalServer(lambda: OpenAiAlone(served(tiny_pair).application()))) as url:
        server = AnswerServer(url, tokenizer, tiny_pair.eos_token_ids)
        with pytest.raises(UserError, match="the target's tokenizer does not give the same text"):
            server.complete(tokenizer(PROMPTS[0])["input_ids"], 8)


TEXTS = ("def main(", "class A:", "import os", "x = 1", "return tokenizer.")
CERTIFIED_PROMPTS = [Prompt(text, text) for text in TEXTS]


@pytest.fixture(scope="module")
def urls(tiny_pair):
    """Our own server with speculation, and without."""
    servers = (engine_server(tiny_pair, one, 4) for one in (FOUR, config.AUTOREGRESSIVE))
    with running(next(servers)) as speculating, running(next(servers)) as plain:
        yield speculating, plain


def checks_of(urls, spec, texts, weights, configuration=FOUR):
    speculating, plain = (ServerAddress(url=url) for url in urls)
    extent = Extent(max_new_tokens=24, texts=texts)
    against = None if weights else plain
    return check_running(
        speculating, against, spec, configuration, CERTIFIED_PROMPTS, extent, Observer()
    )


def test_a_lossless_server_gets_a_certificate(urls, tiny_spec, command, tmp_path):
    chosen = config.PairConfiguration(pair=tiny_spec, configuration=FOUR)
    options = ["--config", chosen.save(tmp_path / "c.yaml"), "--quick"]
    options += ["--prompts", prompts_file(tmp_path, TEXTS), "--server", urls[0]]
    done = command(certify.main, tmp_path, *options, "--against", urls[1])
    assert_shown(done, "0 differ", "preferred by the draft")
    assert find_certificate(tiny_spec, FOUR) is None  # of our engine nothing was shown
    key = re.sub(r"\W+", "-", urls[0])
    certificate = find_certificate(tiny_spec, FOUR, key)
    assert certificate.server.reference == urls[1]
    assert certificate.server.version
    assert certificate.checks.speed is None
    assert certificate.checks.greedy.tokens > 100


def test_a_running_server_is_asked_as_the_last_range_of_its_schedule_begins(urls, tiny_spec):
    """More requests at a time than without a schedule, or none of that range is checked."""
    five, six = (drafting("schedule", ranges={1: 4, n: None}) for n in (5, 6))
    assert checks_of(urls, tiny_spec, 1, False, five).checks.greedy.slots == 5
    with pytest.raises(UserError, match=r"begins with 6 requests, but there are 5 .*limit"):
        checks_of(urls, tiny_spec, 1, False, six)


@pytest.mark.parametrize("weights", [False, True], ids=["server", "weights"])
def test_drawing_at_a_wrong_temperature_is_found(urls, tiny_spec, monkeypatch, weights):
    """As vLLM's build for CPUs does when it speculates."""

    def colder(logits, samplings):
        return (logits.float() / 0.6).softmax(dim=-1)

    monkeypatch.setattr("specdec_core.engine.judging.distributions", colder)
    found = checks_of(urls, tiny_spec, 8, weights)
    assert (found.server.reference == WEIGHTS) == weights
    assert found.checks.failures == ("distribution",)


def test_greedy_texts_are_compared_with_a_server_that_gives_no_logprobs_too(tiny_spec):
    """A quantised target computes otherwise than the weights here, as the draft does."""
    models = {"target": tiny_spec.drafts["draft"], "drafts": {"draft": tiny_spec.target}}
    pair = load_pair(tiny_spec.model_copy(update=models))
    plain = LocalServer(
        lambda: OpenAiAlone(
            engine_server(pair, config.AUTOREGRESSIVE, 4).application(), ["logprobs"]
        )
    )
    with running(engine_server(pair, FOUR, 4)) as speculating, running(plain) as url:
        found = checks_of((speculating, url), tiny_spec, 1, weights=False)
        by_weights = checks_of((speculating, url), tiny_spec, 1, weights=True)
    assert found.checks.greedy.passed
    assert not by_weights.checks.greedy.passed
    assert found.server.reference == f"{url}, for probabilities {WEIGHTS}"


@pytest.mark.parametrize(
    ("dtype", "margin", "passed"),
    [("float32", 0.01, False), ("bfloat16", 0.01, True), ("bfloat16", 2.0, False)],
)
def test_in_short_types_near_ties_may_differ(dtype, margin, passed):
    asked = Asked([Request("one", (1, 2), 3), Request("two", (1,), 3)], [])
    found = Speculated([[5, 6, 7], [5, 6, 7]], [])
    reference = Reference([[5, 6, 7], [5, 9, 7]], lambda tokens, preferred, other: margin)
    greedy = compared_greedy(found, reference, asked, dtype, slots=2)
    assert (greedy.differing, greedy.passed) == (1, passed)
    assert "prompt two, token 1: 6 in place of 9" in greedy.first


def test_a_server_that_drafts_nothing_by_its_metrics_is_refused(urls, tiny_pair):
    asked = Asked([Request("one", (1, 2, 1, 2, 1), 8)], [])
    read = tiny_pair.tokenizer, tiny_pair.eos_token_ids
    speculating, plain = (AnswerServer(url, *read) for url in urls)
    assert server_outputs(speculating, asked, 1, Observer()).greedy
    with pytest.raises(UserError, match="drafts no candidate tokens"):
        server_outputs(plain, asked, 1, Observer())


def test_a_vllm_that_counts_no_candidates_does_not_speculate(tiny_pair):
    """It has the counter only where it does."""
    inner = engine_server(tiny_pair, config.AUTOREGRESSIVE, 4).application()

    async def as_vllm(scope, receive, send):
        application = inner
        if scope["type"] == "http" and scope["path"] == "/metrics":
            application = PlainTextResponse("vllm:num_requests_running 0.0\n")
        await application(scope, receive, send)

    asked = Asked([Request("one", (1, 2, 1, 2, 1), 8)], [])
    with running(LocalServer(lambda: as_vllm)) as url:
        server = AnswerServer(url, tiny_pair.tokenizer, tiny_pair.eos_token_ids)
        with pytest.raises(UserError, match="drafts no candidate tokens"):
            server_outputs(server, asked, 1, Observer())
