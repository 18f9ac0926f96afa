"""Completes prompts with vLLM: one JSON line in, one JSON line out.

Runs in vLLM's own virtual environment, so it imports of this project only what needs torch alone.
The first line in is {"engine": keyword arguments of vllm.LLM}, answered by {"version", "settings"}
once the model is loaded. Each further line is {"prompt", "max_new_tokens", "temperature", "seed",
"eos"}, answered by {"tokens", "steps"}: new tokens, and the number that each step of the engine
added. {"call": method of StepClock, "arguments"} is answered by {"result"}.

The answer {"error"} is one line, after which the process ends. The process also ends at the end of
its input, whatever it is doing.
"""

from __future__ import annotations

import json
import os
import sys
from queue import SimpleQueue
from threading import Thread
from typing import TYPE_CHECKING, TextIO

if TYPE_CHECKING:
    from vllm.v1.engine import EngineCoreOutputs
    from vllm.v1.engine.core_client import InprocClient


def read_lines(lines: SimpleQueue[str]) -> None:
    """Queue the lines of the input. At its end the parent has ended, and so does this process."""
    for line in sys.stdin:
        lines.put(line)
    os._exit(0)


def counted(core: InprocClient) -> list[int]:
    """A list that grows by the new tokens of every decode step of `core`. vLLM's own counters of
    accepted tokens would cost time."""
    steps: list[int] = []
    step = core.get_output

    def get_output() -> EngineCoreOutputs:
        outputs = step()
        steps.extend(len(o.new_token_ids) for o in outputs.outputs if o.new_token_ids)
        return outputs

    core.get_output = get_output
    return steps


def serve(lines: SimpleQueue[str], answers: TextIO) -> None:
    engine_settings = json.loads(lines.get())["engine"]

    import torch
    import vllm
    from vllm import LLM, SamplingParams
    from vllm.engine.arg_utils import EngineArgs
    from vllm.inputs import TokensPrompt
    from vllm.usage.usage_lib import UsageContext

    from specdec_core.servers.vllm import sampling
    from specdec_core.servers.vllm.steps import StepClock

    # As many tokens in a step as in vLLM's server. Steps then take as long as the server's, and
    # this process and the server find each other's compiled models.
    most = EngineArgs.get_batch_defaults(world_size=1)[0][UsageContext.OPENAI_API_SERVER]
    most = min(most, engine_settings["max_num_seqs"] * engine_settings["max_model_len"])
    llm = LLM(**{"max_num_batched_tokens": most, **engine_settings})
    config = llm.llm_engine.vllm_config
    # By the entry point, which vLLM has called.
    repaired = sampling.repaired()
    version = f"vllm {vllm.__version__}" + (" (its sampling repaired)" if repaired else "")
    hello = {
        "version": f"{version}, torch {torch.__version__}",
        "settings": {
            "compilation": config.compilation_config.mode.name,
            "model_runner": "v2" if config.use_v2_model_runner else "v1",
            "async_scheduling": bool(config.scheduler_config.async_scheduling),
            "threads": torch.get_num_threads(),
            "repaired": ["expand_batch_to_tokens"] if repaired else [],
        },
    }
    print(json.dumps(hello), file=answers)
    steps, clock = counted(llm.llm_engine.engine_core), StepClock(llm)
    while True:
        request = json.loads(lines.get())
        if "call" in request:
            result = getattr(clock, request["call"])(**request["arguments"])
            print(json.dumps({"result": result}), file=answers)
            continue
        parameters = SamplingParams(
            max_tokens=request["max_new_tokens"],
            temperature=request["temperature"],
            seed=request["seed"],
            ignore_eos=True,
            stop_token_ids=request["eos"],
            detokenize=False,
        )
        prompt = TokensPrompt(prompt_token_ids=request["prompt"])
        steps.clear()
        [output] = llm.generate([prompt], parameters, use_tqdm=False)
        answer = {"tokens": list(output.outputs[0].token_ids), "steps": steps}
        print(json.dumps(answer), file=answers)


def main() -> None:
    answers = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)  # whatever is printed must not be taken for an answer
    lines: SimpleQueue[str] = SimpleQueue()
    Thread(target=read_lines, args=(lines,), daemon=True).start()
    try:
        serve(lines, answers)
    except Exception as error:
        reason = " ".join(f"{type(error).__name__}: {error}".split())
        print(json.dumps({"error": reason}), file=answers)
        raise


if __name__ == "__main__":
    main()
