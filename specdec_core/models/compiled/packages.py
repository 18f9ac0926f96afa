"""Graphs for a CPU: compiled ahead of time, with the weights packed in, and kept on disk.

One graph takes any number of rows, any width and any context, so there are at most four of a model
(one row or several, one token or several: torch compiles these apart). The first start of a model
compiles those it needs, which takes up to a minute each; later ones load them in a moment.
"""

from __future__ import annotations

import hashlib
import inspect
import json
import logging
from collections.abc import Sequence
from functools import cache
from pathlib import Path
from typing import Any
from zipfile import BadZipFile

import torch
import transformers
from torch import Tensor
from torch._inductor.cpp_builder import get_cpp_compiler
from torch._inductor.exc import InvalidCxxCompiler
from torch.export import Dim

from specdec_core.base.files import alone, atomic_path
from specdec_core.base.workspace import kept_folder
from specdec_core.models import attention
from specdec_core.models.compiled import step as step_module
from specdec_core.models.compiled.graphs import CannotCompile, Graphs, Inputs, first_line
from specdec_core.models.compiled.loading import load
from specdec_core.models.compiled.step import Step

log = logging.getLogger(__name__)

# The attended part of the cache is rounded up to a multiple of this.
_BLOCK = 16


class Packages(Graphs):
    """The graphs of one model in one place.

    `weights` identifies the weights: another digest is another graph. `positions` is the size of
    the cache.
    """

    def __init__(self, step: Step, weights: str, positions: int) -> None:
        self._step, self._positions = step, positions
        self._name = step.model.config.name_or_path or step.model.config.model_type
        # The digest needs a compiler to detect the processor's features, so it is made when needed.
        self._folder = cache(lambda: kept_folder("graphs") / _digest(step, weights, positions))
        self._loaded: dict[tuple[bool, bool], Any] = {}

    def end(self, end: int, positions: int) -> int:
        return min(-(-end // _BLOCK) * _BLOCK, positions - 1)

    def run(self, inputs: Inputs) -> Sequence[Tensor]:
        """The step's outputs; what the cache holds changes in place."""
        rows, _, width = inputs[0].shape
        kind = rows > 1, width > 2
        graph = self._loaded.get(kind)
        if graph is None:
            graph = self._loaded[kind] = self._open(*kind, inputs)
        feed, sees, columns, keys, values = inputs
        outputs: Sequence[Tensor] = graph.boxed_run([feed, *sees, columns, *keys, *values])
        return outputs

    def _open(self, several_rows: bool, several_tokens: bool, inputs: Inputs) -> Any:
        name = f"{'rows' if several_rows else 'row'}-{'tokens' if several_tokens else 'token'}"
        try:
            path = self._folder() / f"{name}.pt2"
            if not path.exists():
                with alone(path):
                    if not path.exists():  # not made by another process meanwhile
                        self._compile(path, several_rows, several_tokens, inputs)
            return load(path)
        except InvalidCxxCompiler:
            raise CannotCompile("no C++ compiler found (install g++, or set CXX)") from None
        except (OSError, RuntimeError, BadZipFile) as error:  # unusable folder or file
            raise CannotCompile(f"{self._folder()}: {first_line(error)}") from error

    def _compile(
        self, path: Path, several_rows: bool, several_tokens: bool, inputs: Inputs
    ) -> None:
        options = {
            "freezing": True,  # weights are constants, laid out for the processor once
            "cpp.enable_concat_linear": True,  # one product for query, key, value; for gate, up
        }
        _, sees, _, keys, values = inputs
        rows = Dim("rows", min=2, max=4096) if several_rows else Dim.STATIC
        width = Dim("width", min=3, max=self._positions) if several_tokens else Dim.STATIC
        tokens = width - 1 if several_tokens else Dim.STATIC
        nodes = Dim("nodes", min=3, max=1 << 20)
        end = Dim("end", min=2, max=self._positions - 1)
        shapes = (
            {0: rows, 2: width},
            [{0: rows, 1: tokens, 2: nodes}] * len(sees),
            {0: end},
            [{0: rows}] * len(keys),
            [{0: rows}] * len(values),
        )
        try:
            get_cpp_compiler()
            log.warning("compiling %s of %s: once, then kept", path.stem, self._name)
            with torch.inference_mode(False), torch.no_grad(), atomic_path(path) as temporary:
                program = torch.export.export(
                    self._step, inputs, dynamic_shapes=shapes, strict=False
                )
                torch._inductor.aoti_compile_and_package(
                    program, package_path=str(temporary), inductor_configs=options
                )
        except InvalidCxxCompiler:
            raise
        except Exception as error:  # of any of torch's compilers; eager forwards do without them
            raise CannotCompile(f"{type(error).__name__}: {first_line(error)}") from error


def _digest(step: Step, weights: str, positions: int) -> str:
    """Names everything that a graph depends on."""
    from torch._inductor.cpu_vec_isa import pick_vec_isa

    code = [inspect.getsource(source) for source in (attention, step_module, Packages._compile)]
    facts = [
        weights,
        str(step.model.dtype),
        str(positions),
        str(step.vocab_size),
        json.dumps(step.windows, sort_keys=True),
        step.model.config._attn_implementation,
        torch.__version__,
        transformers.__version__,
        str(pick_vec_isa()),
        str(torch.get_num_threads()),
        *code,
    ]
    return hashlib.sha256("\0".join(facts).encode()).hexdigest()[:20]
