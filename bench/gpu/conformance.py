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
    runs, reasons = settings.on_device()
    notes.put(unavailable=reasons)
    reference, opened = PyAvDecoder(), [(one, one.open(device_id=settings.index())) for one in runs]
    wrong, rows, accepted = 0, list[dict[str, Any]](), set[str]()
    for name, dataset in settings.datasets().items():
        packed, lengths = np.load(settings.data / REFERENCE / f"{name}.npy"), [one.num_frames for one in dataset]
        for number in range(min(len(dataset), 1 if settings.fake else _CLIPS)):
            every = planes_of(reference, clip_of(dataset, number, np.arange(lengths[number])))
            first = sum(lengths[:number])
            wrong += int((digests(every) != packed[first : first + lengths[number]]).any(axis=1).sum())
            for one, decoder in opened:
                if dataset[number].info.codec in one.codecs:
                    rows.append(_compare(settings, decoder, dataset, number, every))
                    notes.row("clips", dataset=name, clip=number, decoder=one.name, **rows[-1])
        accepted = accepted or {f"{name}: {fault}" for fault in _accepted(reference, dataset)}
        notes.put(spoiled_accepted=len(accepted), accepted=sorted(accepted))
    sums = {key: sum(row.get(key, 0) for row in rows) for key in ("errors", "wrong_frames", "planes_unequal")}
    most = {key: max([0, *(row.get(key, 0) for row in rows)]) for key in ("rgb_mean_levels", "rgb_of_planes_levels")}
    notes.put(reference_wrong=wrong, **sums, **most)
    for _, decoder in opened:
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


def target_of(decoder: Decoder, clip: EncodedClip, device: torch.device) -> DevicePlanes | DeviceRgb:
    """Return poisoned memory on a device for a clip: planes if the decoder has them, else RGB."""
    count, box = len(clip.request.frames), clip.request.box

    def poisoned(*shape: int) -> Any:
        return torch.full(shape, POISON, dtype=torch.uint8, device=device)

    planes = DevicePlanes in decoder.outputs
    y = poisoned(count, box.height, box.width) if planes else poisoned(3, count, *clip.request.size)
    uv = poisoned(count, box.height // 2, box.width // 2, 2) if planes else None
    # It may be written after it is poisoned.
    event: Any = torch.cuda.current_stream().record_event() if y.is_cuda else None
    return DeviceRgb(y, event) if uv is None else DevicePlanes(y, uv, event)


def levels_of(clip: EncodedClip, output: DevicePlanes | DeviceRgb) -> Any:
    """Return a clip's RGB on its device, levels [3, T, H, W]: uint8, or float32 of planes."""
    if isinstance(output, DeviceRgb):
        return output.data
    own = ClipPlanes(output.y, output.uv[..., 0], output.uv[..., 1], matrix=clip.info.matrix, range=clip.info.range)
    return finish_planes([own], clip.request.size, LEVELS)[0]


def _compare(settings: Settings, decoder: Decoder, dataset: VideoDataset, number: int, every: Planes) -> dict[str, Any]:
    wanted = _wanted(dataset[number].num_frames)
    clip = clip_of(dataset, number, wanted)
    output = target_of(decoder, clip, settings.device)
    (error,) = decoder.decode([clip], [output])
    if error is not None:
        return {"errors": 1, "problem": error.message}
    found = levels_of(clip, output).cpu().numpy()
    if isinstance(output, DeviceRgb):
        wrong, mean = wrong_frames(found, rgb_of(clip, every), wanted)
        return {"wrong_frames": wrong, "rgb_mean_levels": round(mean, 3)}
    own = Planes(*(plane.cpu().numpy() for plane in (output.y, output.uv[..., 0], output.uv[..., 1])))
    right = Planes(every.y[wanted], every.u[wanted], every.v[wanted])
    wrong, _ = wrong_frames(own.y[None], every.y[None], wanted)
    most = np.abs(found - rgb_of(clip, right).astype(np.float32)).max()
    unequal = int((digests(own) != digests(right)).any(axis=1).sum())
    return {"wrong_frames": wrong, "planes_unequal": unequal, "rgb_of_planes_levels": float(most)}
