"""A part of a model: some heads of every layer, or some whole layers. Only the part is loaded.

Heads are split by transformers' tensor parallelism. Layers are split for any decoder with one list
of layers: each process runs the model's code with placeholders for the layers before its own, and
sends the hidden states to the next rank. An :class:`Exchange` connects the parts, by operators that
compiled graphs can contain.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from transformers import AutoModelForCausalLM, PreTrainedModel
from transformers.distributed import DistributedConfig
from transformers.distributed.parallel_utils import replace_layer_number_by_wildcard

from cluster.sharded_target import operators
from cluster.sharded_target.exchange import Exchange, NcclExchange
from specdec_core.base.errors import UserError
from specdec_core.config import PairSpec, TargetPlacement
from specdec_core.models.features import decoder_layers
from specdec_core.models.loading import load_config, load_skeleton, load_weights
from specdec_core.models.supported import check_causal


def check_target(spec: PairSpec, target: TargetPlacement) -> None:
    """Refuse, in one line, a placement that the pair's target does not allow."""
    name, parts = spec.target, target.devices
    config: Any = load_config(name).get_text_config(decoder=True)
    if parts == 1:
        return
    if target.split == "layers":
        if parts > config.num_hidden_layers:
            raise UserError(
                f"{name}: target.devices: {parts} asked for, but the model has only"
                f" {config.num_hidden_layers} layers to split"
            )
        return
    if getattr(config, "base_model_tp_plan", None) is None:
        raise UserError(
            f"{name}: transformers has no tensor-parallel plan for {config.model_type};"
            " use target.split: layers"
        )
    heads = config.num_attention_heads
    shared = getattr(config, "num_key_value_heads", None) or heads
    if heads % parts or shared % parts:
        possible = [n for n in range(1, shared + 1) if heads % n == 0 and shared % n == 0]
        raise UserError(
            f"{name}: {heads} attention heads and {shared} key-value heads cannot be split evenly"
            f" among {parts} devices; use target.devices: {' or '.join(map(str, possible))}, or"
            " target.split: layers"
        )


def layers_of(layers: int, rank: int, parts: int) -> range:
    """The consecutive layers of one rank. The numbers of layers of two ranks differ by at most
    one."""
    return range(layers * rank // parts, layers * (rank + 1) // parts)


def load_heads(name: str, dtype: torch.dtype | str, exchange: Exchange) -> PreTrainedModel:
    """This rank's heads of every layer, by the default process group. The first rank returns
    logits, the other ranks return zeros."""
    operators.use(exchange)
    split = DistributedConfig(tp_size=exchange.parts)
    model = load_weights(name, dtype, distributed_config=split)
    _lighten(model, exchange)
    check_causal(model, name)
    return model


def _lighten(model: PreTrainedModel, exchange: Exchange) -> None:
    """Replace transformers' hooks, which wrap every call of a layer in distributed tensors: for a
    small layer that takes longer than its product."""
    lighter: dict[str, Callable[[Any], nn.Module]] = {
        "colwise": _local_columns,
        "rowwise": _SummedLinear,
        "colwise_gather_output": lambda linear: _GatheredLinear(linear, exchange),
        "embedding_rowwise": lambda embedding: _SummedEmbedding(embedding, exchange),
    }
    for name, module in list(model.named_modules()):
        style = model.tp_plan.get(replace_layer_number_by_wildcard(name))
        # A subclass of a linear layer may do more than a product.
        if style in lighter and (type(module) is nn.Linear or isinstance(module, nn.Embedding)):
            for key, value in module.named_parameters(recurse=False):
                local = value.to_local() if isinstance(value, DTensor) else value
                module._parameters[key] = nn.Parameter(local.detach(), requires_grad=False)
            del module.forward  # the hook, which hides the class's method
            model.set_submodule(name, lighter[style](module))


def _local_columns(linear: nn.Linear) -> nn.Linear:
    """Some of the outputs: an ordinary layer."""
    linear.out_features, linear.in_features = linear.weight.shape
    return linear


class _SummedLinear(nn.Module):
    """A linear layer split by inputs: the ranks' products are summed."""

    def __init__(self, linear: nn.Linear) -> None:
        super().__init__()
        self.bias = linear.bias  # added once, to the sum
        linear.register_parameter("bias", None)
        self.local = _local_columns(linear)

    def forward(self, x: Tensor) -> Tensor:
        product = operators.sum_of_ranks(self.local(x))
        return product if self.bias is None else product + self.bias


class _GatheredLinear(nn.Module):
    """The output layer, split by tokens. The first rank returns all logits."""

    def __init__(self, linear: nn.Linear, exchange: Exchange) -> None:
        super().__init__()
        size = -(-linear.out_features // exchange.parts)  # the last ranks may have fewer
        self.missing = size - linear.weight.shape[0]
        self.vocab_size = linear.out_features
        self.local = _local_columns(linear)

    def forward(self, x: Tensor) -> Tensor:
        logits = nn.functional.pad(self.local(x), (0, self.missing))
        return operators.gathered(logits)[..., : self.vocab_size]


class _SummedEmbedding(nn.Module):
    """The embedding, split by tokens. What a subclass does to each token's vector, such as a
    scale, it does here."""

    def __init__(self, embedding: nn.Embedding, exchange: Exchange) -> None:
        super().__init__()
        self.start = exchange.rank * -(-embedding.num_embeddings // exchange.parts)
        self.local = embedding
        embedding.padding_idx = None  # which another rank may have

    def forward(self, tokens: Tensor) -> Tensor:
        place = tokens - self.start
        elsewhere = (place < 0) | (place >= self.local.weight.shape[0])
        embedded = self.local(place.masked_fill(elsewhere, 0))
        return operators.sum_of_ranks(embedded.masked_fill(elsewhere[..., None], 0))


def load_layers(name: str, dtype: torch.dtype | str, exchange: Exchange) -> PreTrainedModel:
    """This rank's layers. A forward must run on all ranks. The last rank returns logits, the other
    ranks return as many vectors without meaning."""
    operators.use(exchange)
    skeleton = load_skeleton(name)
    whole: Any = AutoModelForCausalLM._model_mapping[type(skeleton.config)]

    def build(self: PreTrainedModel, *args: Any, **kwargs: Any) -> None:
        whole.__init__(self, *args, **kwargs)
        _take_part(self, exchange.rank, exchange.parts)

    # from_pretrained loads the tensors of the part; the names of all other tensors are known.
    part = type(whole.__name__, (whole,), {"__init__": build})
    model = load_weights(name, dtype, part, known=skeleton.state_dict().keys())
    device = "cuda" if isinstance(exchange, NcclExchange) else "cpu"
    model.to(device)  # type: ignore[arg-type]
    check_causal(model, name)
    return model


class _Passed:
    """The output of a placeholder for a layer: `like` has the shape of hidden states. Some models
    take the first element of a layer's output; that is this object again."""

    def __init__(self, like: Tensor) -> None:
        self.like = like

    def __getitem__(self, item: Any) -> _Passed:
        return self


class _Elsewhere(nn.Module):
    """A placeholder for a layer of a rank before."""

    def __init__(self, layer: nn.Module) -> None:
        super().__init__()
        # A model's loop over its layers may read attributes, such as the kind of attention.
        plain = {k: v for k, v in vars(layer).items() if isinstance(v, str | int | None)}
        vars(self).update({k: v for k, v in plain.items() if not k.startswith("_")})

    def forward(self, hidden: Tensor | _Passed, *args: Any, **kwargs: Any) -> _Passed:
        return hidden if isinstance(hidden, _Passed) else _Passed(hidden)


class _NoEmbedding(nn.Module):
    """A placeholder for an embedding of another rank: the shape without the values."""

    _like: Tensor

    def __init__(self, embedding: Any) -> None:
        super().__init__()
        self.width = embedding.embedding_dim
        self.register_buffer("_like", torch.zeros(()), persistent=False)

    def forward(self, tokens: Tensor) -> Tensor:
        return self._like.new_zeros((*tokens.shape, self.width))


def _take_part(model: PreTrainedModel, rank: int, parts: int) -> None:
    """Leave out what other ranks have. Hidden states are received before this rank's first layer,
    and sent after its last."""
    layers = decoder_layers(model)
    local, first, last = layers_of(len(layers), rank, parts), rank == 0, rank == parts - 1
    for number in range(local.start):
        layers[number] = _Elsewhere(layers[number])
    del layers[local.stop :]
    tied = model.config.get_text_config(decoder=True).tie_word_embeddings
    if not first:
        layers[local.start].register_forward_pre_hook(_receive)
        if not (last and tied):
            model.set_input_embeddings(_NoEmbedding(model.get_input_embeddings()))
    if not last:
        layers[-1].register_forward_hook(_send)
        model.set_output_embeddings(nn.Identity())
        model.all_tied_weights_keys = {}


def _receive(module: nn.Module, args: tuple[Any, ...]) -> tuple[Any, ...]:
    return operators.received(args[0].like), *args[1:]


def _send(module: nn.Module, args: tuple[Any, ...], output: Any) -> Any:
    if isinstance(output, tuple):
        return operators.handed_on(output[0]), *output[1:]
    return operators.handed_on(output)
