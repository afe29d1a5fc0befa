"""The list of transforms of a loader, applied to the clips of a batch.

Functions and modules of other libraries are called clip by clip, with random generators seeded for each.
"""

from __future__ import annotations

import random
import re
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Final, cast

import numpy as np
import torch
from torch import Tensor

from fastvid.errors import UsageError
from fastvid.format.schema import FLOW
from fastvid.load.after.transform import ClipTransform, TransformDraws
from fastvid.load.order.draws import Draws

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
        # Stored now: an object's repr may change when it is called, and the fingerprint in a state must not.
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
                    told = f"the transform {self} of after= returned clips of {_pixels(made)} and {_pixels(result)}"
                    raise UsageError(told, hint="return the same height and width for every clip of a batch")
                # Copied at once: a compiled function may return the same memory from its next call.
                made[row] = result.transpose(0, 1)
        assert made is not None
        return made

    def _checked(self, result: object, frames: Tensor) -> Tensor:
        expected = f"floating [{len(frames)}, 3, H, W] on {frames.device}"
        if not isinstance(result, Tensor):
            told = f"the transform {self} of after= returned {type(result).__name__}, expected a tensor: {expected}"
            raise UsageError(told, hint="return the transformed clip")
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
    """Restore the global random generators of torch, the device, numpy and Python when the block ends."""
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


AnyTransform = ClipTransform | Callable[[Tensor], Any]
"""What `after=` accepts; a callable without `draw` and `apply` becomes a `CallableTransform`."""


@dataclass(frozen=True)
class TransformChain:
    """Transforms, in the order in which they are applied."""

    transforms: tuple[ClipTransform, ...]  # the transforms, at least one

    @classmethod
    def of(
        cls, after: Sequence[AnyTransform], streams: Sequence[str], depth: Collection[str] = ()
    ) -> TransformChain | None:
        """Build the chain of a user's list; None if it is empty."""
        if not isinstance(after, Sequence):
            raise UsageError(f"after is {after!r}, expected a list", hint="write after=[transform]")
        made: list[ClipTransform] = []
        for one in after:
            if isinstance(one, type):
                raise UsageError(f"after contains the class {one.__name__}", hint=f"make one: {one.__name__}(...)")
            if hasattr(one, "draw") and hasattr(one, "apply"):
                made.append(cast(ClipTransform, one))
            elif callable(one):
                made.append(CallableTransform(one))
            else:
                raise UsageError(
                    f"after contains {one!r}, which is no transform",
                    hint="pass a callable, or an object with draw and apply",
                )
        if made and {FLOW, *depth}.issuperset(streams):
            raise UsageError(f"after= transforms RGB, but streams is {tuple(streams)}", hint="remove after=")
        moving = [one for one in made if getattr(one, "geometric", False)]
        others = [stream for stream in streams if stream == FLOW or stream in depth]
        if moving and others:
            what = "optical flow" if others[0] == FLOW else "depth"
            hint = f"set geometric=False, or remove the transform or the stream {others[0]!r}"
            raise UsageError(f"{moving[0]} moves pixels, but not the {what} of the same clips", hint=hint)
        return cls(tuple(made)) if made else None

    def __repr__(self) -> str:
        return f"[{', '.join(map(repr, self.transforms))}]"

    @property
    def uses_global_generators(self) -> bool:
        """Whether `apply` seeds the global random generators for a while, so that no other thread may run it."""
        return any(isinstance(one, CallableTransform) for one in self.transforms)

    def apply(self, clips: Tensor, draws: Sequence[tuple[Draws, int]]) -> Tensor:
        """Return the transformed clips.

        `clips`: float32 [N, 3, T, H, W], RGB in 0 to 1, N >= 1; may be changed. Returns float32 [N, 3, T, H',
        W'].
        """
        # The consumer of batches may be in an autocast block, which changes the dtype of some operations.
        with torch.no_grad(), torch.autocast(clips.device.type, enabled=False):
            for index, transform in enumerate(self.transforms):
                parameters = [transform.draw(TransformDraws(one, view, index)) for one, view in draws]
                clips = transform.apply(clips.contiguous(), parameters)
        return clips
