"""`generate` with this library's candidates writes what the model alone would write."""

from itertools import product
from typing import Any

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM
from transformers.generation import BaseStreamer

from specdec_core.base.errors import UserError
from specdec_core.config import PairConfiguration, RunnerSettings, Sampling
from specdec_core.engine import Engine, Request, forward_costs
from specdec_core.servers.plug_in_drafter import PlugInDrafter
from specdec_core.servers.transformers import plug_in
from specdec_core.servers.transformers.plug_in import DraftCandidates, Speculative, speculative
from tests.specdec_core.engine.test_eagle_heads import HEAD, pair_with_head
from tests.specdec_core.kinds import configured
from tests.specdec_core.servers.transformers.branches import Branches
from tests.toy_pair import PROMPT, VOCABULARY, exact_distribution, toy_pair

CHAIN = {"kind": "draft_model"}
PRODUCT = {"kind": "confidence_product", "threshold": 0.3}
CASCADE = {"kind": "cascade", "policy": PRODUCT}
DRAFTERS: dict[str, dict[str, Any]] = {
    "chain": CHAIN,
    "svip": CHAIN | {"policy": {"kind": "svip", "threshold": 3.0}},
    "head": CHAIN | {"draft": HEAD},
    "suffix": {"kind": "suffix", "memory": "all"},
    "cascade": CASCADE,
    "phrases": {"kind": "token_cache", "phrases": 1},
    "hybrid": {"kind": "hybrid", "min_match": 3, "otherwise": CASCADE},
    "bandit": {"kind": "bandit", "arms": [{"kind": "prompt_lookup"}, CHAIN | {"draft": HEAD}]},
}
TEXTS = [[7, 8, 9, 10, 11] * 3 + [7, 8], [5], list(range(20, 60))]


@pytest.fixture(scope="module")
def pair(tiny_pair):
    return pair_with_head(tiny_pair)


def inputs(text, count=24):
    ids = torch.tensor([text])
    mask = torch.ones_like(ids)
    return {"input_ids": ids, "attention_mask": mask, "max_new_tokens": count, "pad_token_id": 0}


@pytest.mark.parametrize("name", DRAFTERS)
def test_greedy_output_is_that_of_generate(pair, name):
    """Candidates come with the prompt, unless a head drafts, or a bandit would charge its arm with
    the prompt."""
    generate = Speculative(pair, configured(DRAFTERS[name]))
    model: Any = pair.target
    hooks = [len(m._forward_pre_hooks) for m in model.modules()]
    widths: list[int] = []
    hook = model.register_forward_hook(lambda *args: widths.append(args[2].logits.shape[1]))
    written = 0
    for text in TEXTS:
        output = generate(**inputs(text), do_sample=False)
        written += output.shape[1] - len(text)
        used = len(widths)
        assert output.tolist() == model.generate(**inputs(text), do_sample=False).tolist()
        del widths[used:]
    hook.remove()
    assert (widths[0] > 1) == (name not in ("head", "bandit", "phrases"))
    if name != "head":  # its weights are random
        assert len(widths) < written, "nothing was ever accepted, so nothing was shown"
    left = [len(m._forward_pre_hooks) for m in model.modules()]
    assert left == hooks, "hooks are left behind"


def test_what_was_learned_from_earlier_texts_is_forgotten(pair):
    generate = Speculative(pair, configured(DRAFTERS["suffix"]))
    forwards: list[int] = []
    hook = pair.target.register_forward_hook(lambda *_: forwards.append(1))
    counts = []
    for again in (False, False, True):
        if again:
            generate.forget()
        forwards.clear()
        generate(**inputs(TEXTS[1]), do_sample=False)
        counts.append(len(forwards))
    hook.remove()
    assert counts[1] < counts[0] == counts[2]


@pytest.mark.parametrize("name", ["head", "cascade"])
def test_candidates_are_those_of_the_engine(pair, name, monkeypatch):
    """So the features of a head are those of the right places, and caches hold the right tokens.
    Only the engine, and a head here, has none behind the prompt."""
    configuration, proposed = configured(DRAFTERS[name]), []
    request = Request("a", tuple(TEXTS[0]), 24, trace=True)
    first, *chunks = Engine(pair, configuration).stream(request)
    real = PlugInDrafter.propose

    def watched(self, rooms):
        trees = real(self, rooms)
        proposed.append(trees[0].tokens)
        return trees

    monkeypatch.setattr(PlugInDrafter, "propose", watched)
    text = TEXTS[0] if name == "head" else [*TEXTS[0], *first.tokens]
    Speculative(pair, configuration)(**inputs(text), do_sample=False)
    expected = [chunk.candidates.tokens for chunk in chunks if chunk.candidates is not None]
    assert proposed[: len(expected)] == expected[: len(proposed)]
    assert abs(len(proposed) - len(expected)) <= 1  # of a last round there may be no room
    assert any(proposed)


class Heard(BaseStreamer):
    def __init__(self):
        self.tokens: list[int] = []
        self.ended = False

    def put(self, value):
        self.tokens += value.flatten().tolist()

    def end(self):
        self.ended = True


def test_streamers_processors_and_outputs_are_as_always(pair):
    generate, heard = Speculative(pair, configured(CHAIN)), Heard()
    asked: dict[str, Any] = {"do_sample": False, "repetition_penalty": 1.5, "output_scores": True}
    options = inputs(TEXTS[0]) | asked | {"return_dict_in_generate": True}
    model: Any = pair.target
    expected, output = model.generate(**options), generate(**options, streamer=heard)
    assert output.sequences.tolist() == expected.sequences.tolist() == [heard.tokens]
    assert heard.ended
    assert len(output.scores) == len(expected.scores)
    torch.testing.assert_close(output.scores[-1], expected.scores[-1])


@pytest.mark.parametrize("name", ["draft", HEAD])
def test_policies_get_what_a_forward_costs_in_transformers(pair, name, monkeypatch):
    """Not what it costs in this engine, and measured only where a policy asks."""
    asked: list[int] = []

    def seconds(model, tokens):
        assert model is pair.target
        asked.append(tokens)
        return 50.0 + tokens

    monkeypatch.setattr(plug_in, "_forward_seconds", seconds)
    monkeypatch.setattr(forward_costs, "time_forward", lambda *_: 2.0)
    policy = {"kind": "break_even", "max_tokens": 6}
    hybrid = {"kind": "hybrid", "otherwise": {"kind": "draft_model", "draft": name}}
    hybrid["otherwise"]["policy"] = policy
    candidates = Speculative(pair, configured(hybrid)).candidates
    assert candidates.drafter.drafter.otherwise.policy.settings.cost == pytest.approx(51 / 3)
    assert set(asked) == {1, 5}
    asked.clear()
    Speculative(pair, configured(hybrid | {"otherwise": CHAIN}))
    assert not asked


def test_a_forwards_time_is_that_of_the_model(pair):
    shapes: list[torch.Size] = []
    hook = pair.target.register_forward_pre_hook(
        lambda *a: shapes.append(a[2]["input_ids"].shape), with_kwargs=True
    )
    assert plug_in._forward_seconds(pair.target, 5) > 0
    hook.remove()
    assert shapes == [(1, 5)]


def test_a_file_names_drafts_and_configuration(pair, tmp_path):
    chosen = PairConfiguration(pair=pair.spec, configuration=configured(CASCADE))
    file = chosen.save(tmp_path / "specdec.yaml")
    generate, model = speculative(pair.target, file), pair.target
    plain: Any = model
    expected = plain.generate(**inputs(TEXTS[0]), do_sample=False)
    assert generate(**inputs(TEXTS[0]), do_sample=False).tolist() == expected.tolist()


def enumerated(pair, drafter, sampling, length):
    """The probability of each text that `generate` samples, by all outcomes of all draws: those of
    the draft model, transformers' acceptance, and the target's tokens."""
    branches = Branches()

    def quantile(probs, uniforms):
        return torch.tensor([branches.choose(row.tolist()) for row in probs])

    def rand_like(ratios):
        """The candidates before one are accepted and that one is rejected, or none is."""
        accepted = [min(1.0, ratio) for ratio in ratios.tolist()]
        reached = np.cumprod([1.0, *accepted])
        rejected = [*(1 - np.array(accepted)), 1.0]
        first = branches.choose((reached * rejected).tolist())
        return torch.tensor([2.0 if n == first else 0.0 for n in range(len(accepted))])

    def multinomial(probs, num_samples):
        return torch.tensor([[branches.choose(row.tolist())] for row in probs.double()])

    generate = Speculative(pair, configured(drafter))
    warped = {"temperature": sampling.temperature, "top_k": sampling.top_k}
    options = inputs(PROMPT, length) | warped | {"do_sample": True}
    found = np.zeros(VOCABULARY**length)
    places = {text: n for n, text in enumerate(product(range(VOCABULARY), repeat=length))}
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("specdec_core.tokens.acceptance.quantile", quantile)
        patch.setattr(torch, "rand_like", rand_like)
        patch.setattr(torch, "multinomial", multinomial)
        for weight, output in branches.run(lambda: generate(**options)):
            found[places[tuple(output[0, len(PROMPT) :].tolist())]] += weight
    return found


SAMPLING = Sampling(temperature=1.3, top_k=2)
FAR_CHAIN = {"kind": "draft_model", "draft": "far", "policy": {"kind": "fixed", "max_tokens": 2}}
NEAR_ELSE = {
    "kind": "hybrid",
    "lookup": {"kind": "suffix", "max_tokens": 2},
    "otherwise": CHAIN | {"draft": "near", "policy": PRODUCT},
}


@pytest.mark.parametrize("drafter", [FAR_CHAIN, NEAR_ELSE], ids=["chain", "hybrid"])
def test_samples_have_exactly_the_models_distribution(drafter):
    pair = toy_pair()
    expected = exact_distribution(pair, SAMPLING, 3)
    np.testing.assert_allclose(enumerated(pair, drafter, SAMPLING, 3), expected, atol=1e-6)


def test_candidates_with_another_distribution_would_be_found(monkeypatch):
    def uniform(self, tree):
        return torch.zeros(1, len(tree), VOCABULARY)

    monkeypatch.setattr(DraftCandidates, "_logits", uniform)
    pair = toy_pair()
    shift = enumerated(pair, FAR_CHAIN, SAMPLING, 3) - exact_distribution(pair, SAMPLING, 3)
    assert np.abs(shift).max() > 1e-2


@pytest.mark.parametrize(
    ("drafter", "reason"),
    [
        (None, "drafts nothing"),
        ({"kind": "tree"}, "drafts trees"),
        ({"kind": "hybrid", "merge": True}, "drafts trees"),
        ({"kind": "bandit", "arms": [CHAIN, {"kind": "dynamic_tree", "keep": 4}]}, "drafts trees"),
        ({"kind": "target_tree"}, "is lossy"),
        ({"kind": "pearl"}, "a device of its own"),
        (CHAIN | {"policy": {"kind": "oracle"}}, "knows the target's next tokens"),
        (CHAIN | {"draft": "other"}, "no draft 'other'"),
    ],
)
def test_what_cannot_be_verified_is_refused(pair, drafter, reason):
    with pytest.raises(UserError, match=reason):
        Speculative(pair, configured(drafter))


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        ({"num_beams": 2}, "num_beams"),
        ({"num_return_sequences": 2, "do_sample": True}, "a batch of 2 sequences"),
        ({"assistant_model": object()}, "assistant_model: the configuration already chooses the d"),
    ],
)
def test_calls_that_cannot_be_assisted_are_refused(pair, options, reason):
    with pytest.raises(UserError, match=reason):
        Speculative(pair, configured({"kind": "suffix"}))(**inputs(TEXTS[0]), **options)


def test_what_a_target_can_hold_here_limits_no_candidates_elsewhere(longrope_folder, tiny_spec):
    """Its positions change at 64 tokens, which this engine does not do."""
    model = AutoModelForCausalLM.from_pretrained(str(longrope_folder)).eval()
    text = [7, 8, 9, 10, 11]
    runner = RunnerSettings(max_length=8192, target_dtype="float32", draft_dtype="float32")
    spec = tiny_spec.model_copy(update={"runner": runner})
    for drafter, limited in ((CHAIN, True), ({"kind": "prompt_lookup"}, False)):
        chosen = PairConfiguration(pair=spec, configuration=configured(drafter))
        generate = speculative(model, chosen)
        own = generate.candidates.drafter
        for repeats, drafts in ((20, True), (120, not limited)):  # the draft has 512 positions
            own.begin(0, text * repeats)
            own.add(0, [7])
            assert bool(own.propose({0: 5})[0].tokens) == drafts
            own.end(0)
