"""All models by name: ``build("tsm-r50", num_classes=400, num_frames=8)``; and the size and cost of a model.

A model of the zoo maps clips [B, C, T, H, W] to logits [B, num_classes] and has the attributes ``input_layout``
("BCTHW"), ``num_frames`` and ``streams``: the sample's streams that it takes as arguments, in this order: ("rgb",),
("flow",) or both. Its state-dict keys are ``backbone.`` plus torchvision's names for the 2D net; a two-stream model
prepends ``spatial.`` or ``temporal.``.

`model_cost` counts parameters and multiply-adds exactly, by running a model on the meta device. Convolutions and linear
layers count one multiply-add ("MAC") per use of a weight; attention counts the MACs of its matrix products. Batch norm,
ReLU, pooling and the temporal shift count zero. Published numbers of the same net differ because other counters include
some of these. For TSM-R50 at 8x224x224 and 400 classes:

====================  ==============  =================================================================================
counter               multiply-adds   difference from ours
====================  ==============  =================================================================================
this module           32,703,643,648
mmaction2 1.x         32,874,913,792  adds 2 per batch-norm element, omits the last layer; printed as 32.88 G
mmaction2 0.x         32,965,562,368  adds 2 per batch-norm element, 1 per ReLU output and per pool input
====================  ==============  =================================================================================

With these differences applied, the counts reproduce all of mmaction2's printed numbers for TSN, TSM, I3D and SlowOnly
that were tried, the 0.x ones to the last digit. Errors in its tables: I3D and SlowOnly were counted at 256x256, not at
224x224 as stated; the 23.87 M parameters in the 1.x rows of TSM-R50 are for 174 classes (24.33 M for 400).
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, get_args, get_type_hints

import torch
from torch import Tensor, nn
from torch.func import functional_call
from torch.utils.flop_counter import FlopCounterMode

from fastvid.errors import UsageError
from fastvid.models import i3d, tsn, two_stream
from fastvid.models.resnet import DEPTHS
from fastvid.runtime.names import accepted, check_keywords, import_name
from fastvid.runtime.values import check_choice, check_hint

INPUT_LAYOUT = "BCTHW"
_FRAMES_FIRST = "BTCHW"
STREAMS = ("rgb",)
_CLIP_NDIM = 5

_BOTTLENECK_DEPTHS = (50, 101)

# Each function has its own options as keyword arguments, and `**options` that it passes to `ResNet`.
_BUILDERS: dict[str, Callable[..., nn.Module]] = {
    **{f"tsn-r{depth}": partial(tsn.tsn, depth) for depth in DEPTHS},
    **{f"tsm-r{depth}": partial(tsn.tsm, depth) for depth in DEPTHS},
    **{f"temporal-r{depth}": partial(two_stream.temporal, depth) for depth in DEPTHS},
    **{f"two-stream-r{depth}": partial(two_stream.two_stream, depth) for depth in DEPTHS},
    **{f"i3d-r{depth}": partial(i3d.i3d, depth, i3d.I3D_3X3X3) for depth in DEPTHS},
    **{f"i3d-r{depth}-3x1x1": partial(i3d.i3d, depth, i3d.I3D_3X1X1) for depth in _BOTTLENECK_DEPTHS},
    **{f"i3d-r{depth}-heavy": partial(i3d.i3d, depth, i3d.I3D_HEAVY) for depth in _BOTTLENECK_DEPTHS},
    **{f"slowonly-r{depth}": partial(i3d.i3d, depth, i3d.SLOW_ONLY) for depth in _BOTTLENECK_DEPTHS},
}


def names() -> list[str]:
    """Return the model names that `build` accepts, sorted."""
    return sorted(_BUILDERS)


def options(name: str) -> dict[str, Any]:
    """Return the types of the options of a model of the zoo, such as ``width`` or ``recompute``, by name."""
    parameters = inspect.signature(_builder(name), eval_str=True).parameters
    own = {option: one.annotation for option, one in parameters.items()}
    (passed_on,) = get_args(own.pop("options"))  # of Unpack
    del own["num_classes"], own["num_frames"]
    return {**get_type_hints(passed_on), **own}


def build(
    name: str | nn.Module | Callable[..., nn.Module],
    num_classes: int | None,
    num_frames: int,
    **model_options: Any,
) -> nn.Module:
    """Build a model with random weights.

    Args:
        name: One of `names`, or ``module:callable``, or the callable itself: it is called with the options, and with
            ``num_classes`` and ``num_frames`` if it accepts them, as keywords, and must return an `nn.Module`. Or a
            module, which is used as it is. The attributes ``input_layout`` and ``num_frames`` are added to a module
            that lacks them. If its ``input_layout`` is "BTCHW", its forward receives clips [B, T, C, H, W], although
            callers pass [B, C, T, H, W].
        num_classes: Number of classes; None if unknown, which is an error for models of the zoo.
        num_frames: Frames per clip.
        **model_options: Options of the model; `options` lists them for a model of the zoo.

    Raises:
        UsageError: If the name, an option or the model's layout is unknown, a module does not exist, or the model
            rejects a value.
    """
    sizes = {"num_classes": num_classes, "num_frames": num_frames}
    if isinstance(name, nn.Module):
        if model_options:
            raise UsageError(
                f"model.options has {', '.join(model_options)}, but the model is built already",
                hint="remove the options, or give the class of the model",
            )
        return _adopted(name, type(name).__name__, num_frames)
    if not isinstance(name, str):
        return _build_foreign(name, getattr(name, "__name__", repr(name)), sizes, model_options)
    if ":" in name:
        return _build_foreign(import_name("model.name", name), name, sizes, model_options)
    known = options(name)
    unknown = sorted(model_options.keys() - known.keys())
    if unknown:
        raise UsageError(
            f"model {name!r} has no option {', '.join(map(repr, unknown))}",
            hint=f"use any of {', '.join(known)}",
        )
    for option, value in model_options.items():
        check_hint(f"model.options.{option}", value, known[option])
    if num_classes is None:
        raise UsageError("the number of classes is unknown: the dataset has none", hint="set model.num_classes")
    model = _builder(name)(num_classes=num_classes, num_frames=num_frames, **model_options)
    if not hasattr(model, "streams"):
        setattr(model, "streams", STREAMS)  # noqa: B010 - nn.Module's annotations allow only parameters and modules
    return model


def _builder(name: str) -> Callable[..., nn.Module]:
    check_choice("unknown model {}", name, names(), "module:callable")
    return _BUILDERS[name]


def _build_foreign(
    make: Any, name: str, sizes: Mapping[str, int | None], model_options: Mapping[str, Any]
) -> nn.Module:
    if not callable(make):
        raise UsageError(
            f"model.name is {name!r}, which is not callable", hint="name a function or class that returns a module"
        )
    check_keywords("model.options", name, make, model_options, always=sizes)
    model = make(**{size: sizes[size] for size in accepted(make, sizes)}, **model_options)
    if not isinstance(model, nn.Module):
        raise UsageError(f"model {name!r} returned {type(model).__name__}, not a torch.nn.Module")
    return _adopted(model, name, sizes["num_frames"])


def _adopted(model: nn.Module, name: str, num_frames: int | None) -> nn.Module:
    """Return a model that is not of the zoo, after adding the attributes and the layout hook that fastvid needs."""
    for attribute, value in (("input_layout", INPUT_LAYOUT), ("num_frames", num_frames)):
        if not hasattr(model, attribute):
            setattr(model, attribute, value)
    layout = model.input_layout
    if layout == _FRAMES_FIRST:
        # The same module object may be passed again, for a second training, and then has the hook already.
        if _frames_first not in model._forward_pre_hooks.values():
            model.register_forward_pre_hook(_frames_first)
    elif layout != INPUT_LAYOUT:
        raise UsageError(
            f"model {name!r} has input_layout {layout!r}", hint=f"use {INPUT_LAYOUT} or {_FRAMES_FIRST} in the model"
        )
    return model


def _frames_first(_model: nn.Module, inputs: tuple[Any, ...]) -> tuple[Any, ...]:
    """Transpose each clip [B, C, T, H, W] among a model's arguments to [B, T, C, H, W]; return all arguments."""
    return tuple(
        value.transpose(1, 2) if isinstance(value, Tensor) and value.ndim == _CLIP_NDIM else value for value in inputs
    )


@dataclass(frozen=True)
class ModelCost:
    """Size and cost of one model at one input shape."""

    input_shape: tuple[int, ...]  # shape of the whole batch, [B, C, T, H, W] for the models of the zoo
    parameters: int
    trainable: int  # number of trainable parameters
    macs: int  # multiply-adds of one forward

    @property
    def training_flops(self) -> int:
        """Floating-point operations of one training step: 2 per multiply-add, and backward costs 2 forwards."""
        return 6 * self.macs

    def __str__(self) -> str:
        size = "x".join(map(str, self.input_shape))
        return f"{self.parameters / 1e6:.2f} M parameters, {self.macs / 1e9:.2f} G multiply-adds at {size}"


UNCOUNTED = (RuntimeError, TypeError)
"""What `model_cost` raises for a user's model with operations that the meta device does not support."""


def model_cost(model: nn.Module, input_shape: Sequence[int]) -> ModelCost:
    """Count parameters, and the multiply-adds of one forward on an input of this shape.

    `model`: takes one tensor; it is not changed.
    """
    parameters = list(model.parameters())
    state = {**dict(model.named_parameters()), **dict(model.named_buffers())}
    on_meta = {name: torch.empty_like(tensor, device="meta") for name, tensor in state.items()}
    dtype = parameters[0].dtype if parameters else None
    video = torch.empty(tuple(input_shape), device="meta", dtype=dtype)
    modes = [(module, module.training) for module in model.modules()]
    try:
        # Evaluation mode: in training, batch norm raises if a small frame leaves one value per channel at the end.
        model.eval()
        with torch.no_grad(), FlopCounterMode(display=False) as counter:
            functional_call(model, on_meta, (video,))
    finally:
        for module, training in modes:
            module.training = training
    return ModelCost(
        input_shape=tuple(input_shape),
        parameters=sum(p.numel() for p in parameters),
        trainable=sum(p.numel() for p in parameters if p.requires_grad),
        macs=counter.get_total_flops() // 2,
    )
