"""The last layers of a model, and how deep each parameter is, found from the names of modules and parameters."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from typing import Any

from torch import nn

from fastvid.errors import UsageError

# The first number in a dotted name, with everything before it: "backbone.layer1.0", "encoder.layer.11", "blocks.3".
_BLOCK = re.compile(r"^(?:.*?\.)?\d+(?=\.)")


def heads(model: nn.Module) -> list[tuple[str, nn.Linear]]:
    """Return name and module of each last layer: one for each net of a model with several streams.

    A module says by ``head_name``, a dotted name in it, which linear layer is its last; our nets do. A model without
    any such layer has its last linear layer as head, and none if it has no linear layer.
    """
    named = dict(model.named_modules())
    found: dict[str, nn.Linear] = {}
    for path, module in named.items():
        own = getattr(module, "head_name", None)
        name = f"{path}.{own}" if path else str(own)
        if isinstance(own, str) and isinstance(head := named.get(name), nn.Linear):
            found[name] = head
    if found:
        return list(found.items())
    return [(name, module) for name, module in named.items() if isinstance(module, nn.Linear)][-1:]


def layer_scales(model: nn.Module, decay: float) -> dict[str, float]:
    """Return the factor of each parameter's learning rate, ``decay ** (layers above it)``.

    The stem (patch embedding, tokens, first convolution) is the lowest layer, each block is a layer of its own, and
    everything after the last block is the highest, whose factor is 1: Clark et al. 2020 (ELECTRA, arXiv 2003.10555), as
    BEiT, MAE and VideoMAE fine-tune.

    A block is the first number in a dotted name: ``encoder.layer.11`` in transformers, ``blocks.11`` in timm,
    ``layer4.1`` in our ResNets. Blocks are ordered as the parameters are. Each net of two streams counts its own.
    A model whose names say something else has a method ``parameter_layers()``, which returns, for each layer from the
    input on, the prefixes of its parameters' names; parameters without one are in the highest layer.

    Args:
        model: The model.
        decay: Factor between two layers, 0 < decay <= 1.

    Raises:
        UsageError: If the model has no layers to tell apart, or a prefix of its own matches no parameter.
    """
    names = [name for name, _ in model.named_parameters()]
    own = getattr(model, "parameter_layers", None)
    if callable(own):
        depths = _depths_of(names, own())
    else:
        head_names = [name for name, _ in heads(model)]
        depths = {}
        for branch in _branches(model):
            inside = [name for name in names if name.startswith(branch)]
            depths |= _depths(inside, head_names)
    if not any(depths.values()):
        raise UsageError(
            "optim.layer_decay is set, but no parameter of the model has a number in its name, as blocks have",
            hint="give the model a method parameter_layers(), or remove optim.layer_decay",
        )
    return {name: decay ** depths.get(name, 0) for name in names}


def _branches(model: nn.Module) -> list[str]:
    """Return the prefixes of the nets that count their own layers: those with a ``head_name``, or the whole model."""
    nets = [f"{path}." for path, module in model.named_modules() if path and hasattr(module, "head_name")]
    return nets if len(nets) > 1 else [""]


def _depths(names: Sequence[str], head_names: Iterable[str]) -> dict[str, int]:
    """Return the number of layers above each parameter."""
    last = tuple(f"{name}." for name in head_names)
    blocks = {name: match[0] for name in names if (match := _BLOCK.match(name)) and not name.startswith(last)}
    order = list(dict.fromkeys(blocks.values()))
    above: dict[str, int] = {}
    begun = 0
    for name in names:
        if name in blocks:
            begun = order.index(blocks[name]) + 1
        above[name] = len(order) + 1 - begun
    for name in reversed(names):
        if name in blocks:
            break
        above[name] = 0
    return above | {name: 0 for name in names if name.startswith(last)} if order else {}


def _depths_of(names: Sequence[str], layers: Any) -> dict[str, int]:
    """Return the number of layers above each parameter that a model names itself."""
    prefixes = [(layer,) if isinstance(layer, str) else tuple(layer) for layer in layers]
    above: dict[str, int] = {}
    for depth, layer in enumerate(prefixes):
        for prefix in layer:
            inside = [name for name in names if name == prefix or name.startswith(f"{prefix}.")]
            if not inside:
                raise UsageError(
                    f"parameter_layers() of the model names {prefix!r}, which matches no parameter",
                    hint=f"name parameters or modules, such as {names[0] if names else 'blocks.0'}",
                )
            above |= dict.fromkeys(inside, len(prefixes) - depth)
    return above
