"""The list of transforms of a loader, applied to the clips of a batch."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import Tensor

from fastvid.errors import UsageError
from fastvid.format.schema import FLOW
from fastvid.load.after.callables import CallableTransform
from fastvid.load.after.transform import ClipTransform, TransformDraws
from fastvid.load.order.random_draws import Draws

AnyTransform = ClipTransform | Callable[[Tensor], Any]
"""What `after=` takes; a callable without `draw` and `apply` is called clip by clip."""


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
            raise UsageError(
                f"{moving[0]} moves pixels, but not the {what} of the same clips",
                hint=f"set geometric=False, or remove the transform or the stream {others[0]!r}",
            )
        return cls(tuple(made)) if made else None

    def __repr__(self) -> str:
        return f"[{', '.join(map(repr, self.transforms))}]"

    @property
    def uses_global_generators(self) -> bool:
        """Whether the global random generators are seeded for a while, so that no other thread may run it."""
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
