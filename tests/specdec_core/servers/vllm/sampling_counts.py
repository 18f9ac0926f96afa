"""Counts what vLLM's verification writes after candidates that are certain; run in its environment.

One JSON line in: {"logits": [3][vocabulary], "temperatures": one each request, "requests",
"candidates": 2 tokens}. One out: how often each request of a kind wrote each text, as
{"<temperature>": {"1 2 3": count}}.
"""

import json
import sys
from collections import Counter

import torch
from vllm.config.logging import LoggingConfig
from vllm.logger import configure_logging
from vllm.platforms import current_platform
from vllm.plugins import load_general_plugins
from vllm.v1.sample.logits_processor import LogitsProcessors
from vllm.v1.sample.metadata import SamplingMetadata
from vllm.v1.sample.rejection_sampler import RejectionSampler
from vllm.v1.sample.sampler import Sampler
from vllm.v1.spec_decode.metadata import SpecDecodeMetadata


def count(asked: dict) -> dict:
    logits = torch.tensor(asked["logits"])
    requests, chain = asked["requests"], asked["candidates"]
    temperatures = torch.tensor(asked["temperatures"]).repeat(requests)
    rows, width = len(temperatures), len(chain) + 1
    metadata = SpecDecodeMetadata.make_dummy([chain] * rows, torch.device("cpu"))
    places = torch.arange(rows * width).view(rows, width)
    metadata.target_logits_indices = places[:, :-1].reshape(-1)
    metadata.bonus_logits_indices = places[:, -1]
    nothing = torch.zeros(rows)
    sampling = SamplingMetadata(
        temperature=temperatures,
        all_greedy=False,
        all_random=True,
        top_p=None,
        top_k=None,
        generators={},
        max_num_logprobs=None,
        no_penalties=True,
        prompt_token_ids=None,
        frequency_penalties=nothing,
        presence_penalties=nothing,
        repetition_penalties=nothing,
        output_token_ids=[[] for _ in range(rows)],
        allowed_token_ids_mask=None,
        bad_words_token_ids={},
        logitsprocs=LogitsProcessors(),
        spec_token_ids=[list(chain) for _ in range(rows)],
    )
    sampler = RejectionSampler(Sampler())
    output = sampler(metadata, None, logits.repeat(rows, 1), sampling).sampled_token_ids
    counts: dict = {}
    for temperature, tokens in zip(temperatures.tolist(), output.tolist(), strict=True):
        text = " ".join(str(token) for token in tokens if token >= 0)
        counts.setdefault(f"{temperature:g}", Counter())[text] += 1
    return counts


# As vLLM's worker begins, where there is no Triton.
configure_logging(LoggingConfig())
load_general_plugins()
current_platform.import_kernels()
current_platform.register_triton_kernel_overrides()
torch.manual_seed(0)
asked = json.loads(sys.stdin.read())
print(json.dumps(count(asked)))
