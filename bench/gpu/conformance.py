"""Section `conformance`: GPU decoders deliver the requested frames, and exactly libavcodec's planes."""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from typing import Any, Final

import numpy as np
import numpy.typing as npt
import torch

from bench.gpu.settings import NUM_FRAMES, REFERENCE, Notes, Settings
from fastvid.decode.clips import read_clip
from fastvid.decode.colours import ClipPlanes, Pixels
from fastvid.decode.pixels import clip_to_rgb, finish_planes
from fastvid.decode.pyav import PyAvDecoder
from fastvid.decode.request import Box, ClipRequest, Decoder, DevicePlanes, DeviceRgb, EncodedClip, Planes
from fastvid.errors import FastvidError
from fastvid.runtime.arrays import UInt8Array
from fastvid.videos.dataset import VideoDataset

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


_CLIPS = 3  # of each dataset; a rehearsal takes one
LEVELS = Pixels((0.0, 0.0, 0.0), (1 / 255, 1 / 255, 1 / 255))
"""Normalisation that keeps levels 0 to 255."""


def measure(settings: Settings, notes: Notes) -> None:
    """Compare every GPU decoder's frames with the packed digests and with all reference frames of the clip."""
    sums: dict[str, float] = dict.fromkeys(("reference_wrong", "errors", "wrong_frames", "planes_unequal"), 0)
    means, levels, accepted = [0.0], [0.0], set[str]()
    runs, reasons = settings.on_device()
    notes.put(unavailable=reasons)
    reference = PyAvDecoder()
    opened = {one: one.open(device_id=settings.index()) for one in runs}
    for name, dataset in settings.datasets().items():
        packed = np.load(settings.data / REFERENCE / f"{name}.npy")
        first = 0
        for number in range(len(dataset)):
            length = dataset[number].num_frames
            if number < (1 if settings.fake else _CLIPS):
                every = planes_of(reference, clip_of(dataset, number, np.arange(length)))
                bad = int((digests(every) != packed[first : first + length]).any(axis=1).sum())
                sums["reference_wrong"] += bad
                for one, decoder in opened.items():
                    if dataset[number].info.codec in one.codecs:
                        row = _compare(settings, decoder, dataset, number, every)
                        notes.row("clips", dataset=name, clip=number, decoder=one.name, **row)
                        for key in ("errors", "wrong_frames", "planes_unequal"):
                            sums[key] += row.get(key, 0)
                        means.append(row.get("rgb_mean_levels", 0.0))
                        levels.append(row.get("rgb_of_planes_levels", 0.0))
            first += length
        if not accepted:
            accepted = {f"{name}: {fault}" for fault in _accepted(reference, dataset)}
        notes.put(spoiled_accepted=len(accepted), accepted=sorted(accepted))
    notes.put(**sums, rgb_mean_levels=max(means), rgb_of_planes_levels=max(levels))
    for decoder in opened.values():
        decoder.close()


def _accepted(reference: Decoder, dataset: VideoDataset) -> list[str]:
    """Return the faults that the judgement does not see in any of a dataset's clips."""
    unseen: set[str] | None = None
    for number in range(min(len(dataset), _CLIPS)):
        clip = clip_of(dataset, number, np.arange(dataset[number].num_frames))
        every, wanted = rgb_of(clip, planes_of(reference, clip)), _wanted(dataset[number].num_frames)
        missed = {
            fault for fault, frames in spoiled(every, wanted).items() if not wrong_frames(frames, every, wanted)[0]
        }
        unseen = missed if unseen is None else unseen & missed
    return sorted(unseen or ())


def _wanted(length: int) -> Any:
    """Return frames across the clip, not the first; later ones first, and one twice."""
    frames = np.minimum(np.arange(NUM_FRAMES) * length // NUM_FRAMES + 1, length - 1)
    return np.concatenate([frames[NUM_FRAMES // 2 :], frames[: NUM_FRAMES // 2], frames[-1:]])


def _compare(settings: Settings, decoder: Decoder, dataset: VideoDataset, number: int, every: Planes) -> dict[str, Any]:
    wanted = _wanted(dataset[number].num_frames)
    clip = clip_of(dataset, number, wanted)
    try:
        if DevicePlanes in decoder.outputs:
            return _planes(settings, decoder, clip, every, wanted)
        found = _rgb(settings, decoder, clip)
    except FastvidError as error:
        return {"errors": 1, "problem": error.message}
    wrong, mean = wrong_frames(found, rgb_of(clip, every), wanted)
    return {"wrong_frames": wrong, "rgb_mean_levels": round(mean, 3)}


def _rgb(settings: Settings, decoder: Decoder, clip: EncodedClip) -> UInt8Array:
    shape = (3, len(clip.request.frames), *clip.request.size)
    target = torch.full(shape, POISON, dtype=torch.uint8, device=settings.device)
    _decode(decoder, clip, DeviceRgb(target, _event(target)))
    found: UInt8Array = target.cpu().numpy()
    return found


def _planes(settings: Settings, decoder: Decoder, clip: EncodedClip, every: Planes, wanted: Any) -> dict[str, Any]:
    count, box = len(wanted), clip.request.box
    y = torch.full((count, box.height, box.width), POISON, dtype=torch.uint8, device=settings.device)
    uv = torch.full((count, box.height // 2, box.width // 2, 2), POISON, dtype=torch.uint8, device=settings.device)
    _decode(decoder, clip, DevicePlanes(y, uv, _event(y)))
    own = Planes(y.cpu().numpy(), uv[..., 0].cpu().numpy(), uv[..., 1].cpu().numpy())
    right = Planes(every.y[wanted], every.u[wanted], every.v[wanted])
    wrong, _ = wrong_frames(own.y[None], every.y[None], wanted)
    on_device = ClipPlanes(y, uv[..., 0], uv[..., 1], matrix=clip.info.matrix, range=clip.info.range)
    rgb = finish_planes([on_device], clip.request.size, LEVELS)[0].cpu().numpy()
    most = np.abs(rgb - rgb_of(clip, right).astype(np.float32)).max()
    unequal = int((digests(own) != digests(right)).any(axis=1).sum())
    return {"wrong_frames": wrong, "planes_unequal": unequal, "rgb_of_planes_levels": float(most)}


def _event(target: torch.Tensor) -> Any:
    """Return the event after which a target may be written: here, after it is poisoned."""
    return torch.cuda.current_stream().record_event() if target.is_cuda else None


def _decode(decoder: Decoder, clip: EncodedClip, output: DeviceRgb | DevicePlanes) -> None:
    (error,) = decoder.decode([clip], [output])
    if error is not None:
        raise error
