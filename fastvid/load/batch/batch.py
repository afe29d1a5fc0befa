"""`Batch`: what a loader yields."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, Final

import torch
from torch import Tensor

from fastvid.errors import UsageError


class Batch(dict[str, Any]):
    """One rank's rows of one global batch: a dict whose entries are attributes too: ``batch.video``.

    B is the number of rows; each row is a clip of T frames. A row is masked (`valid` False, zeros in `video`, weight 0)
    if it pads the last batch of an epoch or if its clip was skipped. The mean loss over the global batch is the sum
    over ranks of ``(loss_of_each_clip * batch.weight).sum()``; DistributedDataParallel divides by the world size, so
    multiply by it there.

    Made from a dict, so that trainers can rebuild it: ``Batch({name: value})``. An entry that was not requested is
    absent; reading its attribute raises an AttributeError that says which argument delivers it. Annotation columns are
    in `fields`.
    """

    # the first stream on the loader's device: RGB frames [B, 3, T, H, W] or [B, T, 3, H, W], or flow; with views
    # [B, V, 3, T, H, W] or [B, V, T, 3, H, W]. With collate="list" a list of B tensors without the first axis. Every
    # stream but a first "rgb" is also an entry of its name, such as ``batch["observation.images.top"]``.
    video: Any
    label: Tensor  # int64 [B], on the device; IGNORED_LABEL if the row is masked or its sample has no label
    weight: Tensor  # float32 [B], on the device; 1 / (samples of the global batch), 0 for masked rows
    valid: Tensor  # bool [B], on the device; False for masked rows
    key: tuple[str, ...]  # key of each row's sample; empty for padding
    # frames shown, int64 [B, T], with views [B, V, T], on the host; -1 for masked rows, and after the end of a
    # clip that is shorter than the longest.
    frame_index: Tensor
    # time at which each frame begins in its video, in seconds, float64 [B, T], with views [B, V, T], on the host; -1
    # where `frame_index` is.
    seconds: Tensor
    fps: Tensor  # frames per second of each row's video, float64 [B], on the host; -1 for padding
    # frames per second that each clip shows on average, from its first to its last moment, float64 [B], with views
    # [B, V], on the host; -1 for masked rows, and for clips of one moment.
    clip_fps: Tensor
    size: Tensor  # height and width of each row's video in pixels, int64 [B, 2], on the host; -1 for padding
    sample: Tensor  # index of each row's sample in the dataset, int64 [B], on the host; -1 for padding
    position: Tensor  # position of each row in the epoch's order, int64 [B], on the host; -1 for padding
    epoch: int
    start: int
    stop: int
    # the annotation columns requested by `fields=`, one value per row; None for padding, and for a dataset of a
    # mixture that lacks the column.
    fields: Mapping[str, tuple[Any, ...]]
    text: tuple[str, ...]  # the text of each row, a tuple of str, see `Text`. With text=
    # several labels per row, float32 [B, C] of zeros and ones, on the device, see `MultiHot`. With labels=.
    labels: Tensor
    # name of each row's dataset, a tuple of str; empty for padding. If the dataset is a `Mixture`.
    dataset: tuple[str, ...]
    # optical flow [B, 2L, T, H, W] or [B, T, 2L, H, W] of the frames in `video`, in output pixels per frame: x
    # and y of L flows around each frame, L = `flow_stack`; if the stream "flow" was requested.
    flow: Tensor
    mask: Tensor  # bool [B, T], on the device; False after the end of a shorter clip. With collate="pad"
    # int32 [B + 1], on the device: row b is patches cu_seqlens[b] to cu_seqlens[b + 1] - 1 of `video`, which with
    # batches=Packed(...) is [N, 3 * pt * ph * pw]: the patches of all rows, see
    # `fastvid.load.batch.assemble.Patches.pack` for their order.
    cu_seqlens: Tensor
    max_seqlen: int  # most patches of a row. With batches=Packed(...)
    # int64 [B, 3], on the device: patches of each row along time, height and width. With batches=Packed(...).
    grid: Tensor
    # int64 [n + 1], on the host: this rank's bin i has the rows bins[i] to bins[i + 1] - 1. With
    # batches=Packed(...).
    bins: Tensor
    # sound of each clip, float32 [B, C, S], on the device, padded with zeros to the longest of the global batch
    # (of this rank's rows with Buckets and Packed); if `audio` was requested.
    audio: Tensor
    # bool [B, S], on the device; False after the end of a clip's sound, and where its video has none.
    audio_mask: Tensor

    def __getattr__(self, name: str) -> Any:
        try:
            return self[name]
        except KeyError:
            hint = f"; ask for it by {_ASKED[name]}" if name in _ASKED else f"; it has {', '.join(self)}"
            raise AttributeError(f"the batch has no {name!r}{hint}") from None

    def __setattr__(self, name: str, value: Any) -> None:
        self[name] = value

    @property
    def num_rows(self) -> int:
        """Rows of this rank, B."""
        return len(self["label"])

    def rows(self, part: slice) -> Batch:
        """Return some of the rows, without copying; entries that are not one value per row are unchanged."""
        if "cu_seqlens" in self:
            raise UsageError("packed rows cannot be sliced", hint="use smaller batches, or batches=Buckets(...)")
        count = self.num_rows

        def cut(value: Any) -> Any:
            if isinstance(value, Mapping):
                return {name: cut(one) for name, one in value.items()}
            sized = isinstance(value, (Tensor, tuple, list)) and not (isinstance(value, Tensor) and value.ndim == 0)
            return value[part] if sized and len(value) == count else value

        return self._each(cut)

    @property
    def device_tensors(self) -> tuple[Tensor, ...]:
        """One tensor of each block of memory on the loader's device; several small entries share the block of label."""
        values = [value for name, value in self.items() if name not in _ON_HOST | _WITH_LABEL]
        listed = [one for value in values for one in (value if isinstance(value, list) else [value])]
        tensors = [one for one in listed if isinstance(one, Tensor)]
        return tuple({id(one): one for one in tensors}.values())

    def to(self, device: torch.device | str | int, *, non_blocking: bool = False) -> Batch:
        """Return the batch with all tensors on a device."""
        return self._mapped(lambda tensor: tensor.to(device, non_blocking=non_blocking))

    def pin_memory(self) -> Batch:
        """Return the batch with its tensors on the host in page-locked memory."""
        return self._mapped(lambda tensor: tensor.pin_memory() if tensor.device.type == "cpu" else tensor)

    def __repr__(self) -> str:
        parts = []
        if len(self.get("video", ())):
            video = self["video"]
            one = video[0] if isinstance(video, list) else video
            shape = f"{len(video)} of " * isinstance(video, list) + "x".join(map(str, one.shape))
            parts.append(f"video={shape} {one.dtype} on {one.device}")
        if "valid" in self:
            parts.append(f"{int(self.valid.sum())} of {len(self.valid)} rows valid")
        if "epoch" in self and "start" in self and "stop" in self:
            parts.append(f"epoch {self.epoch}, positions {self.start} to {self.stop - 1}")
        return f"Batch({', '.join(parts or self)})"

    def _mapped(self, change: Callable[[Tensor], Tensor]) -> Batch:
        def changed(value: Any) -> Any:
            if isinstance(value, Tensor):
                return change(value)
            return [changed(one) for one in value] if isinstance(value, list) else value

        return self._each(changed)

    def _each(self, change: Callable[[Any], Any]) -> Batch:
        # Once for each value: the first stream is the same object as `video`.
        made = {id(value): change(value) for value in self.values()}
        return Batch({name: made[id(value)] for name, value in self.items()})


_ON_HOST: Final = frozenset({"frame_index", "seconds", "fps", "clip_fps", "size", "sample", "position", "bins"})
"""Entries whose tensors stay on the host."""

_WITH_LABEL: Final = frozenset({"labels", "weight", "valid", "mask", "grid", "cu_seqlens"})
"""Entries that are views of the block of memory that contains `label`."""

_ASKED: Final = (
    {"flow": 'streams=("rgb", "flow")', "mask": 'collate="pad"', "dataset": "a Mixture of datasets"}
    | {"text": "text=Text(column)", "labels": "labels=MultiHot(column)"}
    | dict.fromkeys(("cu_seqlens", "max_seqlen", "grid", "bins"), "batches=Packed(...)")
    | dict.fromkeys(("audio", "audio_mask"), "audio=Audio(16_000)")
)
"""The argument of the loader that delivers an entry, by entry."""
