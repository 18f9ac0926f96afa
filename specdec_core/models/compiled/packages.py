"""Graphs for a CPU: compiled ahead of time, with the weights packed in, and kept on disk.

The first start of a model compiles those it needs, which takes up to a minute each; later ones load
them in a moment.
"""

from __future__ import annotations

import hashlib
import inspect
import json
import logging
import sys
from collections.abc import Callable, Sequence
from functools import cache
from pathlib import Path
from typing import Any
from zipfile import ZipFile

import torch
import transformers
from torch import Tensor, nn
from torch._inductor.cpp_builder import get_cpp_compiler
from torch._inductor.exc import InvalidCxxCompiler
from transformers import PretrainedConfig

from specdec_core.base.files import atomic_folder, made_once
from specdec_core.base.workspace import kept_folder
from specdec_core.models import attention, confidence, draft_vocabulary, features, huge_pages
from specdec_core.models.cache import tensor_layer
from specdec_core.models.compiled.failures import CannotCompile, first_line
from specdec_core.models.products import graph as products
from specdec_core.models.products import operator
from specdec_core.models.row_attention import operator as attending
from specdec_core.models.row_attention import plans

log = logging.getLogger(__name__)

_OPTIONS = {
    "freezing": True,  # weights are constants, laid out for the processor once
    "cpp.enable_concat_linear": True,  # one product for query, key, value; for gate, up
}
# What is traced beside the code of the modules in a step.
_TRACED = (
    attention,
    attending,
    confidence,
    draft_vocabulary,
    features,
    plans,
    tensor_layer,
)


class Packages:
    """The graphs of `step`, a module that calls the model with that `config`; its arguments are
    tensors and lists of tensors.

    `facts` are what a graph depends on beside the code, torch and the processor: different facts
    give different graphs. Where it is faster, the project's operator multiplies by matrices in
    bfloat16.
    """

    def __init__(self, step: nn.Module, config: PretrainedConfig, facts: Sequence[object]) -> None:
        self._step = step
        self._name = config.name_or_path or config.model_type
        reduced = any(weight.dtype == torch.bfloat16 for weight in step.parameters())
        self._multiplies = reduced and operator.available()
        layers = [module for module in step.modules() if isinstance(module, nn.Linear)]
        plain = all(layer.bias is None and operator.fits(layer.weight) for layer in layers)
        # Whether products take any number of rows without making a kernel for it first.
        self.any_width = self._multiplies and plain
        multiplied = map(inspect.getsource, (products, operator) if self._multiplies else ())
        own = (config._attn_implementation, *facts, *multiplied)
        # The digest needs a compiler to detect the processor's features, so it is made when needed.
        self._folder = cache(lambda: kept_folder("graphs") / _digest(step, own))

    def open(
        self, name: str, inputs: Sequence[Any], shapes: Sequence[Any]
    ) -> Callable[[list[Tensor]], Sequence[Tensor]]:
        """The graph of that name, which takes its tensors in one list (and empties it). A graph
        that is not on disk is compiled from example `inputs`; `shapes` names the dimensions that
        vary, as torch.export has them. Raises :class:`CannotCompile` where there is none."""
        try:
            path = self._folder() / name
            made_once(path, lambda: self._compile(path, tuple(inputs), tuple(shapes)))
            run: Callable[[list[Tensor]], Sequence[Tensor]] = load(path).boxed_run
            return run
        except InvalidCxxCompiler:
            raise CannotCompile("no C++ compiler found (install g++, or set CXX)") from None
        except (OSError, RuntimeError) as error:  # unusable folder or file
            raise CannotCompile(f"{self._folder()}: {first_line(error)}") from error

    def _compile(self, path: Path, inputs: tuple[Any, ...], shapes: tuple[Any, ...]) -> None:
        try:
            get_cpp_compiler()
            log.warning("compiling %s of %s: once, then kept", path.name, self._name)
            with torch.inference_mode(False), torch.no_grad(), atomic_folder(path) as folder:
                program = torch.export.export(
                    self._step, inputs, dynamic_shapes=shapes, strict=False
                )
                if self._multiplies:
                    module = program.module()
                    products.replace_linear_layers(module)
                    program = torch.export.export(
                        module, inputs, dynamic_shapes=shapes, strict=False
                    )
                package = folder / "package.pt2"
                torch._inductor.aoti_compile_and_package(
                    program, package_path=str(package), inductor_configs=dict(_OPTIONS)
                )
                # For every process torch would unpack a package into the temporary folder, where
                # a killed process leaves it. An unpacked package is loaded in place.
                with ZipFile(package) as archive:
                    archive.extractall(folder)
                package.unlink()
        except InvalidCxxCompiler:
            raise
        except Exception as error:  # of any of torch's compilers; eager forwards do without them
            raise CannotCompile(f"{type(error).__name__}: {first_line(error)}") from error


@cache
def load(folder: Path) -> Any:
    """The graph in `folder`, shared by all runners of this process. Torch's loader alone, because
    its Python wrapper reads the description of the inputs at every call, which takes longer than a
    small draft's forward. Raises OSError or RuntimeError for a graph that cannot be loaded."""
    graph = torch._C._aoti.AOTIModelPackageLoader(str(folder), "model", False, 1, -1)
    if any(file.stat().st_size >= huge_pages.SIZE for file in folder.rglob("*")):
        huge_pages.settle()
    return graph


def _digest(step: nn.Module, facts: Sequence[object]) -> str:
    """A name for everything that a graph depends on."""
    from torch._inductor.cpu_vec_isa import pick_vec_isa

    parts = {type(part).__module__ for part in step.modules()}
    ours = sorted(name for name in parts if not name.startswith(("torch.", "transformers.")))
    modules = [sys.modules[name] for name in ours]
    names = [
        *map(str, facts),
        json.dumps(_OPTIONS, sort_keys=True),
        torch.__version__,
        transformers.__version__,
        str(pick_vec_isa()),
        str(torch.get_num_threads()),
        *map(inspect.getsource, (*_TRACED, *modules)),
    ]
    return hashlib.sha256("\0".join(names).encode()).hexdigest()[:20]
