"""What ends a sequence is the same wherever it is decoded: the template's end of turn, too."""

import shutil

import pytest

from specdec_core.config import Sampling
from specdec_core.engine import Engine, Request
from specdec_core.models.pair import load_pair
from tests.conftest import chat_tokenizer

TURNS = "{% for m in messages %}[{{ m.role }}]{{ m.content }}draft\n{% endfor %}"


@pytest.fixture
def pair(tiny_spec, tiny_pair_folders, tmp_path):
    """A pair with a template that ends turns with a token which the generation settings lack."""
    tokenizer = chat_tokenizer(TURNS)
    tokenizer.add_special_tokens({"additional_special_tokens": ["draft"]})
    for name, folder in tiny_pair_folders.items():
        shutil.copytree(folder, tmp_path / name)
        tokenizer.save_pretrained(tmp_path / name)
    models = {"target": str(tmp_path / "target"), "drafts": {"draft": str(tmp_path / "draft")}}
    return load_pair(tiny_spec.model_copy(update=models))


def test_an_answer_ends_with_the_templates_end_of_turn(pair):
    end = pair.tokenizer.convert_tokens_to_ids("draft")
    assert pair.eos_token_ids == {pair.tokenizer.eos_token_id, end}
    likely = Sampling(logit_bias=((end, 100.0),))
    (generation,) = Engine(pair).generate([Request("a", (5, 6, 7), 24, likely)])
    assert (generation.tokens, generation.finish_reason) == ([end], "stop")
