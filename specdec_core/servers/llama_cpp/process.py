"""llama.cpp's server: where its programs are, and the command that starts it."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import httpx

from specdec_core.base.errors import UserError
from specdec_core.base.workspace import workspace
from specdec_core.models.pair import Pair
from specdec_core.servers.llama_cpp import DRAFT
from specdec_core.servers.llama_cpp.conversion import TYPES, gguf_of
from specdec_core.servers.server import Mode, ServedMode

FOLDER = Path(__file__).parents[3] / ".llama-cpp"
SERVER = "llama-server"
_ANSWER = 60.0  # seconds
# In what --version prints, as "version: 0.6.0-dev (build 11434, commit unknown)".
_BUILD = r"\bbuild (\d+)"


def environment_folder() -> Path:
    """What `make llama-cpp` makes: beside this code; for a Ray job, which runs in a copy without
    it, in the workspace."""
    return FOLDER if FOLDER.exists() else workspace() / FOLDER.name


def conversion_script() -> Path:
    """llama.cpp's script that writes GGUF files, where `make llama-cpp` puts it."""
    return environment_folder() / "source" / "convert_hf_to_gguf.py"


def program() -> Path | None:
    """`llama-server`: of :func:`environment_folder`, else from the PATH; None if it is in
    neither."""
    own = environment_folder() / "bin" / SERVER
    found = str(own) if own.exists() else shutil.which(SERVER)
    return None if found is None else Path(found)


def missing() -> str | None:
    """A line on why the server cannot start; None where it can."""
    if program() is None:
        return f"no {SERVER} in {environment_folder()} or on the PATH; `make llama-cpp` builds it"
    return None


def version() -> str:
    """The build that the program prints. Raises :class:`UserError` where it is missing or does not
    run."""
    answer = subprocess.run(
        [str(_program()), "--version"], capture_output=True, text=True, check=False
    )
    said = (answer.stdout + answer.stderr).strip()
    found = re.search(_BUILD, said)
    if found is None:
        raise UserError(f"{program()} --version: {said.splitlines()[-1] if said else 'nothing'}")
    return f"llama.cpp b{found[1]}"


def served(pair: Pair, mode: Mode, cores: Sequence[int]) -> ServedMode:
    """A mode as llama.cpp's HTTP server. Models in other formats are converted to GGUF at their
    first use. Raises :class:`UserError` where the program is not installed, and for a model that
    it cannot read."""
    released, models = version(), _files(pair, mode)

    def command(requests: int, port: int) -> list[str]:
        where = {"host": "127.0.0.1", "port": port}
        options = {**models, **engine_options(pair, mode, requests), **_bound(mode, cores), **where}
        return [str(_program()), *as_options(options)]

    # LLAMA_ARG_… variables stand for options that are not given, and one for a key to ask for.
    ours = ("LLAMA_ARG_", "LLAMA_API_KEY")
    own = {name: value for name, value in os.environ.items() if not name.startswith(ours)}
    settings = {**models, **engine_options(pair, mode)}
    return ServedMode(released, settings, command, own, None if mode.autoregressive else _lacks)


def engine_options(pair: Pair, mode: Mode, requests: int = 1) -> dict[str, Any]:
    """The options for a mode without its models, to decode up to `requests` requests together. A
    value None stands for an option without a value."""
    runner, dtype = pair.spec.runner, _dtype(pair)
    options: dict[str, Any] = {
        "parallel": requests,
        "ctx-size": requests * pair.max_length,
        "threads": runner.threads,
        "threads-batch": runner.threads,
        "cache-type-k": TYPES[dtype],
        "cache-type-v": TYPES[dtype],
        # Its fused attention computes in float16.
        "flash-attn": "off" if dtype == "float32" else "auto",
        "no-cache-prompt": None,  # each request prefills its whole prompt, as in other servers
        "cache-ram": 0,
        "no-ui": None,
        "metrics": None,
    }
    if DRAFT in mode.settings:
        options |= {f"spec-draft-type-{part}": TYPES[dtype] for part in "kv"}
        options["spec-draft-threads"] = options["spec-draft-threads-batch"] = runner.threads
    return options | {name: value for name, value in mode.settings.items() if name != DRAFT}


def as_options(options: Mapping[str, Any]) -> list[str]:
    """Options as words of a command line."""
    words = []
    for name, value in options.items():
        words += [f"--{name}"] if value is None else [f"--{name}", str(value)]
    return words


def _lacks(url: str, environment: Mapping[str, str]) -> str | None:
    """Without a draft that it can use, the server only prints why, and decodes without."""
    key = environment.get("LLAMA_API_KEY")
    headers = {"Authorization": f"Bearer {key}"} if key else {}
    try:
        answer = httpx.get(f"{url}/slots", headers=headers, timeout=_ANSWER, trust_env=False)
    except httpx.HTTPError as error:
        return f"its server does not answer: {error}"
    if answer.is_error or all(slot["speculative"] for slot in answer.json()):
        return None  # with --no-slots it does not say
    return "its server decodes without speculation"


def _program() -> Path:
    if (found := program()) is None:
        raise UserError(f"llama.cpp: {missing()}")
    return found


def _dtype(pair: Pair) -> str:
    return str(pair.target.dtype).removeprefix("torch.")


def _files(pair: Pair, mode: Mode) -> dict[str, str]:
    """The models of a mode as GGUF files, by their options."""
    script = conversion_script()
    files = {"model": str(gguf_of(pair.spec.target, _dtype(pair), script))}
    if (draft := mode.settings.get(DRAFT)) is not None:
        head = pair.spec.target if mode.settings["spec-type"].endswith("eagle3") else None
        files[DRAFT] = str(gguf_of(draft, _dtype(pair), script, head))
    return files


def _bound(mode: Mode, cores: Sequence[int]) -> dict[str, Any]:
    """Options that bind the compute threads to `cores`, one each."""
    if not cores:
        return {}
    options: dict[str, Any] = {"cpu-mask": hex(sum(1 << core for core in cores)), "cpu-strict": 1}
    if DRAFT in mode.settings:
        options |= {f"spec-draft-{name}": value for name, value in options.items()}
    return options
