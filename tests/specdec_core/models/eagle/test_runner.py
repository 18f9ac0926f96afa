"""A head's rows give what its formula gives without any cache: over texts, drafts, trees, rollback
and rows that change together."""

import warnings
from dataclasses import replace

import pytest
import torch
from transformers import LlamaForCausalLM

from specdec_core.models.cache.blocks import BLOCK
from specdec_core.models.compiled.failures import CannotCompile
from specdec_core.models.compiled.packages import Packages
from specdec_core.models.eager import EagerRunner
from specdec_core.models.eagle.runner import EagleRunner
from specdec_core.models.runner import Batch
from specdec_core.tokens.token_tree import ROOT
from tests.specdec_core.models.eagle.pair_heads import head_of

TEXT = [3, 14, 15, 9, 26, 5, 35, 8, 9]
OTHER = [2, 7, 18, 28, 18]
DRAFT = [31, 41, 59, 26]


class Rig:
    """A head and its target, which keeps features of more layers than the head reads, on runners of
    three rows."""

    def __init__(self, pair, way="operator"):
        self.model = pair.target
        self.head = head_of(pair, feature_layers=(0, 2))
        self.target = EagerRunner(pair.target, 3, 64, compact=way != "torch", features=(0, 1, 2))
        self.runner = EagleRunner(
            self.head, self.target, 3, 64, pooled=way == "pool", cache_tokens=1
        )
        if way == "torch":
            self.runner._compact = False

    def read(self, row, text):
        """The target reads more of a row."""
        self.target.forward(Batch([row], [text]))

    def feed(self, row, *tokens, parents=None):
        """The head reads more of a row; the logits after each token."""
        trees = None if parents is None else [parents]
        return self.runner.forward(Batch([row], [tokens], trees)).logits

    @torch.inference_mode()
    def plain(self, text, draft=()):
        """Logits after the last token of `text` and `draft`, computed from the definition.
        The target has read all of the text but its last token."""
        device = self.model.device
        read = torch.tensor([text[:-1]], device=device)
        hidden = self.model(read, output_hidden_states=True).hidden_states
        layers = self.head.settings.feature_layers
        features = torch.cat([hidden[layer] for layer in layers], dim=-1)
        states = self.head.fused(features)[0]  # after each token of the text but the last
        tokens = [*text[1:], *draft]
        for _ in range(len(draft) + 1):
            n = len(states)
            mask = torch.full((n, n), -torch.inf, device=device).triu(1)[None, None]
            ids, places = torch.tensor([tokens[:n], range(n)], device=device)[:, None]
            after = self.head(ids, states[None], places, attention_mask=mask)[0]
            states = torch.cat([states, after[-1:]])
        return self.head.spread(self.head.logits(states[-1:]))[0]


@pytest.fixture(params=["operator", "torch", "pool"])
def rig(request, tiny_pair):
    return Rig(tiny_pair, way=request.param)


def same(one, other):
    return torch.allclose(one, other, rtol=1e-4, atol=1e-4)


def test_it_drafts_from_its_own_states(rig):
    rig.read(0, TEXT[:-1])
    rig.runner.prefill([0], [TEXT])
    for count in range(1, len(DRAFT) + 1):
        assert same(rig.feed(0, DRAFT[count - 1])[-1], rig.plain(TEXT, DRAFT[:count]))


def test_tokens_drafted_elsewhere_are_read_one_after_the_other(rig):
    rig.read(0, TEXT[:-1])
    logits = rig.runner.forward(Batch([0], [[*TEXT, *DRAFT]], wanted=[len(DRAFT)])).logits
    for count in range(1, len(DRAFT) + 1):
        assert same(logits[count - 1], rig.plain(TEXT, DRAFT[:count]))


def test_whole_trees_are_read_level_by_level(rig):
    rig.read(0, TEXT[:-1])
    rig.runner.prefill([0], [TEXT])
    logits = rig.feed(0, 10, 11, 12, 13, 14, 15, parents=[-1, -1, 0, 1, 1, 3])
    for node, path in {0: [10], 2: [10, 12], 4: [11, 14], 5: [11, 13, 15]}.items():
        assert same(logits[node], rig.plain(TEXT, path))


def test_accepted_tokens_are_read_again_with_the_targets_features(rig):
    rig.read(0, TEXT[:-1])
    rig.runner.prefill([0], [TEXT])
    for token in DRAFT:
        rig.feed(0, token)
    rig.read(0, [TEXT[-1], *DRAFT[:2]])  # verified, two are right
    assert rig.runner.lengths[0] == len(TEXT)
    text = [*TEXT, *DRAFT[:2], 44]
    assert same(rig.feed(0, *text[len(TEXT) :])[-1], rig.plain(text))


def test_a_kept_branch_is_drafted_on(rig):
    rig.read(0, TEXT[:-1])
    rig.runner.prefill([0], [TEXT])
    rig.feed(0, 10, 11, parents=[-1, -1])
    rig.feed(0, 12, 13, 14, parents=[-1, -1, 0, 1, 1])
    rig.runner.keep(0, len(TEXT), [1, 3])
    assert rig.runner.lengths[0] == len(TEXT) + 2
    assert same(rig.feed(0, 15)[0], rig.plain(TEXT, [11, 13, 15]))


def test_a_root_that_lost_leaves_the_row(rig):
    """The first token of a tree that the target begins is settled once the target has read it."""
    rig.read(0, TEXT)
    rig.runner.prefill([0], [TEXT])
    rig.feed(0, 10, 11, parents=[-1, -1])
    rig.feed(0, 12, parents=[-1, -1, 1])
    rig.read(0, [11, 12])  # verified: the other one, and what follows it
    rig.runner.keep(0, len(TEXT), [1, 2])
    assert rig.runner.lengths[0] == len(TEXT)
    text = [*TEXT, 11, 12, 44]
    assert same(rig.feed(0, *text[len(TEXT) :])[-1], rig.plain(text))


def test_rows_are_independent_and_may_be_at_any_place(rig):
    rig.read(0, TEXT[:-1])
    rig.read(2, OTHER[:-1])
    rig.runner.prefill([0], [TEXT])
    rig.feed(0, DRAFT[0])
    both = rig.runner.forward(Batch([0, 2], [[DRAFT[1]], OTHER], wanted=[1, 1])).logits
    assert same(both[0], rig.plain(TEXT, DRAFT[:2]))
    assert same(both[1], rig.plain(OTHER))


def test_a_row_that_was_cut_or_copied_goes_on(rig):
    rig.read(0, TEXT[:-1])
    rig.runner.prefill([0], [TEXT])
    rig.feed(0, *DRAFT[:2])
    rig.runner.truncate(0, len(TEXT) + 1)
    assert same(rig.feed(0, DRAFT[2])[0], rig.plain(TEXT, [DRAFT[0], DRAFT[2]]))
    rig.target.fork(0, [1], [6])
    rig.runner.fork(0, [1], [6])
    rig.read(1, [50, 51])
    text = [*TEXT[:6], 50, 51, 52]
    held = rig.runner.lengths[1]
    assert same(rig.feed(1, *text[held:])[-1], rig.plain(text))


def test_rows_that_begin_alike_draft_their_own(rig):
    """Over several blocks of the cache, the last one in part."""
    text = [(7 * n) % 89 + 3 for n in range(2 * BLOCK + 9)]
    rig.read(0, text[:-1])
    rig.runner.prefill([0], [text])
    length = len(text) - 4
    rig.target.fork(0, [1, 2], [length, length])
    rig.runner.fork(0, [1, 2], [length, length])
    texts = [text, [*text[:length], 50, 51, 52], [*text[:length], 60, 61]]
    for row in (1, 2):
        rig.read(row, texts[row][length:-1])
    rig.runner.prefill([1, 2], [texts[row][rig.runner.lengths[row] :] for row in (1, 2)])
    for count in range(1, len(DRAFT) + 1):
        tokens = [[DRAFT[count - 1]]] * 3
        logits = rig.runner.forward(Batch([0, 1, 2], tokens)).logits
        for row in range(3):
            assert same(logits[row], rig.plain(texts[row], DRAFT[:count])), (row, count)


def test_siblings_are_all_read_with_what_the_target_knows_before_them(rig):
    """Where the target has read the whole text, not all but its last token."""
    rig.read(0, TEXT)
    rig.runner.prefill([0], [TEXT])
    logits = rig.feed(0, *DRAFT[:3], parents=[ROOT, ROOT, 0])
    for place in range(2):
        assert same(logits[place], rig.plain([*TEXT, DRAFT[place]]))


def test_after_the_first_token_all_are_as_likely(rig):
    assert rig.feed(0, TEXT[0]).eq(0).all()
    rig.runner.truncate(0, 0)
    unread = rig.feed(0, *TEXT[:2])
    assert unread.shape == (2, rig.runner.vocab_size)
    rig.runner.truncate(0, 0)
    assert same(rig.feed(0, *TEXT[:2]), unread)  # whatever was there before
    rig.runner.truncate(0, 0)
    rig.runner.prefill([0], [TEXT[:1]])
    rig.read(0, TEXT[:1])
    assert same(rig.feed(0, TEXT[1])[0], rig.plain(TEXT[:2]))


def test_a_forward_that_does_not_fit_has_appended_nothing(rig):
    rig.read(0, TEXT[:-1])
    rig.runner.prefill([0], [TEXT])
    with pytest.raises(ValueError, match="slot"):
        rig.feed(0, *[1] * 400)
    assert rig.runner.lengths[0] == len(TEXT)
    assert same(rig.feed(0, DRAFT[0])[0], rig.plain(TEXT, DRAFT[:1]))


@pytest.fixture
def cpu_rig(tiny_pair, tmp_path, monkeypatch):
    """With separate graphs."""
    if tiny_pair.target.device.type != "cpu":
        pytest.skip("on a GPU heads are run eagerly")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    return Rig(tiny_pair)


def test_without_a_compiler_one_warning_and_the_eager_logits(cpu_rig):
    with (
        torch._inductor.config.patch({"cpp.cxx": ("no-such-compiler",)}),
        pytest.warns(UserWarning, match=r"running the EAGLE head without a graph: no C\+\+ comp"),
    ):
        cpu_rig.runner = EagleRunner(cpu_rig.head, cpu_rig.target, 3, 64, "weights")
    with warnings.catch_warnings():
        warnings.filterwarnings("error", message="running the EAGLE head")
        cpu_rig.read(0, TEXT[:-1])
        found = cpu_rig.feed(0, *TEXT)[-1]
    torch.testing.assert_close(found, cpu_rig.plain(TEXT), atol=1e-4, rtol=1e-4)


@pytest.mark.long
def test_a_compiled_head_gives_the_eager_logits_with_features_and_without(cpu_rig):
    """Its graph takes the target's features: of a prompt, of one token, and none for a draft."""
    cpu_rig.runner = EagleRunner(cpu_rig.head, cpu_rig.target, 3, 64, "weights")
    assert cpu_rig.runner._graph is not None
    cpu_rig.read(0, TEXT[:-1])
    cpu_rig.runner.prefill([0], [TEXT[:-1]])
    assert same(cpu_rig.feed(0, TEXT[-1])[0], cpu_rig.plain(TEXT))
    for count in range(1, len(DRAFT) + 1):
        assert same(cpu_rig.feed(0, DRAFT[count - 1])[0], cpu_rig.plain(TEXT, DRAFT[:count]))
    cpu_rig.read(0, [TEXT[-1], *DRAFT[:2]])  # verified, two are right
    cpu_rig.read(2, OTHER[:-1])
    text = [*TEXT, *DRAFT[:2], 44]
    both = cpu_rig.runner.forward(Batch([0, 2], [text[len(TEXT) :], OTHER], wanted=[1, 1])).logits
    assert same(both[0], cpu_rig.plain(text))
    assert same(both[1], cpu_rig.plain(OTHER))
    draft = cpu_rig.runner.forward(Batch([0, 2], [DRAFT[:1], DRAFT[:1]])).logits
    assert same(draft[0], cpu_rig.plain(text, DRAFT[:1]))
    assert same(draft[1], cpu_rig.plain(OTHER, DRAFT[:1]))


@pytest.mark.skipif(torch.cuda.is_available(), reason="is about a CPU's operator")
def test_a_head_in_float16_drafts_on_a_cpu_too(tiny_pair):
    model = LlamaForCausalLM(tiny_pair.target.config).eval()
    head = head_of(replace(tiny_pair, target=model), feature_layers=(0, 2))

    def logits(model, head):
        target = EagerRunner(model, 1, 64, features=(0, 1, 2))
        runner = EagleRunner(head, target, 1, 64)
        target.forward(Batch([0], [OTHER]))
        return runner.forward(Batch([0], [OTHER])).logits.float()

    expected = logits(model, head)
    torch.testing.assert_close(logits(model.half(), head.half()), expected, rtol=0.05, atol=0.05)


def test_a_head_compiled_for_one_target_is_compiled_anew_for_another(tiny_pair, monkeypatch):
    if tiny_pair.target.device.type != "cpu":
        pytest.skip("on a GPU heads are run eagerly")
    folders = []

    def kept(packages, *_):
        folders.append(packages._folder())
        raise CannotCompile("not in this test")

    monkeypatch.setattr(Packages, "open", kept)
    spec = tiny_pair.spec.with_runner(compile=True)
    rig = Rig(tiny_pair)
    for target in "AB":
        pair = replace(tiny_pair, spec=spec, drafts={"head": rig.head})
        pair.__dict__["fingerprints"] = {"target": target, "head": "0"}
        with pytest.warns(UserWarning, match="without a graph"):
            pair.open_runner("head", 3, rig.target)
    first, other = folders
    assert first != other
