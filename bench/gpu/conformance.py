"""Section `conformance`: GPU decoders deliver the requested frames, and exactly libavcodec's planes."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch

from bench.gpu.frames import POISON, clip_of, digests, planes_of, rgb_of, spoiled, wrong_frames
from bench.gpu.settings import NUM_FRAMES, REFERENCE, Notes, Settings
from fastvid.decode.colours import ClipPlanes, Pixels
from fastvid.decode.pixels import finish_planes
from fastvid.decode.pyav import PyAvDecoder
from fastvid.decode.request import Decoder, DevicePlanes, DeviceRgb, EncodedClip, Planes
from fastvid.decode.video_dataset import VideoDataset
from fastvid.errors import FastvidError
from fastvid.runtime.arrays import UInt8Array

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
