"""Drafts with a reduced vocabulary: each stored form, compiled graphs, and what is refused."""

import json

import pytest
import torch
from safetensors.torch import load_file, save_file

from specdec_core.base.errors import UserError
from specdec_core.engine import Engine, Request
from specdec_core.models.compiled import CompiledRunner
from specdec_core.models.draft_vocabulary import NEVER
from specdec_core.models.eager import EagerRunner
from specdec_core.models.fingerprints import fingerprint
from specdec_core.models.loading import load_skeleton
from specdec_core.models.pair import check_pair, load_drafts, load_pair, resolve_dtypes
from specdec_core.models.reduced_draft.model import ReducedDraft
from specdec_core.models.reduced_draft.target_tables import target_embedding
from specdec_core.models.runner import Batch
from tests.specdec_core.kinds import chain, configured
from tests.specdec_core.models.reduced_draft.drafts import TABLES, write_draft

PROPOSABLE = list(range(0, 300, 3))
TEXT = torch.tensor([[5, 6, 7, 8, 90, 91]])


@pytest.fixture
def folder(tiny_spec, tmp_path):
    write_draft(tiny_spec, tmp_path / "draft", PROPOSABLE)
    return tmp_path / "draft"


@pytest.fixture(params=["projected", "target"])
def either(request, tiny_spec, tmp_path):
    """A draft with embedding and output layer of the draft's width, and one with its target's."""
    write_draft(tiny_spec, tmp_path / "either", PROPOSABLE, request.param)
    return tmp_path / "either"


def spec_of(spec, folder, **runner):
    return spec.with_runner(**runner).model_copy(update={"drafts": {"d": str(folder)}})


def loaded(spec, folder, **runner):
    draft = load_drafts(spec_of(spec, folder, **{"device": "cpu", **runner}))["d"]
    assert isinstance(draft, ReducedDraft)
    return draft


@pytest.mark.parametrize("tables", TABLES)
def test_a_draft_is_read_as_it_was_written(tiny_spec, tiny_pair, tmp_path, tables):
    folder, size = tmp_path / "draft", tiny_pair.target.config.vocab_size
    draft = write_draft(tiny_spec, folder, PROPOSABLE, tables)
    with torch.no_grad():
        expected = draft(TEXT).logits
        found = loaded(tiny_spec, folder)(TEXT).logits
    assert found.shape == (1, TEXT.shape[1], size)
    others = [token for token in range(size) if token not in PROPOSABLE]
    assert (found[..., others] == NEVER).all()
    error = (found - expected)[..., PROPOSABLE].norm() / expected[..., PROPOSABLE].norm()
    assert error < 0.06


def test_the_targets_own_tables_are_not_stored(tiny_spec, tmp_path):
    write_draft(tiny_spec, tmp_path / "draft", PROPOSABLE, "target")
    stored = load_file(tmp_path / "draft" / "model.safetensors")
    assert {name.split(".")[1] for name in stored if "." in name} == {"layers", "norm"}
    files = {path.name for path in (tmp_path / "draft").iterdir()}
    assert files == {"config.json", "model.safetensors"}


def test_an_embedding_that_is_more_than_a_table_is_that_of_the_loaded_target(tmp_path):
    from transformers import Gemma3ForCausalLM, Gemma3TextConfig

    sizes = {"hidden_size": 32, "intermediate_size": 32, "head_dim": 8, "vocab_size": 40}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "num_hidden_layers": 1}
    model = Gemma3ForCausalLM(Gemma3TextConfig(**sizes, **heads))
    model.save_pretrained(tmp_path)
    embedding = model.get_input_embeddings()
    torch.testing.assert_close(target_embedding(str(tmp_path)), embedding(torch.arange(40)))
    assert not torch.allclose(target_embedding(str(tmp_path)), embedding.weight)


@pytest.mark.parametrize("pack", [False, True], ids=["plain", "packed"])
def test_greedy_output_is_the_targets_own(tiny_spec, either, pack):
    pair = load_pair(spec_of(tiny_spec, either, pack=pack))
    requests = [Request(str(n), (5 + n, 6, 7), 24) for n in range(3)]
    drafters = (None, {"kind": "tree"}, chain("svip", threshold=1.5, max_tokens=4))
    engines = (Engine(pair, configured(drafter), 2) for drafter in drafters)
    first, *others = ([g.tokens for g in each.generate(requests)] for each in engines)
    assert others == [first] * 2


@pytest.mark.long
def test_compiled_logits_are_those_of_eager_forwards(tiny_spec, either, tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    draft = loaded(tiny_spec, either, pack=False)
    eager, inner = (EagerRunner(draft, 2, 96, compact=True) for _ in range(2))
    compiled = CompiledRunner(inner, fingerprint(str(either)))
    assert compiled._graphs is not None
    for batch in (Batch([0, 1], [[5, 6, 7], [8, 9]]), Batch([0, 1], [[10], [11]])):
        found, expected = compiled.forward(batch).logits, eager.forward(batch).logits
        torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-4)


def set_(name, value):
    return lambda tensors: tensors.__setitem__(name, value)


NARROW = torch.zeros(16, 31, dtype=torch.int8)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda tensors: tensors.pop("projection_int8"), "missing tensors: projection"),
        (lambda tensors: tensors.pop("projection_scale"), "projection: no scale for each of its 1"),
        (lambda tensors: tensors.pop("d2t"), "missing tensors: d2t"),
        (lambda tensors: tensors.pop("lm_head.weight_int8"), "missing tensors: lm_head.weight"),
        (set_("more", torch.zeros(2)), "unknown tensors: more"),
        (set_("projection_int8", NARROW), r"projection has the shape \(16, 31\), not \(16"),
        (set_("d2t", torch.full((100,), 4000)), "d2t leads outside of the target's"),
        (set_("d2t", torch.arange(100).flip(0)), "d2t does not lead to increasing tokens"),
        (set_("d2t", torch.zeros(100)), "d2t is not 100 whole numbers"),
    ],
)
def test_other_tensors_are_refused_in_one_line(tiny_spec, folder, change, message):
    tensors = load_file(folder / "model.safetensors")
    change(tensors)
    save_file(tensors, folder / "model.safetensors")
    with pytest.raises(UserError, match=message) as error:
        loaded(tiny_spec, folder)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"target_fingerprint": "0" * 16}, "was trained for another target"),
        ({"draft_vocab_size": 10**6}, "proposes 1000000 tokens of a vocabulary of"),
        ({"projected": False}, "is 16 wide, but shares tables of a target of"),
        ({"colour": "red"}, "colour: unknown key"),
        (None, "config.json: reduced"),
    ],
)
def test_another_configuration_is_refused_in_one_line(tiny_spec, folder, changes, message):
    config = json.loads((folder / "config.json").read_text())
    config["reduced"] = changes and {**config["reduced"], **changes}
    (folder / "config.json").write_text(json.dumps(config))
    with pytest.raises(UserError, match=message) as error:
        loaded(tiny_spec, folder)
    assert "\n" not in str(error.value)


def test_it_is_made_without_its_weights_like_any_model(tiny_spec, folder):
    """For a skeleton, and to measure which data type is faster."""
    skeleton = load_skeleton(str(folder))
    assert skeleton.get_output_embeddings().linear.out_features == len(PROPOSABLE)
    resolved = resolve_dtypes(spec_of(tiny_spec, folder, device="cpu", draft_dtype="auto"))
    assert resolved.runner.draft_dtype in ("float32", "bfloat16")
    assert loaded(resolved, folder).dtype == getattr(torch, resolved.runner.draft_dtype)


def test_hidden_states_are_what_the_output_layer_reads(tiny_spec, folder):
    """Acceptance heads read them."""
    draft = loaded(tiny_spec, folder, pack=False)
    runner = EagerRunner(draft, 1, 64)
    runner.watch_hidden(True)
    output = runner.forward(Batch([0], [TEXT[0].tolist()]))
    with torch.no_grad():
        states = draft.model(TEXT).last_hidden_state
        logits = draft(TEXT).logits
    torch.testing.assert_close(output.hidden, states[0])
    torch.testing.assert_close(output.logits, logits[0])


def test_it_is_no_target(tiny_spec, folder):
    with pytest.raises(UserError, match="reduced vocabulary; it cannot be a target"):
        check_pair(tiny_spec.model_copy(update={"target": str(folder)}))


def test_a_target_without_its_weights(tiny_spec, folder, tmp_path):
    nowhere = tiny_spec.model_copy(update={"target": str(tmp_path / "nowhere")})
    with pytest.raises(UserError, match="nowhere: no such folder"):
        loaded(nowhere, folder)
