"""Models that the slot cache cannot serve exactly are refused in one line, at once."""

import pytest
import torch
from transformers import (
    AutoModelForCausalLM,
    BloomConfig,
    GPTNeoConfig,
    OpenAIGPTConfig,
    RwkvConfig,
    xLSTMConfig,
)

from specdec_core.base.errors import UserError
from specdec_core.config import PairSpec, RunnerSettings
from specdec_core.models.eager import EagerRunner
from specdec_core.models.pair import check_pair, max_length_of
from specdec_core.models.runner import Batch
from specdec_core.models.supported import check_supported

SHORT = 64  # positions of the Phi-3 with longrope


def test_an_alibi_model_is_refused_by_name():
    with pytest.raises(UserError, match="bloom uses ALiBi positions"):
        check_supported(BloomConfig(), "some/model")


@pytest.mark.parametrize(
    "config", [RwkvConfig(), xLSTMConfig(), OpenAIGPTConfig()], ids=lambda config: config.model_type
)
def test_a_model_whose_forward_takes_no_cache_is_refused_by_name(config):
    with pytest.raises(UserError, match=f"{config.model_type} takes no past_key_values") as error:
        check_supported(config, "some/model")
    assert "\n" not in str(error.value)


def test_local_attention_that_counts_columns_is_refused_by_name():
    with pytest.raises(UserError, match="gpt_neo has local attention layers"):
        check_supported(GPTNeoConfig(), "some/model")
    alike = GPTNeoConfig(num_layers=2, attention_types=[[["global"], 2]])
    check_supported(alike, "some/model")


def test_slots_in_which_longrope_would_change_positions_are_refused(longrope_folder):
    runner = RunnerSettings(max_length=SHORT + 1)
    spec = PairSpec(target=str(longrope_folder), drafts={}, runner=runner)
    assert max_length_of(spec) == SHORT
    with pytest.raises(UserError, match=f"is {SHORT + 1}, and may be {SHORT} at most") as error:
        check_pair(spec)
    assert "\n" not in str(error.value)
    check_pair(spec.model_copy(update={"runner": RunnerSettings(max_length=SHORT)}))


@pytest.mark.parametrize("packs", [True, False])
@torch.inference_mode()
def test_longrope_rows_change_no_positions_of_one_another(longrope_folder, packs):
    """Padding and candidates may lie past what a slot holds."""
    model = AutoModelForCausalLM.from_pretrained(longrope_folder).eval()
    long, short = [5 + 3 * n % 300 for n in range(SHORT)], [9, 8, 7]
    expected = [model(torch.tensor([text])).logits[0, -1] for text in (long, short)]
    runner = EagerRunner(model, slots=2, max_length=SHORT, packs=packs)
    runner.prefill([0], [long[:-1]])
    beyond = [long[-1], 20, 21, 22]
    output = runner.forward(Batch([0, 1], [beyond, short]))
    torch.testing.assert_close(output.of_row(0)[0], expected[0], atol=2e-5, rtol=0)
    torch.testing.assert_close(output.of_row(1)[-1], expected[1], atol=2e-5, rtol=0)
