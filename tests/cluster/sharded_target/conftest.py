"""A model that tests split by layers."""

import pytest
import torch
from transformers import GPT2Config, GPT2LMHeadModel

from tests.conftest import tiny_tokenizer


@pytest.fixture(scope="module")
def gpt2_folder(tmp_path_factory):
    """A model whose heads transformers cannot split."""
    folder = tmp_path_factory.mktemp("gpt2")
    torch.manual_seed(2)
    sizes = {"n_embd": 32, "n_layer": 3, "n_head": 4, "n_positions": 256, "initializer_range": 0.2}
    config = GPT2Config(vocab_size=320, bos_token_id=0, eos_token_id=0, **sizes)
    GPT2LMHeadModel(config).save_pretrained(folder)
    tiny_tokenizer().save_pretrained(folder)
    return str(folder)
