"""Whole frames of packed clips, their digests, and the judgement of a decoder's frames."""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from typing import Any, Final

import numpy as np
import numpy.typing as npt
import torch

from fastvid.decode.clips import read_clip
from fastvid.decode.colours import ClipPlanes
from fastvid.decode.pixels import clip_to_rgb
from fastvid.decode.request import Box, ClipRequest, Decoder, EncodedClip, Planes
from fastvid.decode.video_dataset import VideoDataset
from fastvid.runtime.arrays import UInt8Array

POISON: Final = 0x5A
"""Level that targets are filled with before decoding: neither black nor a usual mean."""

# A frame is wrong if another frame of its clip is nearer by more than this, or if it is further away than the bound, in
# mean levels. DALI interpolates chroma and is 2 levels off on average; black is over 50.
_NEARER: Final = 0.2
_BOUND: Final = 6.0
_STRIDE: Final = 4  # pixels; the nearest of all frames is looked for on a coarse grid


def clip_of(dataset: VideoDataset, number: int, frames: npt.ArrayLike) -> EncodedClip:
    """Return the packets of whole frames of a sample; an odd size loses its last row or column."""
    shards, rows = dataset.locate([number])
    shard, row = dataset.shard(int(shards[0])), int(rows[0])
    info = shard.info(row, "rgb")
    size = (info.height & ~1, info.width & ~1)
    request = ClipRequest(number, np.asarray(frames, dtype=np.int64), Box(0, 0, *size), size)
    key = dataset.key(number)
    return read_clip(request, info, shard.table(row, "rgb"), shard.reader(row, "rgb"), key=key, shard=shard.stem)


def planes_of(decoder: Decoder, clip: EncodedClip) -> Planes:
    """Decode a clip to planes on the host."""
    count, box = len(clip.request.frames), clip.request.box
    planes = Planes.packed(np.full(Planes.nbytes(count, box), POISON, np.uint8), count, box)
    (error,) = decoder.decode([clip], [planes])
    if error is not None:
        raise error
    return planes


def digests(planes: Planes) -> UInt8Array:
    """Return the SHA-256 of each frame's Y, U and V, uint8 [T, 32]."""
    found = [
        hashlib.sha256(b"".join(plane.tobytes() for plane in frame)).digest()
        for frame in zip(planes.y, planes.u, planes.v, strict=True)
    ]
    return np.frombuffer(b"".join(found), np.uint8).reshape(-1, 32)


def rgb_of(clip: EncodedClip, planes: Planes) -> UInt8Array:
    """Return the reference RGB of a clip's planes, uint8 [3, T, H, W]."""
    whole = ClipPlanes(
        *(torch.from_numpy(plane) for plane in (planes.y, planes.u, planes.v)),
        matrix=clip.info.matrix,
        range=clip.info.range,
    )
    reference: UInt8Array = clip_to_rgb(whole, clip.request.size).numpy()
    return reference


def wrong_frames(found: UInt8Array, every: UInt8Array, wanted: npt.ArrayLike) -> tuple[int, float]:
    """Compare a decoder's frames with all frames of the clip.

    `found`: uint8 [C, T, H, W]. `every`: the reference of all frames, uint8 [C, N, H, W]. `wanted`: the requested
    frames, [T]. Returns how many frames are wrong, and the mean difference of the whole clip in levels.
    """
    small, coarse = found[..., ::_STRIDE, ::_STRIDE].astype(np.int16), every[..., ::_STRIDE, ::_STRIDE].astype(np.int16)
    wrong, total = 0, 0.0
    for place, frame in enumerate(np.asarray(wanted).tolist()):
        distances = np.abs(coarse - small[:, place : place + 1]).mean(axis=(0, 2, 3))
        exact = np.abs(found[:, place].astype(np.int16) - every[:, frame].astype(np.int16)).mean()
        wrong += bool(distances.min() < distances[frame] - _NEARER or exact > _BOUND)
        total += float(exact)
    return wrong, total / len(np.asarray(wanted))


def spoiled(every: UInt8Array, wanted: npt.ArrayLike) -> dict[str, UInt8Array]:
    """Return what broken decoders would deliver for the wanted frames, by their fault; each must be refused."""
    frames = np.asarray(wanted)
    right, last = every[:, frames], every.shape[1] - 1
    unwritten = right.copy()
    unwritten[:, -1] = POISON
    faults: dict[str, Callable[[], Any]] = {
        "black": lambda: np.zeros_like(right),
        "unwritten": lambda: unwritten,
        "stale": lambda: np.repeat(right[:, :1], len(frames), axis=1),
        "swapped colours": lambda: right[::-1],
        "upside down": lambda: right[:, :, ::-1],
        "mirrored": lambda: right[..., ::-1],
        "late": lambda: every[:, np.minimum(frames + 1, last)],
        "out of order": lambda: right[:, ::-1],
    }
    return {name: np.ascontiguousarray(make()) for name, make in faults.items()}
