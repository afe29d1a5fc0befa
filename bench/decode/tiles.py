"""Measure clips of JPEG tiles, of which only what the crop shows is decoded, beside other all-intra encodings.

8 random frames become RGB uint8 224x224 on the host, by the crops of loaders; fastvid's time includes planning, reading
and checksums. `intra` is at the CRF at which tiles have its SSIM; MJPEG is that of ffmpeg at about the same. torchcodec
keeps a decoder open for each video, and PyTorch resizes its crops, antialiased; its other settings make no difference.
Cut pictures must equal the crops of whole ones bit for bit before anything is timed.
"""

from __future__ import annotations

import argparse
import re
import statistics
from dataclasses import dataclass, replace
from functools import cached_property, partial
from pathlib import Path
from typing import Any, Final

import numpy as np

from bench.common.footage import shard
from bench.common.harness import NEEDED, Record, options
from bench.common.newest import CHECKED, use_newest
from bench.decode.contest import check, entry
from bench.decode.rivals import KEPT, TorchcodecJob
from bench.decode.similarity import videos
from fastvid.decode.clips import PacketBuffer, read_clip
from fastvid.decode.request import Box, ClipRequest, DecoderOutput, EncodedClip, Rgb
from fastvid.decode.tiles import decoded_part
from fastvid.errors import JobError
from fastvid.format.schema import StreamFlag
from fastvid.load.clips.crops import CenterCrop, RandomCrop, RandomResizedCrop, Spatial
from fastvid.load.order.draws import BatchDraws
from fastvid.media.ffmpeg import Limits, find_ffmpeg
from fastvid.runtime.arrays import UInt8Array
from fastvid.sharding.encode.profiles import Profile
from fastvid.sharding.encode.tiles import interval
from fastvid.tune.measure import Contender, Corpus, FastvidRunner, fastvid, measure, ratio
from fastvid.tune.study import comparison

SCHEMA: Final = "fastvid-bench-tiles/1"
TILES: Final = "tiles"
ENCODINGS: Final = {TILES: (), "intra": ("--crf", "22"), "mjpeg": ("--crf", "8")}
"""Profiles and their options."""

_SSIM: Final = re.compile(r"SSIM Y:(\d\.\d+) .*?U:(\d\.\d+) .*?V:(\d\.\d+) ")
_TIMED: Final = {"RandomResizedCrop": RandomResizedCrop(224), "RandomCrop": RandomCrop(224)}
_SHARES: Final = {
    "RandomResizedCrop(224)": (RandomResizedCrop(224), ((256, 336), (448, 256))),
    "RandomCrop(224)": (RandomCrop(224), ((256, 336), (448, 256))),
    "local crop, scale .05 to .4": (RandomResizedCrop(96, scale=(0.05, 0.4)), ((256, 336), (448, 256))),
    "RandomCrop(256)": (RandomCrop(256), ((720, 1280), (1072, 1904))),
    "CenterCrop(224), a robot's region": (CenterCrop(224), ((480, 640),)),
}
"""Crops, and heights and widths of videos of whose pictures they show a part."""
_DRAWN: Final = 2000

add_arguments = options(
    "cache installed",
    json="tiles.json",
    footage=(Path, "real videos", NEEDED),
    rounds=11,
    repeats=(2, "clips per video"),
)


def run(args: argparse.Namespace) -> int:
    """Run the benchmark."""
    if not args.installed:
        use_newest(["torchcodec"], args.cache)
    names = {name: "-".join([name, *given[1:]]) for name, given in ENCODINGS.items()}
    folders = {name: shard(args.footage, name, args.cache, options=ENCODINGS[name], name=names[name]) for name in names}
    record = Record(SCHEMA, args, "rounds", "repeats", rows=[], shares=shares(), newest_checked=CHECKED.isoformat())
    record["encodings"] = {name: _facts(folder, args.footage) for name, folder in folders.items()}
    for crop in _TIMED:
        record["rows"].append(_row(crop, folders, args))
        record.save()
    return record.finish()


@dataclass(frozen=True)
class Cropped(Corpus):
    """Clips whose crops are those of a loader."""

    shown: str = ""

    @cached_property
    def requests(self) -> list[ClipRequest]:
        """The clips, with videos in random order."""
        found = super().requests
        heights, widths = zip(
            *((self.dataset[one.sample].height, self.dataset[one.sample].width) for one in found), strict=True
        )
        draws = BatchDraws(self.seed, 0, np.arange(len(found)))
        cuts = Spatial.of(_TIMED[self.shown]).cuts(heights, widths, draws).tolist()
        return [replace(one, box=Box(*cut[:4]), size=tuple(cut[4:6])) for one, cut in zip(found, cuts, strict=True)]


class WholePictures(FastvidRunner):
    """fastvid, without cutting pictures before they are decoded."""

    def _fetch(self, request: ClipRequest, scratch: PacketBuffer) -> EncodedClip:
        shard, row, _ = self._places[request.sample]
        info = replace(shard.info(row), flags=StreamFlag.NONE)
        assert self._read is not None
        return read_clip(request, info, shard.table(row), self._read[request.sample], scratch=scratch)


class ResizedFast(FastvidRunner):
    """fastvid, which resizes planes before it converts them."""

    def _output(self, request: ClipRequest) -> DecoderOutput:
        output = super()._output(request)
        return replace(output, fast=True) if isinstance(output, Rgb) else output


class ResizedJob(TorchcodecJob):
    """torchcodec with decoders that stay open; crops are resized by PyTorch."""

    def __init__(self, corpus: Corpus) -> None:
        super().__init__(corpus, "memory", "mappings", "slice", 1, KEPT)
        self._out = np.empty((len(self._requests[0].frames), *self._requests[0].size, 3), np.uint8)

    def __call__(self, task: int, /) -> UInt8Array:
        """Decode a clip to uint8 [T, H, W, 3]."""
        from torch.nn.functional import interpolate

        request = self._requests[task]
        box, frames = request.box, self._decoders[request.sample].get_frames_at(request.frames.tolist()).data
        crop = frames[:, box.y : box.y + box.height, box.x : box.x + box.width].permute(0, 3, 1, 2)
        if (box.height, box.width) != request.size:
            crop = interpolate(crop, request.size, mode="bilinear", antialias=True)
        self._out[...] = crop.permute(0, 2, 3, 1).numpy()
        return self._out


def _row(crop: str, folders: dict[str, Path], args: argparse.Namespace) -> dict[str, Any]:
    """Time the encodings with one crop."""
    keys = tuple(sorted(videos(args.footage)))
    corpora = {
        name: Cropped(str(folder), "tsn8", args.repeats, keys=keys, shown=crop) for name, folder in folders.items()
    }
    _compare(corpora[TILES])
    contenders = {
        f"{product} of {name}": fastvid(corpus, 1, product=product, source="memory")
        for product in ("rgb", "planes")
        for name, corpus in corpora.items()
    }
    whole = partial(WholePictures, corpora[TILES], "rgb", "memory")
    for name in (TILES, "intra"):
        fast = partial(ResizedFast, corpora[name], "rgb", "memory")
        contenders[f"rgb of {name}, resized fast"] = Contender("fastvid", {}, fast, 1)
    contenders["rgb of tiles, decoded whole"] = Contender("fastvid", {}, whole, 1)
    for name in ("mjpeg", "intra"):
        rival = Contender("torchcodec", {}, partial(ResizedJob, corpora[name]), 1)
        contenders[f"torchcodec, rgb of {name}"] = rival
        if (wrong := check(rival, corpora[name])) is not None:
            raise JobError(f"torchcodec of {name}: {wrong}")
    requests = corpora[TILES].requests
    timings = dict(zip(contenders, measure(list(contenders.values()), len(requests), args.rounds), strict=True))
    found = {}
    for name, one in contenders.items():
        best = timings["planes of tiles" if name.startswith("planes") else "rgb of tiles"]
        found[name] = entry(one, timings[name]) | {"label": name, "tiles_are_faster_by": ratio(best, timings[name])}
    share = _share_of(corpora[TILES])
    row = {"crop": crop, "clips": len(requests), "share": share, "fast_is_off_by": _levels(corpora[TILES])}
    return row | {"contenders": list(found.values())}


def _compare(corpus: Corpus) -> None:
    """Raise an error unless clips of cut pictures equal those of whole ones."""
    ours, whole = FastvidRunner(corpus, "rgb", "memory"), WholePictures(corpus, "rgb", "memory")
    for task in range(len(corpus.requests)):
        if not np.array_equal(np.asarray(ours(task)), np.asarray(whole(task))):
            raise JobError(f"clip {task} of cut pictures differs from that of whole ones", hint="run the tests")


def _levels(corpus: Corpus) -> float:
    """Return by how many levels of 255 clips that are resized fast differ on average."""
    exact, fast = FastvidRunner(corpus, "rgb", "memory"), ResizedFast(corpus, "rgb", "memory")
    tasks = range(len(corpus.requests))
    return statistics.mean(float(np.abs(np.subtract(exact(n), fast(n), dtype=np.int16)).mean()) for n in tasks)


def _share_of(corpus: Corpus) -> float:
    """Return the mean share of the pictures that is decoded for a corpus' crops."""
    shown = [(one.box, corpus.dataset[one.sample]) for one in corpus.requests]
    return statistics.mean(_share(box, video.height, video.width) for box, video in shown)


def _share(box: Box, height: int, width: int) -> float:
    part = decoded_part(box, (height, width), 16 * interval(width))
    return part.height * part.width / (height * width)


def shares() -> list[dict[str, Any]]:
    """Return the mean share of pictures that crops show, and that is decoded for them, by the size of videos."""
    found = []
    for name, (crop, sizes) in _SHARES.items():
        for height, width in sizes:
            draws = BatchDraws(0, 0, np.arange(_DRAWN))
            cuts = Spatial.of(crop).cuts([height] * _DRAWN, [width] * _DRAWN, draws).tolist()
            boxes = [Box(*cut[:4]) for cut in cuts]
            shown = statistics.mean(box.height * box.width / (height * width) for box in boxes)
            decoded = statistics.mean(_share(box, height, width) for box in boxes)
            found.append({"crop": name, "height": height, "width": width, "shown": shown, "decoded": decoded})
    return found


def _facts(folder: Path, footage: Path) -> dict[str, Any]:
    """Return the quality of a dataset against its sources as the filters scale them, and its bytes."""
    corpus, sources, build = Corpus(str(folder), "tsn1"), videos(footage), find_ffmpeg()
    profile = Profile(**dict(corpus.dataset.generation.shards[0].profile))
    planes, frames = [], 0
    for sample, data in enumerate(corpus.mp4s):
        log = comparison(build, profile, str(sources[corpus.dataset.key(sample)]), data, Limits())
        if (matched := _SSIM.search(log)) is None:
            raise JobError(f"ffmpeg prints no SSIM: {log.strip()[-200:]}")
        planes.append([float(value) for value in matched.groups()])
        frames += corpus.dataset[sample].num_frames
    ssim = np.mean(planes, axis=0).round(4).tolist()
    sizes = list(map(len, corpus.mp4s))
    return {"crf": profile.crf, "ssim": ssim, "bytes_a_frame": round(sum(sizes) / frames), "videos": len(sizes)}
