"""Filling a model from a checkpoint, whoever wrote it, with a report of what fitted and what did not.

Known are torchvision's ImageNet files, the TSM files of mit-han-lab, those of mmaction2 and our own; names are
translated by `fastvid.models.names`. 2D kernels are inflated into 3D models. Nothing in a file is executed: it is read
with ``torch.load(weights_only=True)``.
"""

from __future__ import annotations

import os
import pickle
from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from fastvid.errors import FormatError, StorageError, UsageError
from fastvid.models.i3d import inflated_weight
from fastvid.models.mobilenet import InvertedResidual
from fastvid.models.names import Origin, mit_name, plain_names
from fastvid.models.resnet import ResidualBlock
from fastvid.models.shift import ShiftConv2d
from fastvid.models.tsn import FrameAverage

# Under which names checkpoints keep their state dict, outermost first.
_STATE_KEYS = ("replica", "state_dict", "model")

# Names that a report prints for each kind before it says how many more there are.
_NAMES_SHOWN = 6


@dataclass(frozen=True)
class LoadReport:
    """What `load_weights` did.

    Attributes:
        origin: Whose names the checkpoint uses.
        matched: The model's keys that were filled.
        inflated: Those of them that were filled from a 2D kernel.
        crossed: Those of them that were filled from a kernel on RGB.
        missing: The model's keys that the checkpoint lacks and that keep their values. Batch norms' step counters,
            which old files lack, are not counted.
        unexpected: The checkpoint's keys, as spelled there, that have no place in the model.
        mismatched: Key of the model, shape in the checkpoint, shape in the model; such keys keep their values.
        skipped: The model's keys that the caller asked to leave alone.
    """

    origin: Origin
    matched: tuple[str, ...]
    inflated: tuple[str, ...]
    crossed: tuple[str, ...]
    missing: tuple[str, ...]
    unexpected: tuple[str, ...]
    mismatched: tuple[tuple[str, tuple[int, ...], tuple[int, ...]], ...]
    skipped: tuple[str, ...]

    @property
    def complete(self) -> bool:
        """Whether every tensor of the model came from the checkpoint."""
        return not (self.missing or self.mismatched or self.skipped)

    def __str__(self) -> str:
        lines = [f"{self.origin} checkpoint: {len(self.matched)} tensors loaded"]
        if self.inflated:
            lines[0] += f", {len(self.inflated)} of them inflated to 3D"
        if self.crossed:
            lines[0] += f", {', '.join(self.crossed)} from RGB"
        shapes = [f"{key} {list(theirs)} in the checkpoint, {list(ours)} here" for key, theirs, ours in self.mismatched]
        for what, keys in (
            ("left alone as asked", self.skipped),
            ("of another shape, not loaded", shapes),
            ("missing in the checkpoint", self.missing),
            ("in the checkpoint only", self.unexpected),
        ):
            if keys:
                more = f" and {len(keys) - _NAMES_SHOWN} more" if len(keys) > _NAMES_SHOWN else ""
                lines.append(f"  {len(keys)} {what}: {', '.join(keys[:_NAMES_SHOWN])}{more}")
        return "\n".join(lines)


def load_weights(
    model: nn.Module, source: str | os.PathLike[str] | Mapping[str, Tensor], *, head: bool = True
) -> LoadReport:
    """Fills ``model`` in place with every tensor of a checkpoint that fits by name and shape.

    Args:
        model: A model of the zoo, or any other whose names are torchvision's.
        source: A file of ``torch.save``, or a state dict.
        head: False leaves the last layer alone, for a checkpoint of another data set with the same number of classes.

    Returns:
        What was filled and what was not. With another number of classes the last layer is reported as mismatched.

    Raises:
        StorageError: The file cannot be read.
        FormatError: The file holds no state dict, holds objects that would have to be unpickled, or fits nowhere.
    """
    state = dict(source) if isinstance(source, Mapping) else read_state_dict(source)
    backbone = getattr(model, "backbone", model)
    prefix = "" if backbone is model else "backbone."
    head_name = getattr(backbone, "head_name", "fc")
    origin, plain = plain_names(state, head_name)
    found = {f"{prefix}{plain[key]}": tensor for key, tensor in state.items()}
    spelled = {f"{prefix}{plain[key]}": key for key in state}
    _fold_non_local_bias(found)

    wanted = model.state_dict()
    skipped = () if head else tuple(key for key in wanted if key.startswith(f"{prefix}{head_name}."))
    filled: dict[str, Tensor] = {}
    inflated: list[str] = []
    crossed: list[str] = []
    mismatched: list[tuple[str, tuple[int, ...], tuple[int, ...]]] = []
    for key, ours in wanted.items():
        if key in skipped or key not in found:
            continue
        theirs = found[key]
        if ours.dim() == 5 and theirs.dim() == 4 and theirs.shape == ours.shape[:2] + ours.shape[3:]:
            theirs = inflated_weight(theirs, ours.shape[2])
            inflated.append(key)
        elif _is_other_modality(theirs, ours):
            theirs = cross_modality_weight(theirs, ours.shape[1])
            crossed.append(key)
        if theirs.shape != ours.shape:
            mismatched.append((key, tuple(theirs.shape), tuple(ours.shape)))
        else:
            filled[key] = theirs
    report = LoadReport(
        origin=origin,
        matched=tuple(filled),
        inflated=tuple(inflated),
        crossed=tuple(crossed),
        missing=tuple(
            key for key in wanted if key not in found and key not in skipped and not key.endswith("num_batches_tracked")
        ),
        unexpected=tuple(spelled[key] for key in found if key not in wanted),
        mismatched=tuple(mismatched),
        skipped=skipped,
    )
    if not filled:
        where = None if isinstance(source, Mapping) else os.fspath(source)
        raise FormatError(
            f"no tensor of the checkpoint fits this {type(backbone).__name__}",
            file=where,
            hint=f"its keys begin with {', '.join(list(state)[:3])}",
        )
    model.load_state_dict(filled, strict=False)
    return report


def read_state_dict(path: str | os.PathLike[str]) -> dict[str, Tensor]:
    """Reads the state dict of a file of ``torch.save`` to the CPU, without executing anything in the file.

    Raises:
        StorageError: The file cannot be read.
        FormatError: It is no such file, holds objects that would have to be unpickled, or no state dict.
    """
    file = os.fspath(path)
    try:
        content = torch.load(file, map_location="cpu", weights_only=True)
    except OSError as error:
        raise StorageError(f"cannot read the checkpoint: {error.strerror or error}", file=file) from error
    except pickle.UnpicklingError as error:
        raise FormatError(
            "the checkpoint is damaged, or holds more than tensors and plain values, which is not unpickled",
            file=file,
            hint="where you trust it, save its state dict alone: "
            "torch.save(torch.load(file, weights_only=False)['state_dict'], new_file)",
        ) from error
    except (RuntimeError, EOFError, ValueError, KeyError) as error:
        raise FormatError(f"not a readable torch checkpoint: {error}", file=file) from error
    while isinstance(content, Mapping):
        inner = next((content[key] for key in _STATE_KEYS if isinstance(content.get(key), Mapping)), None)
        if inner is None:
            break
        content = inner
    if not isinstance(content, Mapping):
        raise FormatError(f"the checkpoint holds a {type(content).__name__}, not a state dict", file=file)
    state = {key: value for key, value in content.items() if isinstance(value, Tensor)}
    if not state:
        raise FormatError("the checkpoint holds no tensors", file=file)
    return state


def mit_state_dict(model: nn.Module) -> dict[str, Tensor]:
    """The weights of a TSN or TSM under the names that mit-han-lab/temporal-shift-module saves and loads.

    Raises:
        UsageError: The model is neither.
    """
    if not isinstance(model, FrameAverage):
        raise UsageError(f"{type(model).__name__} has no counterpart in mit-han-lab/temporal-shift-module")
    modules = dict(model.backbone.named_modules())
    head = model.backbone.head_name
    assert isinstance(head, str)
    state: dict[str, Tensor] = {}
    for name, tensor in model.backbone.state_dict().items():
        layer = name.rpartition(".")[0]
        parts = name.split(".")
        block = modules.get(".".join(parts[:2]))
        key = mit_name(
            name,
            head=head,
            shifted=isinstance(modules[layer], ShiftConv2d),
            in_wrapped_block=isinstance(block, ResidualBlock) and block.non_local is not None,
            expands=isinstance(block, InvertedResidual) and block.expands,
        )
        state[key] = tensor
        if name.endswith("non_local.out.weight"):
            # Theirs has a bias in front of the batch norm, which ours leaves out.
            state[key.removesuffix("weight") + "bias"] = tensor.new_zeros(tensor.shape[0])
    return state


def cross_modality_weight(weight: Tensor, channels: int) -> Tensor:
    """The first kernel of a net on RGB for an input of another kind: its mean over RGB, for every channel.

    It is not scaled down, as Wang et al. 2016 ("Temporal Segment Networks", section 3.1) have it: on an input whose
    channels are equal it answers channels / 3 times as strongly as on grey RGB, which batch norm takes back.

    Args:
        weight: [out, 3, h, w].
        channels: Of the input.

    Returns:
        [out, channels, h, w].
    """
    return weight.mean(1, keepdim=True).repeat(1, channels, 1, 1)


def _is_other_modality(theirs: Tensor, ours: Tensor) -> bool:
    """Whether a kernel on RGB meets a place for one on other channels."""
    if theirs.dim() != 4 or ours.dim() != 4 or theirs.shape[1] != 3 or ours.shape[1] == 3:
        return False
    return theirs.shape[0] == ours.shape[0] and theirs.shape[2:] == ours.shape[2:]


def _fold_non_local_bias(found: dict[str, Tensor]) -> None:
    # MIT's non-local block adds a bias in front of its batch norm: the same function as a lower running mean.
    for key in [key for key in found if key.endswith(".non_local.out.bias")]:
        mean = key.replace(".out.bias", ".out_bn.running_mean")
        if mean in found:
            found[mean] = found[mean] - found.pop(key)
