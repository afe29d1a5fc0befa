"""Call functions and modules of other libraries on clips, with random generators seeded for each clip."""

from __future__ import annotations

import random
import re
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, Final

import numpy as np
import torch
from torch import Tensor

from fastvid.errors import UsageError
from fastvid.load.after.transform import TransformDraws

_ADDRESS: Final = re.compile(r" at 0x[0-9A-Fa-f]+")
_SPACE: Final = re.compile(r"\s+")


class CallableTransform:
    """A callable of the user, called clip by clip.

    `function`: gets a clip, float32 [T, 3, H, W] in 0 to 1, and returns one, floating [T, 3, H', W'].
    """

    def __init__(self, function: Callable[[Tensor], Any]) -> None:
        self.function = function
        named = function if hasattr(function, "__qualname__") else type(function)
        own = _SPACE.sub(" ", _ADDRESS.sub("", repr(function)))
        # Now, because the repr of an object may change when it is called, and a state must still load then.
        self._text = f"{named.__module__}.{named.__qualname__}: {own}"

    def __repr__(self) -> str:
        """Return its qualified name, and its repr without memory addresses, in one line."""
        return self._text

    def draw(self, draws: TransformDraws, /) -> int:
        """Return the seed of a clip's call."""
        return draws.seed

    def apply(self, clips: Tensor, parameters: Sequence[int], /) -> Tensor:
        """Return the results, float32 [N, 3, T, H', W']."""
        made: Tensor | None = None
        with _kept_generators(clips.device):
            for row, (clip, seed) in enumerate(zip(clips, parameters, strict=True)):
                _seed_generators(seed, clips.device)
                frames = clip.transpose(0, 1).contiguous()
                try:
                    result = self.function(frames)
                except Exception as error:
                    error.add_note(f"in the transform {self} of after=, called with float32 {list(frames.shape)}")
                    raise
                result = self._checked(result, frames)
                if made is None:
                    made = clips.new_empty((len(clips), 3, len(frames), *result.shape[2:]))
                if result.shape[2:] != made.shape[3:]:
                    raise UsageError(
                        f"the transform {self} of after= returned clips of {_pixels(made)} and {_pixels(result)}",
                        hint="return the same height and width for every clip of a batch",
                    )
                # Copied at once: a compiled function may return the same memory from its next call.
                made[row] = result.transpose(0, 1)
        assert made is not None
        return made

    def _checked(self, result: object, frames: Tensor) -> Tensor:
        expected = f"floating [{len(frames)}, 3, H, W] on {frames.device}"
        if not isinstance(result, Tensor):
            raise UsageError(
                f"the transform {self} of after= returned {type(result).__name__}, expected a tensor: {expected}",
                hint="return the transformed clip",
            )
        good = result.ndim == 4 and result.shape[:2] == frames.shape[:2] and min(result.shape[2:]) > 0
        if not good or not result.is_floating_point() or result.device != frames.device:
            raise UsageError(
                f"the transform {self} of after= returned {result.dtype} {list(result.shape)} on {result.device},"
                f" expected {expected}",
                hint="keep frames and channels, and values in 0 to 1",
            )
        return result


def _pixels(clips: Tensor) -> str:
    return f"{clips.shape[-1]}x{clips.shape[-2]} pixels"


@contextmanager
def _kept_generators(device: torch.device) -> Iterator[None]:
    """Restore the global generators of torch, the device, numpy and Python at the end."""
    plain, arrays = random.getstate(), np.random.get_state()
    try:
        with torch.random.fork_rng([device.index] if device.type == "cuda" else []):
            yield
    finally:
        random.setstate(plain)
        np.random.set_state(arrays)


def _seed_generators(seed: int, device: torch.device) -> None:
    """Seed the global generators of torch on the host and on this device only, of numpy and of Python."""
    torch.default_generator.manual_seed(seed)
    if device.type == "cuda":
        # torch.manual_seed would seed every GPU of the process.
        with torch.cuda.device(device):
            torch.cuda.manual_seed(seed)
    random.seed(seed)
    np.random.seed(seed % 2**32)
