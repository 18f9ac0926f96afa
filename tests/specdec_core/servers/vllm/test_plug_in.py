"""vLLM's plug-in finds requests by their texts, and proposes what the engine would."""

from dataclasses import replace
from functools import partial
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from specdec_core.base.errors import UserError
from specdec_core.config import AUTOREGRESSIVE, PairConfiguration, PairSpec, RunnerSettings
from specdec_core.engine import Engine, Request
from specdec_core.models.eagle.formats.speculators import EagleCard
from specdec_core.models.eagle.loading import save_head
from specdec_core.models.features import LayerInputs
from specdec_core.models.pair import load_pair
from specdec_core.servers.server import DraftFile
from specdec_core.servers.table import SERVERS
from specdec_core.servers.vllm import features, plug_in
from specdec_core.servers.vllm.features import CachedFeatures
from specdec_core.servers.vllm.settings import PLUG_IN, VARIABLE
from tests.conftest import save_random_head
from tests.peers import peers_of, vllm_installed
from tests.specdec_core.kinds import chain, configured
from tests.specdec_core.models.eagle.pair_heads import taught_head_of

PRODUCT = {"kind": "confidence_product", "threshold": 0.3, "max_tokens": 5}
CHAIN = {"kind": "draft_model", "policy": PRODUCT}
HYBRID = {"kind": "hybrid", "lookup": {"kind": "suffix", "max_tokens": 5}, "otherwise": CHAIN}
TEXTS = [[7, 8, 9, 10, 11] * 3 + [7, 8], list(range(20, 33)), [7, 8, 9, 10, 11] * 3 + [7, 8], [5]]
NEW, MOST = 20, 5


def proposer(pair, drafter, folder, monkeypatch):
    """One as vLLM makes it, for four requests at once."""
    chosen = PairConfiguration(pair=pair.spec, configuration=configured(drafter))
    monkeypatch.setenv(VARIABLE, str(chosen.save(folder / "specdec.yaml")))
    monkeypatch.setattr(plug_in.repairs, "repair", lambda: None)  # vLLM is not here
    monkeypatch.setattr(CachedFeatures, "watch", lambda *_: None)
    config = SimpleNamespace(
        model_config=SimpleNamespace(
            model=pair.spec.target, max_model_len=128, dtype=torch.float32
        ),
        speculative_config=SimpleNamespace(num_speculative_tokens=MOST),
        scheduler_config=SimpleNamespace(max_num_seqs=4),
        device_config=SimpleNamespace(device=torch.device("cpu")),
    )
    return plug_in.Proposer(config)


def rounds(proposer, outputs, orders, before=lambda rows, texts: None):
    """How many tokens each round of a text added, when vLLM verifies what is proposed against
    `outputs`. `orders` has the rows of each step; texts may be absent and come again. Each step
    calls `before` with its rows and their texts."""
    ended = {n: 0 for n in outputs}
    candidates: dict[int, list[int]] = {n: [] for n in outputs}
    added: dict[int, list[int]] = {n: [] for n in outputs}
    while any(ended[n] < NEW for n in outputs):
        rows = [n for n in next(orders) if ended[n] < NEW]
        new = []
        for n in rows:
            left = outputs[n][ended[n] :]
            agreed = 0
            while agreed < min(len(left) - 1, len(candidates[n])):
                if left[agreed] != candidates[n][agreed]:
                    break
                agreed += 1
            new.append(left[: agreed + 1])
            ended[n] += agreed + 1
            added[n].append(agreed + 1)
        texts = [TEXTS[n] + outputs[n][: ended[n]] for n in rows]
        ids = np.zeros((len(rows), 128), dtype=np.int32)
        for row, text in enumerate(texts):
            ids[row, : len(text)] = text
        # A prompt of which only a part is read has no tokens yet.
        ids = np.vstack([ids, np.full((1, 128), 3, dtype=np.int32)])
        lengths = np.array([*map(len, texts), 10])
        before(rows, texts)
        proposed = proposer.propose([*new, []], lengths, ids, slot_mappings=None)
        assert proposed[-1] == []
        assert all(len(tokens) <= MOST for tokens in proposed)
        candidates |= dict(zip(rows, proposed[:-1], strict=True))
    return added


def decoded(pair, drafter):
    """What the engine writes after each text, and how many tokens each of its rounds adds."""
    requests = [Request(str(n), tuple(t), NEW, ignore_eos=True) for n, t in enumerate(TEXTS)]
    generations = Engine(pair, configured(drafter), 4).generate(requests)
    outputs = {n: generation.tokens for n, generation in enumerate(generations)}
    return outputs, {n: [r.generated for r in g.rounds] for n, g in enumerate(generations)}


def in_turns():
    """Two identical texts among four, in changing rows."""
    while True:
        yield [0, 1, 2, 3]
        yield [3, 2, 0, 1]


def with_pauses():
    while True:
        yield [0, 1]
        yield [2, 3, 1]


def test_a_text_that_is_longer_than_a_draft_can_hold_gets_no_candidates(
    longrope_folder, tmp_path, monkeypatch
):
    folder = str(longrope_folder)
    runner = RunnerSettings(max_length=64, target_dtype="float32", draft_dtype="float32")
    pair = load_pair(PairSpec(target=folder, drafts={"same": folder}, runner=runner))
    own = proposer(pair, chain(max_tokens=MOST), tmp_path, monkeypatch)
    ids = np.arange(2 * 128, dtype=np.int32).reshape(2, 128)
    short, long = own.propose([[9], [127 + 80]], np.array([10, 80]), ids)
    assert short
    assert long == []


def test_what_the_target_can_hold_here_limits_no_candidates(
    longrope_folder, tiny_pair, tmp_path, monkeypatch
):
    """Its positions change at 64 tokens, which this engine does not do."""
    other = tiny_pair.spec.model_copy(update={"target": str(longrope_folder)})
    for drafter in (chain(max_tokens=MOST), {"kind": "prompt_lookup"}):
        own = proposer(replace(tiny_pair, spec=other), drafter, tmp_path, monkeypatch)
        ids = np.resize(np.arange(7, 12, dtype=np.int32), (1, 128))
        [candidates] = own.propose([[int(ids[0, 79])]], np.array([80]), ids)
        assert candidates


@pytest.mark.parametrize("kind", ["hybrid", "svip", "specdecpp"])
def test_requests_are_found_by_their_texts_and_policies_stop_where_the_engines_do(
    tiny_pair, tmp_path, monkeypatch, kind
):
    save_random_head(tiny_pair, "specdecpp", tmp_path / "head")
    drafter = {
        "hybrid": HYBRID,
        "svip": chain("svip", threshold=1.5, max_tokens=MOST),
        "specdecpp": chain(
            "specdecpp", threshold=0.7, max_tokens=MOST, head=str(tmp_path / "head")
        ),
    }[kind]
    outputs, expected = decoded(tiny_pair, drafter)
    assert sum(len(own) for own in expected.values()) < 4 * NEW
    own = proposer(tiny_pair, drafter, tmp_path, monkeypatch)
    assert rounds(own, outputs, in_turns()) == expected
    # The places of the first requests serve the next; those that pause are read anew.
    assert rounds(own, outputs, with_pauses()) == expected


def test_a_schedule_drafts_by_how_many_texts_there_are(tiny_pair, tmp_path, monkeypatch):
    schedule = {"kind": "schedule", "ranges": {1: CHAIN, 3: None}}
    outputs, expected = decoded(tiny_pair, CHAIN)
    own = proposer(tiny_pair, schedule, tmp_path, monkeypatch)
    many = rounds(own, outputs, iter([[0, 1, 2, 3]] * NEW))
    assert many == {n: [1] * NEW for n in outputs}
    few = {n: outputs[n] for n in (1, 3)}
    assert rounds(own, few, iter([[1, 3]] * NEW)) == {n: expected[n] for n in few}


class Runner:
    """A worker of vLLM as far as a head's features go. A block of its cache has four places. The
    third text has its first blocks from the prefix cache: the first text's."""

    def __init__(self, pair):
        self._pair, self.use_aux_hidden_state_outputs = pair, False
        self._held = dict.fromkeys(range(len(TEXTS)), 0)
        self._generator = torch.Generator().manual_seed(0)
        self.block_size, self.device = 4, torch.device("cpu")
        config = pair.target.config
        self.model_config = SimpleNamespace(
            dtype=torch.float32, get_hidden_size=lambda: config.hidden_size
        )
        self._blocks = np.zeros((8, 32), dtype=np.int32)
        self._places = torch.zeros(0, dtype=torch.long)
        self.input_batch = SimpleNamespace(block_table=[self])

    def get_numpy_array(self):
        return self._blocks

    @property
    def slot_mapping(self):
        return SimpleNamespace(gpu=self._places)

    def get_model(self):
        return SimpleNamespace(set_aux_hidden_state_layers=partial(setattr, self, "layers"))

    def initialize_kv_cache(self, cache):
        pass

    def sample_tokens(self):
        return "sampled"

    def step(self, rows, texts):
        """A forward of what is new in these texts, their candidates included, which are others than
        those that come next."""
        width = len(self.layers) * self._pair.target.config.hidden_size
        places, states = [], [torch.zeros(0, width)]
        for row, (n, text) in enumerate(zip(rows, texts, strict=True)):
            self._blocks[row] = [self._block(n, block) for block in range(32)]
            known = range(self._held[n], len(text) - 1)
            self._held[n] = len(text) - 1
            read = LayerInputs(self._pair.target, self.layers)
            self._pair.target(torch.tensor([text]))
            of_text = read.take()[0]
            read.remove()
            others = torch.randn(2, width, generator=self._generator)
            states += [of_text[known.start : known.stop], others]
            for place in (*known, len(text) - 1, len(text)):
                places.append(self._blocks[row, place // 4] * 4 + place % 4)
        self._places = torch.tensor([*places, 0])  # padded
        self.execute_model_state = SimpleNamespace(
            scheduler_output=SimpleNamespace(total_num_scheduled_tokens=len(places)),
            aux_hidden_states=torch.cat([*states, torch.zeros(1, width)]).chunk(
                len(self.layers), dim=-1
            ),
        )
        assert self.sample_tokens() == "sampled"

    def _block(self, n, number):
        cached = n == 2 and number < len(TEXTS[2]) // 4
        return (97 * ((0 if cached else n) * 32 + number)) % 128

    def found_in_the_cache(self):
        self._held[2] = len(TEXTS[2]) // 4 * 4


def test_a_head_drafts_what_it_does_in_the_engine(tiny_pair, tmp_path, monkeypatch):
    """It reads the features of its own request's tokens, from wherever vLLM's cache has them."""
    requests = [Request(str(n), tuple(t), NEW, ignore_eos=True) for n, t in enumerate(TEXTS)]
    [written, *_] = Engine(tiny_pair, AUTOREGRESSIVE, 4).generate(requests)
    head = taught_head_of(tiny_pair, [[*TEXTS[0], *written.tokens]], len(TEXTS[0]))
    save_head(head, tmp_path / "head", EagleCard(target="any"), dtype=torch.float32)
    spec = tiny_pair.spec.model_copy(update={"drafts": {"head": str(tmp_path / "head")}})
    pair = load_pair(spec)
    outputs, expected = decoded(pair, chain(max_tokens=MOST))
    assert sum(len(own) for own in (expected[0], expected[2])) < NEW  # it knows these two
    own = proposer(pair, chain(max_tokens=MOST), tmp_path, monkeypatch)
    monkeypatch.setattr(features, "_keeps_all", lambda group: True)
    group = SimpleNamespace(kv_cache_spec=SimpleNamespace(block_size=4))
    for orders in (in_turns(), with_pauses()):
        runner = Runner(pair)
        own.features.attach(runner)
        assert runner.use_aux_hidden_state_outputs
        runner.initialize_kv_cache(SimpleNamespace(num_blocks=128, kv_cache_groups=[group]))
        runner.found_in_the_cache()
        assert rounds(own, outputs, orders, runner.step) == expected


PRE_CUT = CHAIN | {"policy": {"kind": "pre_cut", "target_cost": 4, "max_tokens": MOST}}
BANDIT = {"kind": "bandit", "arms": [{"kind": "prompt_lookup", "max_tokens": MOST}, CHAIN]}


@pytest.mark.parametrize("drafter", [PRE_CUT, BANDIT], ids=["pre_cut", "bandit"])
def test_what_learns_from_round_to_round_drafts_what_is_accepted(
    tiny_pair, tmp_path, monkeypatch, drafter
):
    """The order of the rows decides who learns first, so the rounds are not the engine's."""
    outputs, _ = decoded(tiny_pair, drafter)
    own = proposer(tiny_pair, drafter, tmp_path, monkeypatch)
    for orders in (in_turns(), with_pauses()):
        added = rounds(own, outputs, orders)
        assert {n: sum(each) for n, each in added.items()} == {n: NEW for n in outputs}
        assert sum(len(each) for each in added.values()) < 4 * NEW


def test_what_was_learned_from_earlier_requests_is_forgotten(tiny_pair, tmp_path, monkeypatch):
    shared = {"kind": "suffix", "memory": "all", "max_tokens": MOST}
    outputs = {1: list(range(40, 40 + NEW))}  # nothing in it repeats
    own = proposer(tiny_pair, shared, tmp_path, monkeypatch)
    first, again = (len(rounds(own, outputs, iter([[1]] * 99))[1]) for _ in range(2))
    own.forget()
    assert len(rounds(own, outputs, iter([[1]] * 99))[1]) == first == NEW
    assert again < first


@pytest.mark.parametrize(
    ("drafter", "reason"),
    [
        ({"kind": "tree"}, "drafts trees, vLLM verifies chains alone"),
        ({"kind": "token_cache", "phrases": 1}, "after rejected candidates"),
        (CHAIN | {"policy": {"kind": "pre_cut"}}, "target_cost: profile: vLLM has no profile"),
    ],
)
def test_what_the_plug_in_cannot_draft_by_is_refused(
    tiny_pair, tmp_path, monkeypatch, drafter, reason
):
    with pytest.raises(UserError, match=reason):
        proposer(tiny_pair, drafter, tmp_path, monkeypatch)


def test_vllm_finds_the_class_by_its_name():
    assert f"{plug_in.__name__}.{plug_in.Proposer.__name__}" == PLUG_IN


def test_heads_and_a_missing_file_are_refused(monkeypatch):
    other = DraftFile("bundled:smollm2-eagle", "other", refused="reads what the output layer reads")
    with pytest.raises(UserError, match="reads what the output layer reads"):
        plug_in.check(configured(CHAIN), [other])
    # A draft model that vLLM has no place for: the plug-in loads it itself.
    plug_in.check(configured(CHAIN), [other._replace(place="bundled:smollm2-draft")])
    monkeypatch.delenv(VARIABLE, raising=False)
    with pytest.raises(UserError, match="SPECDEC_CONFIGURATION must name the file"):
        plug_in.Proposer(None)


@pytest.mark.long
@vllm_installed
def test_vllm_writes_the_same_with_the_plug_in():
    runner = RunnerSettings(target_dtype="float32", draft_dtype="float32", max_length=256)
    pair = load_pair(PairSpec(drafts={"small": "bundled:draft-small"}, runner=runner))
    [reference, *_] = peers_of(pair, "transformers")
    server = SERVERS["vllm"]
    [peer] = server.peers(pair, [server.plug_in_mode(configured(HYBRID), "hybrid")])
    texts = [tuple(text) for text in TEXTS[:2]]
    with reference, peer:
        for text in texts:
            assert peer.decode(text, 32) == reference.decode(text, 32)
            assert max(peer.steps) > 1
        peer.forget()
        assert peer.decode(texts[0], 32) == reference.decode(texts[0], 32)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"pipeline_parallel_size": 2}, "needs all layers and tokens in a process"),
        ({"decode_context_parallel_size": 2}, "needs all layers and tokens in a process"),
        ({"kv_transfer_config": "a connector"}, "no features of tokens that a KV connector loads"),
        ({"num_hidden_layers": 2}, "reads what the target's output layer reads"),
    ],
)
def test_a_head_without_all_features_is_refused_before_anything_is_changed(changes, message):
    told = {"kv_transfer_config": None, "num_hidden_layers": 9, **changes}
    config = SimpleNamespace(
        parallel_config=SimpleNamespace(**changes),
        kv_transfer_config=told["kv_transfer_config"],
        model_config=SimpleNamespace(hf_text_config=SimpleNamespace(**told)),
    )
    with pytest.raises(UserError, match=message):
        CachedFeatures((0, 1, 2), 10, 1).watch(config)


def test_a_target_that_forgets_or_gives_no_features_is_refused(tiny_pair, monkeypatch):
    runner, own = Runner(tiny_pair), CachedFeatures((0, 1), 10, 1)
    own.attach(runner)
    monkeypatch.setattr(features, "_keeps_all", lambda group: False)
    with pytest.raises(UserError, match="a layer that attends to all tokens"):
        runner.initialize_kv_cache(SimpleNamespace(kv_cache_groups=[None]))
    monkeypatch.setattr(runner, "get_model", object)
    with pytest.raises(UserError, match="object: vLLM gives no features of it"):
        own.attach(runner)


@pytest.mark.long
@vllm_installed
def test_a_head_in_vllm_reads_features_that_the_prefix_cache_has(tmp_path):
    """So it drafts the same for a prompt whose first block is not computed again."""
    runner = RunnerSettings(target_dtype="float32", max_length=256)
    plain = load_pair(PairSpec(runner=runner))
    text = tuple(n * n % plain.target.config.vocab_size for n in range(200))
    written = Engine(plain, AUTOREGRESSIVE).generate([Request("0", text, 32, ignore_eos=True)])
    head = taught_head_of(plain, [[*text, *written[0].tokens]], len(text))
    save_head(head, tmp_path / "head", EagleCard(target="any"), dtype=torch.float32)
    pair = load_pair(PairSpec(drafts={"head": str(tmp_path / "head")}, runner=runner))
    server = SERVERS["vllm"]
    [peer] = server.peers(pair, [server.plug_in_mode(configured(chain(max_tokens=3)), "head")])
    peer._engine |= {"enable_prefix_caching": True, "max_model_len": 250}
    with peer:
        rounds = []
        for _ in range(2):
            assert peer.decode(text, 32) == written[0].tokens
            rounds.append(peer.steps)
    assert len(rounds[0]) < 16  # it knows the text
    assert rounds[1] == rounds[0]
