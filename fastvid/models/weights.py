"""Load checkpoints of several code bases into a model, and report which tensors matched.

Supported are torchvision's ImageNet files, the TSM files of mit-han-lab, mmaction2's files and fastvid's own. Their
keys are translated to torchvision's names; fastvid's models have these names after the prefix ``backbone.``. 2D kernels
are inflated for 3D models. Nothing in a file is executed: it is read with ``torch.load(weights_only=True)``, which also
reads safetensors files.

Sources of the rules: mit-han-lab/temporal-shift-module (``ops/temporal_shift.py`` at 4759ad8, ``ops/models.py`` at
51328c0) and open-mmlab/mmaction2 (``mmaction/models/backbones/resnet_tsm.py`` at 03ff3fc, ``resnet3d.py`` at 01436f0).
"""

from __future__ import annotations

import io
import os
import pickle
import re
import warnings
import zipfile
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor, nn

from fastvid.errors import FormatError, StorageError
from fastvid.models.i3d import inflated_weight

Origin = Literal["fastvid", "torchvision", "mit", "mmaction2"]

# Prefixes that DistributedDataParallel and DataParallel ("module."), and torch.compile, add to the keys.
_WRAPPERS = re.compile(r"^(?:module\.|_orig_mod\.)+")

_RULES: dict[Origin, tuple[tuple[str, str], ...]] = {
    "fastvid": ((r"^backbone\.", ""),),
    "torchvision": (),
    "mit": (
        (r"^base_model\.", ""),
        (r"^new_fc\.", "<head>."),
        (r"^classifier\.(?=weight$|bias$)", "<head>."),
        (r"\.net\.", "."),
    ),
    "mmaction2": (
        (r"^backbone\.", ""),
        (r"^cls_head\.fc_cls\.", "<head>."),
        (r"\.net\.", "."),
        (r"\bdownsample\.conv\.", "downsample.0."),
        (r"\bdownsample\.bn\.", "downsample.1."),
        (r"\bconv(\d)\.conv\.", r"conv\1."),
        (r"\bconv(\d)\.bn\.", r"bn\1."),
    ),
}


def plain_names(keys: Iterable[str], head: str) -> tuple[Origin, dict[str, str]]:
    """Translate the keys of one checkpoint.

    `head`: name of the model's last layer. Returns the code base that wrote the checkpoint, and the torchvision-style
    name of every key. A key that matches no rule keeps its name and is later reported as unexpected.
    """
    bare = {key: _WRAPPERS.sub("", key) for key in keys}
    origin = _origin(bare.values())
    return origin, {key: _apply(_RULES[origin], name, head) for key, name in bare.items()}


def _origin(names: Iterable[str]) -> Origin:
    names = list(names)
    if any(name.startswith(("base_model.", "new_fc.")) for name in names):
        return "mit"
    if any(name.startswith(("cls_head.", "backbone.conv1.conv.")) for name in names):
        return "mmaction2"
    return "fastvid" if any(name.startswith("backbone.") for name in names) else "torchvision"


def _apply(rules: Iterable[tuple[str, str]], name: str, head: str) -> str:
    for pattern, replacement in rules:
        name = re.sub(pattern, replacement, name)
    return name.replace("<head>", head)


# Keys under which checkpoints store their state dict, outermost first.
_STATE_KEYS = ("replica", "state_dict", "model")

# Maximum number of names that a report lists per category.
_NAMES_SHOWN = 6


@dataclass(frozen=True)
class LoadReport:
    """Result of `load_weights`."""

    origin: Origin  # code base that wrote the checkpoint
    matched: tuple[str, ...]  # names of the tensors that were loaded
    inflated: tuple[str, ...]  # names of loaded tensors that were inflated from 2D to 3D
    crossed: tuple[str, ...]  # names of loaded tensors that were adapted from RGB, see `cross_modality_weight`
    missing: tuple[str, ...]  # only in the model
    unexpected: tuple[str, ...]  # only in the checkpoint
    # not loaded because shapes differ: name, shape in the checkpoint, shape in the model
    mismatched: tuple[tuple[str, tuple[int, ...], tuple[int, ...]], ...]
    skipped: tuple[str, ...]  # the last layer, if it was not to be loaded

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
            ("skipped as requested", self.skipped),
            ("not loaded because shapes differ", shapes),
            ("missing from the checkpoint", self.missing),
            ("only in the checkpoint", self.unexpected),
        ):
            if keys:
                more = f" and {len(keys) - _NAMES_SHOWN} more" if len(keys) > _NAMES_SHOWN else ""
                lines.append(f"  {len(keys)} {what}: {', '.join(keys[:_NAMES_SHOWN])}{more}")
        return "\n".join(lines)


def load_weights(
    model: nn.Module, source: str | os.PathLike[str] | Mapping[str, Tensor], *, head: bool = True
) -> LoadReport:
    """Load every tensor of a checkpoint that matches ``model`` by name and shape, in place.

    Args:
        model: A model of the zoo, or any other with torchvision's names.
        source: A file written by ``torch.save``, or a state dict.
        head: Whether to load the last layer; set False for a checkpoint of other classes that happen to be as many.

    Returns:
        The tensors that were loaded and those that were not. If the number of classes differs, the last layer is
        reported as mismatched.

    Raises:
        StorageError: If the file cannot be read.
        FormatError: If the file has no state dict, contains pickled objects other than tensors, or matches no key.
    """
    state = dict(source) if isinstance(source, Mapping) else read_state_dict(source)
    backbone = getattr(model, "backbone", model)
    prefix = "" if backbone is model else "backbone."
    head_name = getattr(backbone, "head_name", "fc")
    origin, plain = plain_names(state, head_name)
    wanted, found = model.state_dict(), {}
    for key in state:
        # The model's own names come first: a model may have other parts beside its backbone.
        names = (key, _WRAPPERS.sub("", key), f"{prefix}{plain[key]}")
        found[next((name for name in names if name in wanted), names[-1])] = key
    skipped = () if head else tuple(key for key in wanted if key.startswith(f"{prefix}{head_name}."))
    filled: dict[str, Tensor] = {}
    inflated: list[str] = []
    crossed: list[str] = []
    mismatched: list[tuple[str, tuple[int, ...], tuple[int, ...]]] = []
    for key, ours in wanted.items():
        if key in skipped or key not in found:
            continue
        theirs = state[found[key]]
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
        unexpected=tuple(own for key, own in found.items() if key not in wanted),
        mismatched=tuple(mismatched),
        skipped=skipped,
    )
    if not filled:
        where = None if isinstance(source, Mapping) else os.fspath(source)
        raise FormatError(
            f"no tensor of the checkpoint matches this {type(backbone).__name__}",
            file=where,
            hint=f"compare the checkpoint's first keys: {', '.join(list(state)[:3])}",
        )
    model.load_state_dict(filled, strict=False)
    return report


def load_tensors(file: str | io.BytesIO) -> Any:
    """Load a file of ``torch.save`` to the CPU, without executing anything in the file.

    Raises ValueError if the file has compressed parts: ``torch.save`` writes none, and a small one may expand to fill
    the memory.
    """
    try:
        is_compressed = zipfile.is_zipfile(file) and _is_compressed(file)
    except (zipfile.BadZipFile, NotImplementedError) as error:
        raise ValueError(str(error)) from error
    if is_compressed:
        raise ValueError("its parts are compressed, which torch.save does not do")
    if isinstance(file, io.BytesIO):
        file.seek(0)
    with warnings.catch_warnings():
        # A newer pickle protocol alone is no reason to warn: torch raises for content that it does not support.
        warnings.filterwarnings("ignore", "Detected pickle protocol")
        return torch.load(file, map_location="cpu", weights_only=True)


def _is_compressed(file: str | io.BytesIO) -> bool:
    with zipfile.ZipFile(file) as parts:
        return any(part.compress_type for part in parts.infolist())


def read_state_dict(path: str | os.PathLike[str]) -> dict[str, Tensor]:
    """Load the state dict of a ``torch.save`` file to the CPU, without executing anything in the file.

    Raises:
        StorageError: If the file cannot be read.
        FormatError: If it is not a file of ``torch.save``, contains pickled objects other than tensors, has no state
            dict, or is a dictionary that contains itself.
    """
    file = os.fspath(path)
    try:
        content = load_tensors(file)
    except OSError as error:
        raise StorageError(f"cannot read the checkpoint: {error.strerror or error}", file=file) from error
    except pickle.UnpicklingError as error:
        raise FormatError(
            "the checkpoint is damaged, or contains objects other than tensors and plain values",
            file=file,
            hint="if you trust the file, save only its state dict: "
            "torch.save(torch.load(file, weights_only=False)['state_dict'], new_file)",
        ) from error
    except (RuntimeError, EOFError, ValueError, KeyError) as error:
        raise FormatError(f"not a readable torch checkpoint: {error}", file=file) from error
    except Exception as error:
        # Compared by name, because torch imports the safetensors library only when it reads such a file.
        if type(error).__name__ != "SafetensorError":
            raise
        raise FormatError(
            f"not a readable safetensors file: {error}", file=file, hint="download or save the file again"
        ) from error
    opened: set[int] = set()
    while isinstance(content, Mapping):
        if id(content) in opened:
            raise FormatError(
                "the checkpoint contains itself", file=file, hint="save only its state dict, as torch.save does"
            )
        opened.add(id(content))
        inner = next((content[key] for key in _STATE_KEYS if isinstance(content.get(key), Mapping)), None)
        if inner is None:
            break
        content = inner
    if not isinstance(content, Mapping):
        raise FormatError(f"the checkpoint contains a {type(content).__name__}, not a state dict", file=file)
    state = {key: value for key, value in content.items() if isinstance(value, Tensor)}
    if not state:
        raise FormatError("the checkpoint contains no tensors", file=file)
    return state


def cross_modality_weight(weight: Tensor, channels: int) -> Tensor:
    """Adapt an RGB net's first kernel to another modality, such as flow: every channel gets its mean over R, G and B.

    As in Wang et al. 2016 ("Temporal Segment Networks", section 3.1), the kernel is not scaled down: if all input
    channels are equal, the response is channels / 3 times the response to grey RGB, which batch norm compensates.

    `weight`: [out, 3, h, w]. Returns [out, channels, h, w].
    """
    return weight.mean(1, keepdim=True).repeat(1, channels, 1, 1)


def _is_other_modality(theirs: Tensor, ours: Tensor) -> bool:
    """Return whether `theirs` is a kernel on RGB and `ours` the same kernel on another number of channels."""
    if theirs.dim() != 4 or ours.dim() != 4 or theirs.shape[1] != 3 or ours.shape[1] == 3:
        return False
    return theirs.shape[0] == ours.shape[0] and theirs.shape[2:] == ours.shape[2:]
