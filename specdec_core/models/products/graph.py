"""The linear layers of an exported model by the operator."""

from __future__ import annotations

import operator
from collections import defaultdict

import torch
from torch import Tensor
from torch.fx import GraphModule, Node

from specdec_core.models.products.operator import fits, panels


def replace_linear_layers(module: GraphModule) -> None:
    """Have the operator multiply, in place, where it can; layers that read the same rows (query,
    key, value; gate, up) by one product."""
    graph = module.graph
    readers: dict[Node, list[Node]] = defaultdict(list)
    for node in graph.find_nodes(op="call_function", target=torch.ops.aten.linear.default):
        rows, matrix, *bias = node.all_input_nodes
        if not bias and matrix.op == "get_attr" and fits(_weight(module, node)):
            readers[rows].append(node)
    for number, (rows, layers) in enumerate(readers.items()):
        weights = [_weight(module, layer) for layer in layers]
        name = f"_panels_{number}"
        module.register_buffer(name, panels(torch.cat(weights)))
        with graph.inserting_before(layers[0]):
            matrix = graph.get_attr(name)
            product = graph.call_function(torch.ops.specdec.multiply.default, (rows, matrix))
            parts = [product]
            if len(layers) > 1:
                sizes = [len(weight) for weight in weights]
                split = torch.ops.aten.split_with_sizes.default
                whole = graph.call_function(split, (product, sizes, -1))
                parts = [
                    graph.call_function(operator.getitem, (whole, n)) for n in range(len(sizes))
                ]
        for layer, part in zip(layers, parts, strict=True):
            layer.replace_all_uses_with(part)
            graph.erase_node(layer)
    for read in graph.find_nodes(op="get_attr"):
        if not read.users:
            graph.erase_node(read)
    module.recompile()
    _forget_unused(module)


def _weight(module: GraphModule, layer: Node) -> Tensor:
    weight: Tensor = operator.attrgetter(str(layer.all_input_nodes[1].target))(module)
    return weight.detach()


def _forget_unused(module: GraphModule) -> None:
    """A matrix that nothing reads any more would be kept beside its panels."""
    read = {node.target for node in module.graph.find_nodes(op="get_attr")}
    for name, _ in list(module.named_parameters(remove_duplicate=False)):
        if name not in read:
            owner, _, own = name.rpartition(".")
            delattr(module.get_submodule(owner), own)
