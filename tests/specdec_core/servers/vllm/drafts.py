"""What vLLM drafts with an EAGLE head: run in its own environment, with a head's folder that names
the target, prompt tokens and a number of new ones as JSON in, tokens and drafts as JSON out.

vLLM's front end does not show drafts, so that of its proposer is written down as it is called.
"""

import json
import os
import sys
from typing import Any

os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"  # so that the proposer is in this process


def main() -> None:
    answer = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # whatever is printed is no answer
    request = json.load(sys.stdin)

    from vllm import LLM, SamplingParams
    from vllm.inputs import TokensPrompt

    llm = LLM(
        model=request["head"],
        generation_config="vllm",
        dtype="float32",
        max_model_len=128,
        max_num_seqs=1,
        enable_prefix_caching=False,
        enforce_eager=True,
        kv_cache_memory_bytes=1 << 26,
    )
    executor: Any = llm.llm_engine.model_executor
    proposer = executor.driver_worker.worker.model_runner.drafter
    propose, drafts = proposer.propose, []

    def watched(*args: Any, **options: Any) -> Any:
        drafted = propose(*args, **options)
        drafts.append(drafted[0].tolist())
        return drafted

    proposer.propose = watched
    sampling = SamplingParams(
        max_tokens=request["new"], temperature=0, ignore_eos=True, detokenize=False
    )
    prompt = TokensPrompt(prompt_token_ids=request["prompt"])
    [output] = llm.generate([prompt], sampling, use_tqdm=False)
    tokens = list(output.outputs[0].token_ids)
    json.dump({"tokens": tokens, "drafts": drafts}, answer)
    answer.close()


if __name__ == "__main__":
    main()
