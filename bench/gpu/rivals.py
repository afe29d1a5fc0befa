"""Section `rivals`: fastvid's GPU decoders and others on the same clips: right frames first, then rounds and ratios.

All leave cropped RGB on the GPU and are done when it is there. A rival gets whole MP4s, as its users have them, and is
kept open where it can be; its number of threads is chosen in a round before. fastvid's time includes planning, reading
and checksums. What cannot run or shows wrong frames is listed in `refused`, with the reason.
"""

from __future__ import annotations

import itertools
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import replace
from functools import lru_cache, partial
from pathlib import Path
from typing import Any, Final

import numpy as np
import torch
from torch.utils.dlpack import from_dlpack

from bench.common.linked import video_decoder
from bench.common.newest import installed
from bench.decode.contest import entry
from bench.decode.rivals import OpenDecoders
from bench.gpu import stand_ins
from bench.gpu.conformance import clip_of, levels_of, planes_of, rgb_of, target_of, wrong_frames
from bench.gpu.settings import Notes, Settings
from fastvid.decode import engines
from fastvid.decode.backends import Backend
from fastvid.decode.pyav import PyAvDecoder
from fastvid.decode.request import ClipRequest
from fastvid.errors import DecodeError
from fastvid.runtime.arrays import UInt8Array
from fastvid.tune.measure import Contender, Corpus, FastvidRunner, parse_sampling, ratio
from fastvid.tune.measure import measure as take_turns

SAMPLINGS: Final = ("tsn8", "dense8x2")
_CHUNK: Final = 8  # clips that are decoded by one call, where a decoder takes several
_ROUNDS, _CHECKED = 5, 2 * _CHUNK  # clips of the check before the rounds
_KEPT: Final = 32  # decoders, one for each video
_AHEAD: Final = 8  # frames that ThreadedDecoder decodes ahead


class Job(ABC):
    """Decodes clips of a corpus on a stream of its own and waits until they are there."""

    def __init__(self, corpus: Corpus, device: torch.device) -> None:
        self.corpus, self.device = corpus, device
        self.stream = torch.cuda.Stream(device) if device.type == "cuda" else None
        self.handle = 0 if self.stream is None else self.stream.cuda_stream

    def __call__(self, task: int, /) -> Any:
        """Decode one clip; see `run`."""
        return self.run(range(task, task + 1))[0]

    def run(self, tasks: range) -> list[Any]:
        """Decode clips to RGB on the device: levels [3, T, h, w] each."""
        with torch.cuda.stream(self.stream):
            found = self.decode([self.corpus.requests[task] for task in tasks])
        if self.stream is not None:
            self.stream.synchronize()
        return found

    @abstractmethod
    def decode(self, requests: Sequence[ClipRequest]) -> list[Any]:
        """Decode clips to RGB: levels [3, T, h, w] each."""


class ByClip(Job):
    """Decodes one clip after another."""

    def decode(self, requests: Sequence[ClipRequest]) -> list[Any]:
        """See `Job`."""
        found = []
        for request in requests:
            wanted, places = np.unique(request.frames, return_inverse=True)
            frames = self.frames(request, wanted.tolist())
            found.append(torch.stack([frames[place] for place in places.tolist()], 1))
        return found

    @abstractmethod
    def frames(self, request: ClipRequest, wanted: list[int]) -> Sequence[Any]:
        """Return the crops of frames, in ascending order, uint8 [3, h, w] each."""

    def kept(self, name: str, request: ClipRequest, *own: Any, **reconfigured: int) -> Any:
        """Return PyNvVideoCodec's decoder of a name; there is one, with a cache, for all files."""
        import PyNvVideoCodec

        file, where = self.corpus.files[request.sample], {"gpu_id": self.device.index or 0, "cuda_stream": self.handle}
        if self._decoder is None:
            where |= {"use_device_memory": True, "max_width": 2048, "max_height": 2048}  # as in NVIDIA's samples
            where["output_color_type"] = PyNvVideoCodec.OutputColorType.RGBP
            self._decoder = getattr(PyNvVideoCodec, name)(file, *own, **where, **reconfigured)
        elif reconfigured or self._at != request.sample:
            self._decoder.reconfigure_decoder(file, **reconfigured)
        self._at = request.sample
        return self._decoder

    _decoder: Any = None


def _cut(frame: Any, request: ClipRequest) -> Any:
    """Return a view of a crop, [3, h, w], of anything with DLPack: [3, H, W], or [3 * H, W] of PyNvVideoCodec."""
    box, found = request.box, from_dlpack(frame)
    found = found.unflatten(0, (3, -1)) if found.ndim == 2 else found
    return found[..., box.y : box.y + box.height, box.x : box.x + box.width]


class Ours(Job):
    """fastvid: packets planned, read from memory and checked; decoded, and converted by its own kernel if planes."""

    def __init__(self, corpus: Corpus, device: torch.device, one: Backend) -> None:
        super().__init__(corpus, device)
        self._reader = FastvidRunner(corpus, "rgb", "memory")
        self._decoder = one.open(device_id=device.index or 0)

    def decode(self, requests: Sequence[ClipRequest]) -> list[Any]:
        """Decode all clips in one call."""
        clips = list(map(self._reader._fetch, requests, self._reader._scratches))
        outputs = [target_of(self._decoder, clip, self.device) for clip in clips]
        for error in filter(None, self._decoder.decode(clips, outputs)):
            raise error
        return list(map(levels_of, clips, outputs))


class Simple(ByClip):
    """PyNvVideoCodec's ``SimpleDecoder``."""

    def frames(self, request: ClipRequest, wanted: list[int]) -> Sequence[Any]:
        """Decode the wanted frames by their numbers."""
        decoder = self.kept("SimpleDecoder", request)
        return [_cut(frame, request) for frame in decoder.get_batch_frames_by_index(wanted)]


class Threaded(ByClip):
    """PyNvVideoCodec's ``ThreadedDecoder``, which decodes ahead from the first wanted frame to the last."""

    def frames(self, request: ClipRequest, wanted: list[int]) -> Sequence[Any]:
        """Decode a run of frames and keep the wanted ones."""
        at, found = wanted[0], list[Any]()
        decoder = self.kept("ThreadedDecoder", request, _AHEAD, start_frame=at)
        while at <= wanted[-1]:
            batch = decoder.get_batch_frames(min(_AHEAD, wanted[-1] + 1 - at))
            if not batch:
                raise DecodeError(f"ThreadedDecoder ends before frame {at}")
            # The next call reuses their memory.
            found += [_cut(frame, request).clone() for number, frame in enumerate(batch, at) if number in wanted]
            at += len(batch)
        return found


class Torchcodec(ByClip):
    """torchcodec's ``VideoDecoder`` on CUDA, from memory; kept open and exact, or opened for each clip."""

    def __init__(self, corpus: Corpus, device: torch.device, most: int) -> None:
        super().__init__(corpus, device)
        opened = partial(video_decoder(), device=str(device), seek_mode="exact" if most else "approximate")
        self._open = OpenDecoders(lambda sample: opened(corpus.mp4s[sample]), most)

    def frames(self, request: ClipRequest, wanted: list[int]) -> Sequence[Any]:
        """Decode the wanted frames; a fallback to the CPU is an error."""
        decoder = self._open[request.sample]
        found = decoder.get_frames_at(wanted).data
        if self.stream is not None and decoder.cpu_fallback:
            raise DecodeError(f"torchcodec does not use the GPU: {decoder.cpu_fallback}")
        return [_cut(frame, request) for frame in found]


class Dali(Job):
    """DALI's ``fn.decoders.video``: a pipeline decodes the wanted frames of several MP4s at once."""

    ahead = 1

    def __init__(self, corpus: Corpus, device: torch.device) -> None:
        super().__init__(corpus, device)
        from nvidia.dali import fn, pipeline, types

        size = {"batch_size": _CHUNK, "num_threads": _CHUNK, "prefetch_queue_depth": self.ahead}
        self.pipeline = pipeline.Pipeline(device_id=device.index or 0, set_affinity=False, **size)
        with self.pipeline:
            self.pipeline.set_outputs(*self.graph(fn, types))
        self.pipeline.build()

    def graph(self, fn: Any, types: Any) -> Sequence[Any]:
        """Return the outputs of the pipeline, of which the first is uint8 [T, H, W, 3]."""
        mp4 = fn.external_source(name="mp4", dtype=types.UINT8, ndim=1)
        frames = fn.external_source(name="frames", dtype=types.INT32, ndim=1)
        return [fn.decoders.video(mp4, device="mixed", frames=frames, pad_mode="none", affine=False)]

    def feed(self, requests: Sequence[ClipRequest]) -> None:
        """Give the pipeline the inputs of its next run."""
        self.pipeline.feed_input("mp4", [np.frombuffer(self.corpus.mp4s[one.sample], np.uint8) for one in requests])
        self.pipeline.feed_input("frames", [one.frames.astype(np.int32) for one in requests])

    def decode(self, requests: Sequence[ClipRequest]) -> list[Any]:
        """Decode all clips in one run of the pipeline."""
        self.feed(requests)
        video = self.pipeline.run(self.handle or None)[0]
        clips = [from_dlpack(video.at(place)).movedim(-1, 0) for place in range(len(requests))]
        return [_cut(clip, request).clone() for clip, request in zip(clips, requests, strict=True)]


class Reader(Dali):
    """DALI's ``fn.readers.video``, which reads the clips of a list of files in its order and has one thread.

    It prefetches, so a round finds up to three batches of the one before; that is in its favour.
    """

    ahead = 2

    def graph(self, fn: Any, types: Any) -> Sequence[Any]:  # noqa: ARG002
        """List each clip as the range of frames that contains it alone."""
        count, stride = parse_sampling(self.corpus.sampling)
        if stride is None:
            raise DecodeError("fn.readers.video reads frames at a constant distance only")
        files, lines = self.corpus.files, list[str]()
        for number, one in enumerate(self.corpus.requests):
            first = int(one.frames[0])
            lines.append(f"{files[one.sample]} {number} {first} {first + stride * (count - 1) + 1}\n")
        path = Path(files[0]).with_name(f"{self.corpus.sampling}.txt")
        path.write_text("".join(lines))
        clip = {"sequence_length": count, "stride": stride, "step": 1 << 20}
        found: Sequence[Any] = fn.readers.video(device="gpu", file_list=str(path), file_list_frame_num=True, **clip)
        return found

    def feed(self, requests: Sequence[ClipRequest]) -> None:
        """Do nothing: the list has all clips."""


RIVALS: Final = {
    "PyNvVideoCodec SimpleDecoder": ("pynvvideocodec", Simple),
    "PyNvVideoCodec ThreadedDecoder": ("pynvvideocodec", Threaded),
    "torchcodec": ("torchcodec", partial(Torchcodec, most=0)),
    "torchcodec kept open": ("torchcodec", partial(Torchcodec, most=_KEPT)),
    "DALI fn.decoders.video": ("nvidia-dali-cuda130", Dali),
    "DALI fn.readers.video": ("nvidia-dali-cuda130", Reader),
}
"""The package and the job of each rival."""


def measure(settings: Settings, notes: Notes) -> None:
    """Compare all contenders on the smallest videos of two profiles and in two samplings."""
    if settings.fake:
        stand_ins.install()
    runs, reasons = settings.on_device()
    name, dataset = settings.smallest()
    notes.put(packages={package: installed(package) for package, _ in RIVALS.values()}, unavailable=reasons)
    ran, wrong, least = set[str](), 0, list[float]()
    for folder, sampling in itertools.product((name, name.replace("compact", "intra")), SAMPLINGS):
        corpus = Corpus(str(settings.data / folder), sampling, crop=settings.crop(dataset))
        # Whole chunks, so that rounds of DALI's reader begin with the first clip: as many repeats as fill some.
        repeats = _CHUNK * (1 if settings.fake else max(1, 24 // len(corpus.dataset)))
        row = _contest(settings, replace(corpus, repeats=repeats), {one.name: one for one in runs}, notes)
        notes.row("contests", dataset=folder, sampling=sampling, **row)
        rates = {one["name"]: one["rate"] for one in row["contenders"]}
        ran |= rates.keys() & RIVALS.keys()
        wrong += len(row["refused"].keys() - RIVALS.keys())
        ours, theirs = (
            max([rates[one] for one in rates if (one in RIVALS) is kind] or [0.0]) for kind in (False, True)
        )
        least += [ours / theirs] if theirs else []
        notes.put(compared=len(ran), ours_refused=wrong, least_ratio=round(min(least), 3) if least else None)


def _contest(settings: Settings, corpus: Corpus, ours: dict[str, Backend], notes: Notes) -> dict[str, Any]:
    """Check, sweep and time all contenders; one that fails is refused with the reason."""
    jobs: dict[str, Any] = {name: partial(Ours, one=one) for name, one in ours.items()}
    jobs |= {name: job for name, (_, job) in RIVALS.items()}
    tasks, count = len(corpus.requests), 1 if settings.fake else engines.engines(settings.index())
    best, means, refused = dict[str, Contender](), dict[str, float](), dict[str, str]()
    for name, job in jobs.items():
        notes.put(now=f"{name}, {Path(corpus.folder).name}, {corpus.sampling}")  # who is to blame if a driver crashes
        opened, chunk = partial(job, corpus, settings.device), _CHUNK if job in (Dali, Reader) or name in ours else 1
        try:
            means[name] = round(check(opened(), corpus), 3)
            lanes = [1] if job is Reader else [count, 2 * count]
            tried = [Contender(name, {}, opened, workers, chunk=chunk) for workers in lanes]
            best[name] = max(tried, key=lambda one: take_turns([one], tasks, 1)[0].rates[0])
        except Exception as error:  # noqa: BLE001 - drivers and libraries raise anything
            refused[name] = f"{type(error).__name__}: {error}".partition("\n")[0]
    rounds = 2 if settings.fake else _ROUNDS
    timings = dict(zip(best, take_turns(list(best.values()), tasks, rounds), strict=True))
    rows = []
    for name, contender in best.items():
        times = {own: ratio(timings[own], timings[name])["wall"] for own in ours if own in best}
        row = entry(contender, timings[name]) | {"mean_levels": means[name], "fastvid_is_faster_by": times}
        rows.append(row)
    return {"clips": tasks, "contenders": rows, "refused": refused}


def check(job: Job, corpus: Corpus) -> float:
    """Return the mean difference from the reference in levels; DecodeError if a frame is wrong, as in `conformance`."""
    means = []
    for first in range(0, min(_CHECKED, len(corpus.requests)), _CHUNK):
        tasks = range(first, first + _CHUNK)
        for task, levels in zip(tasks, job.run(tasks), strict=True):
            request = corpus.requests[task]
            found = levels.float().round().to(torch.uint8).cpu().numpy()
            every = _cut(torch.from_numpy(_reference(corpus, request.sample)), request).numpy()
            wrong, mean = wrong_frames(found, every, request.frames)
            if wrong:
                raise DecodeError(f"{wrong} of {len(request.frames)} frames are wrong, {mean:.1f} levels off")
            means.append(mean)
    return float(np.mean(means))


@lru_cache(_CHECKED)
def _reference(corpus: Corpus, sample: int) -> UInt8Array:
    clip = clip_of(corpus.dataset, sample, np.arange(corpus.dataset[sample].num_frames))
    return rgb_of(clip, planes_of(PyAvDecoder(), clip))
