"""vLLM's CPU build, in a separate virtual environment and separate processes."""

from __future__ import annotations

import logging
import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from specdec_core.base.errors import UserError
from specdec_core.base.workspace import workspace
from specdec_core.config import Configuration, PairConfiguration, PairSpec
from specdec_core.evidence.peers.peer import Peer
from specdec_core.evidence.peers.worker import Worker
from specdec_core.models.eagle import AnyHead
from specdec_core.models.eagle.exported import exportable, exported_head
from specdec_core.models.location import located
from specdec_core.models.pair import Pair
from specdec_core.models.reduced_draft import ReducedDraft
from specdec_core.models.reduced_draft.exported import exported_draft
from specdec_core.plugins import vllm as vllm_plug_in
from specdec_core.plugins import vllm_sampling

log = logging.getLogger(__name__)

VENV = Path(__file__).parents[3] / ".venv-peers"
_WORKER = Path(__file__).with_name("vllm_worker.py")
# Seconds. The first start of a model compiles it; later ones find that on disk.
_START, _DECODE = 1200, 600
TOKENS = "num_speculative_tokens"
_ANY_LOAD = 1024  # requests together, more than any engine here decodes


@dataclass(frozen=True)
class VllmMode:
    """A way to set vLLM up: its `speculative_config`, without the draft model's folder."""

    label: str
    speculative: dict[str, Any] | None = None
    plug_in: Configuration | None = None  # what the plug-in drafts by
    with_ours: bool = False  # settings or a plug-in of this library

    @property
    def tokens(self) -> int | None:
        """Tokens that it drafts, where that is set."""
        return (self.speculative or {}).get(TOKENS)

    def longer(self, tokens: int) -> VllmMode:
        """The mode with drafts of `tokens` tokens."""
        return replace(self, speculative={**(self.speculative or {}), TOKENS: tokens})


AUTOREGRESSIVE = VllmMode("vLLM")
# Drawn from the draft's distribution when sampling: more is accepted than of its argmax.
_DRAWN = {"draft_sample_method": "probabilistic"}
_PAIRED = {"use_heterogeneous_vocab": True}
DRAFT_MODEL = tuple(
    VllmMode(f"vLLM draft model K={k}", {"method": "draft_model", TOKENS: k, **_DRAWN})
    for k in (3, 5, 7)
)
HEAD = tuple(
    VllmMode(f"vLLM EAGLE-3 K={k}", {"method": "eagle3", TOKENS: k, **_DRAWN}) for k in (3, 5)
)


def lookup_mode(shortest: int, longest: int, tokens: int) -> VllmMode:
    """N-grams of `shortest` to `longest` tokens."""
    settings = {
        "method": "ngram",
        TOKENS: tokens,
        "prompt_lookup_min": shortest,
        "prompt_lookup_max": longest,
    }
    return VllmMode(f"vLLM n-gram K={tokens}", settings)


NGRAM = tuple(lookup_mode(2, 4, k) for k in (4, 8))
SUFFIX = VllmMode("vLLM suffix", {"method": "suffix"})


def by_load(mode: VllmMode) -> VllmMode:
    """The same, but that a running engine can be told to draft less: for any load it is the mode's
    number of tokens at first."""
    schedule = {"num_speculative_tokens_per_batch_size": [[1, _ANY_LOAD, mode.tokens]]}
    return replace(mode, speculative={**(mode.speculative or {}), **schedule})


def exported(settings: Mapping[str, Any], label: str) -> VllmMode:
    """vLLM with the `speculative_config` that it is exported, the draft's place included."""
    return VllmMode(f"vLLM with our export, {label}", dict(settings), with_ours=True)


def plug_in(configuration: Configuration, label: str) -> VllmMode:
    """vLLM with this library's plug-in."""
    assert configuration.drafter is not None
    return VllmMode(
        f"vLLM with our plug-in, {label}",
        {
            "method": "custom_class",
            "model": vllm_plug_in.CLASS,
            "num_speculative_tokens": configuration.drafter.depth,
        },
        configuration,
        with_ours=True,
    )


class VllmPeer(Peer):
    """vLLM in one mode: a long-lived process, for the speculative settings are fixed at start. Only
    in a mode :func:`by_load` it can be told to draft `length` tokens."""

    length: int | None = None

    def __init__(
        self,
        pair: Pair,
        mode: VllmMode,
        draft: str | None = None,
        venv: Path | None = None,
        requests: int = 1,
    ) -> None:
        self.name = mode.label + (f", {draft}" if draft else "")
        self.version, self.with_ours = "vllm", mode.with_ours
        self._venv = venv or environment_folder()
        self._worker: Worker | None = None
        self._mode, self._spec, self._folder = mode, pair.spec, ExitStack()
        self._eos = sorted(pair.eos_token_ids)
        self._engine = engine_settings(pair, mode, draft, requests)
        self._environment = {
            **process_environment(pair.spec.runner.threads),
            "VLLM_ENABLE_V1_MULTIPROCESSING": "0",  # front end and engine in one process
        }
        self.settings = {"engine": self._engine, "environment": self._environment}

    def open(self) -> None:
        python = python_of(self._venv, self.name)
        environment = inherited_environment() | self._environment
        folder = Path(self._folder.enter_context(TemporaryDirectory()))
        environment |= library_environment(folder)
        if self._mode.plug_in is not None:
            environment |= plug_in_environment(self._mode.plug_in, self._spec, folder)
        # -P: the script's folder has modules named like the libraries it needs
        self._worker = Worker(self.name, [str(python), "-P", str(_WORKER)], environment)
        try:
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
        if self.length is not None:
            request["length"] = self.length
        answer = self._ask(request)
        self.steps = answer["steps"]
        return list(answer["tokens"])

    def forget(self) -> None:
        self._ask({"forget": True})

    def measure(
        self, rows: int, context: int, lengths: Sequence[int], repeats: int, forced: bool
    ) -> list[dict[str, float]]:
        """Times of its steps; see :meth:`specdec_core.evidence.peers.vllm_steps.StepClock`."""
        wanted = {"rows": rows, "context": context, "lengths": list(lengths), "repeats": repeats}
        answer = self._ask({"measure": {**wanted, "forced": forced}})
        return list(answer["times"])

    def read(self, tokens: int, repeats: int) -> float:
        """Seconds of reading a prompt; see
        :meth:`specdec_core.evidence.peers.vllm_steps.StepClock.read`."""
        return float(self._ask({"read": {"tokens": tokens, "repeats": repeats}})["seconds"])

    def _ask(self, question: dict[str, Any]) -> dict[str, Any]:
        assert self._worker is not None  # it is open
        return self._worker.ask(question, _DECODE)

    def close(self) -> None:
        if self._worker is not None:
            self._worker.close()
            self._worker = None
        self._folder.close()


def environment_folder() -> Path:
    """vLLM's virtual environment: beside this code; for a Ray job, which runs in a copy without it,
    in the workspace."""
    return VENV if VENV.exists() else workspace() / VENV.name


def vllm_peers(pair: Pair, venv: Path | None = None) -> Iterator[VllmPeer]:
    """Autoregressive decoding, every draft model at every K, n-grams, and suffixes where
    `arctic-inference` is installed."""
    yield VllmPeer(pair, AUTOREGRESSIVE, venv=venv)
    for draft, modes in draft_modes(pair):
        for mode in modes:
            yield VllmPeer(pair, mode, draft, venv)
    for mode in NGRAM:
        yield VllmPeer(pair, mode, venv=venv)
    for mode in suffix_modes(venv or environment_folder()):
        yield VllmPeer(pair, mode, venv=venv)


def draft_modes(pair: Pair) -> Iterator[tuple[str, Sequence[VllmMode]]]:
    """How vLLM drafts with each draft that it has a place for."""
    for name, draft in pair.drafts.items():
        if exportable(draft, pair.target.config):
            yield name, HEAD
        elif not isinstance(draft, AnyHead):
            yield name, DRAFT_MODEL


def suffix_modes(venv: Path) -> tuple[VllmMode, ...]:
    """Suffix decoding; where vLLM lacks the package for it none, which a warning says."""
    if has_suffix(venv):
        return (SUFFIX,)
    log.warning(
        "vLLM's suffix decoding does not take part; for it: %s -m pip install --no-deps"
        " arctic-inference==0.1.1",
        venv / "bin" / "python",
    )
    return ()


def has_suffix(venv: Path) -> bool:
    """Whether vLLM's suffix decoding has the package there that it needs."""
    return any((venv / "lib").glob("python*/site-packages/arctic_inference"))


def python_of(venv: Path, name: str) -> Path:
    """The interpreter of vLLM's virtual environment. Raises :class:`UserError`, for the peer
    `name`, where there is none."""
    python = venv / "bin" / "python"
    if not python.exists():
        raise UserError(f"{name}: no virtual environment at {venv}; `make bench-peers` makes it")
    return python


def engine_settings(
    pair: Pair, mode: VllmMode, draft: str | None = None, requests: int = 1
) -> dict[str, Any]:
    """vLLM's engine arguments for a mode, with the pair's draft of that name where there is one, to
    decode up to `requests` requests together."""
    speculative = mode.speculative
    if draft is not None:
        speculative = {**_fitting(pair, mode, draft), "model": _draft_folder(pair, draft)}
    return {
        "model": located(pair.spec.target),
        "generation_config": "vllm",  # not what the checkpoint asks for
        "dtype": pair.spec.runner.target_dtype,
        "max_model_len": pair.max_length,
        "max_num_seqs": requests,
        "enable_prefix_caching": False,
        "kv_cache_memory_bytes": _kv_cache_bytes(pair, requests),
        "speculative_config": speculative,
    }


def _fitting(pair: Pair, mode: VllmMode, draft: str) -> dict[str, Any]:
    """The mode's settings. A draft model with another number of logits than the target vLLM takes
    only if it pairs their tokens by texts, and then it draws none."""
    told = dict(mode.speculative or {})
    models = (pair.target, pair.drafts[draft])
    logits = {model.config.get_text_config(decoder=True).vocab_size for model in models}
    if told.get("method") != "draft_model" or len(logits) == 1:
        return told
    return {name: v for name, v in told.items() if name not in _DRAWN} | _PAIRED


def _draft_folder(pair: Pair, draft: str) -> str:
    name, model, target = pair.spec.drafts[draft], pair.drafts[draft], pair.target
    if isinstance(model, ReducedDraft):
        return str(exported_draft(name, pair.spec.target, target.dtype))
    if not isinstance(model, AnyHead):
        return located(name)
    return str(exported_head(name, pair.fingerprints[draft], target.config, target.dtype))


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
    one."""
    return {k: v for k, v in os.environ.items() if k != "PYTHONPATH"}


def library_environment(folder: Path) -> dict[str, str]:
    """Variables for a process of vLLM in which this library is installed, with its entry point for
    vLLM: alone, by way of `folder`, without what is installed beside it."""
    library = Path(__file__).parents[2]
    (folder / library.name).symlink_to(library, target_is_directory=True)
    installed = folder / "specdec-0.dist-info"
    installed.mkdir()
    (installed / "METADATA").write_text("Metadata-Version: 2.1\nName: specdec\nVersion: 0\n")
    (installed / "entry_points.txt").write_text(
        f"[{vllm_sampling.GROUP}]\n{vllm_sampling.NAME} = {vllm_sampling.ENTRY_POINT}\n"
    )
    return {"PYTHONPATH": str(folder)}


def plug_in_environment(
    configuration: Configuration, spec: PairSpec, folder: Path
) -> dict[str, str]:
    """Variables for such a process in which the plug-in drafts by a configuration, which is written
    to `folder`."""
    used = configuration.drafts_of(spec.drafts)
    drafts = {name: located(model) for name, model in used.items()}
    pair = spec.model_copy(update={"target": located(spec.target), "drafts": drafts})
    chosen = PairConfiguration(pair=pair, configuration=configuration)
    return {vllm_plug_in.VARIABLE: str(chosen.save(folder / "specdec.yaml"))}


def _kv_cache_bytes(pair: Pair, requests: int) -> int:
    """Room for `requests` requests in all models, four times over: vLLM rounds up to blocks, and
    takes all of it at the start, in each of many workers."""
    total = 0
    for model in (pair.target, *pair.drafts.values()):
        config = model.config.get_text_config(decoder=True)
        heads = getattr(config, "num_key_value_heads", None) or config.num_attention_heads
        width = (
            getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
        )
        total += 2 * config.num_hidden_layers * heads * width * 4 * pair.max_length
    return max(1 << 26, 4 * requests * total)
