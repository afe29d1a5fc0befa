"""Whole loading pipelines, all with the same output: batches of normalised float32 [B, 3, T, H, W] on the host.

Each pipeline draws its own samples, frames (one from each of T segments) and crops, reads, decodes and normalises them,
and yields batches endlessly. Rivals follow their documentation: worker processes send uint8 and the consumer
normalises, which is faster than sending floats.
"""

from __future__ import annotations

import importlib
import itertools
import queue
import threading
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import numpy as np
import torch
from torch import Tensor

from bench.decode.rivals import spdl_io
from fastvid.decode.colours import IMAGENET_MEAN, IMAGENET_STD
from fastvid.load.workers.clip_worker import FETCH_CLIPS
from fastvid.measure.clips import Corpus
from fastvid.measure.fastvid_contender import FastvidRunner

CROP: Final = 224
FRAMES: Final = 8

_SCALE = torch.tensor([1 / (255 * std) for std in IMAGENET_STD]).view(1, 3, 1, 1, 1)
_BIAS = torch.tensor([-mean / std for mean, std in zip(IMAGENET_MEAN, IMAGENET_STD, strict=True)]).view(1, 3, 1, 1, 1)


@dataclass(frozen=True)
class PipelineInputs:
    """Inputs of every pipeline.

    Attributes:
        url: The dataset, for pipelines that read fastvid shards.
        files: The same videos as files.
        tars: The dataset's tars.
        folder: Where a pipeline may store the dataset in its own format.
        batch: Clips per batch.
        workers: Threads or processes.
    """

    url: str
    files: tuple[str, ...]
    tars: tuple[str, ...]
    folder: str
    batch: int
    workers: int


Batches = Iterator[Tensor]


def fastvid_loader(inputs: PipelineInputs, *, workers: str = "thread", decoder: str = "pyav") -> Batches:
    """Yield batches of fastvid. As for the rivals, the few videos are repeated to form a long epoch."""
    import fastvid

    loader = fastvid.ClipLoader(
        fastvid.Mixture([fastvid.open(inputs.url)], weights=[1.0], num_samples=_EPOCH),
        frames=fastvid.Segments(FRAMES),
        spatial=fastvid.RandomCrop(CROP),
        global_batch_size=inputs.batch,
        workers=fastvid.Workers(workers, num_threads=inputs.workers),  # type: ignore[arg-type]
        decoder=decoder,
        last="drop",
        rank=0,
        world_size=1,
    )
    while True:
        for batch in loader:
            yield batch.video


def decoder_alone(inputs: PipelineInputs) -> Batches:
    """Decode as `python -m bench decode` does, on as many threads, and discard the RGB. Yields the same zero batch each
    time that a batch of clips has been decoded."""
    jobs = [FastvidRunner(Corpus(inputs.url, "tsn8"), "rgb", "disk") for _ in range(inputs.workers)]
    count = len(Corpus(inputs.url, "tsn8").requests) // FETCH_CLIPS * FETCH_CLIPS
    turns = itertools.count(step=FETCH_CLIPS)
    decoded: queue.Queue[None] = queue.Queue(2 * inputs.batch)

    def decode(job: FastvidRunner) -> None:
        while True:
            first = next(turns) % count
            job.run(range(first, first + FETCH_CLIPS))
            for _ in range(FETCH_CLIPS):
                decoded.put(None)

    for job in jobs:
        threading.Thread(target=decode, args=(job,), daemon=True).start()
    same = torch.zeros(inputs.batch, 3, FRAMES, CROP, CROP)
    while True:
        for _ in range(inputs.batch):
            decoded.get()
        yield same


def torchcodec_frames(source: Any, seek: str = "approximate") -> Tensor:
    """Decode random frames and a random crop of a video by torchcodec, uint8 [3, T, H, W]."""
    from fastvid.decode.torchcodec import VideoDecoder

    decoder = VideoDecoder(source, seek_mode=seek, num_ffmpeg_threads=1)
    count = decoder.metadata.num_frames
    assert count is not None
    frames = decoder.get_frames_at(_choose(count)).data
    y, x = _corner(frames.shape[2], frames.shape[3])
    return frames[:, :, y : y + CROP, x : x + CROP].transpose(0, 1).contiguous()


def decord_frames(source: Any) -> Tensor:
    """Decode random frames and a random crop of a video by decord, uint8 [3, T, H, W]."""
    import decord

    reader = decord.VideoReader(source, ctx=decord.cpu(0), num_threads=1)
    frames = reader.get_batch(_choose(len(reader))).asnumpy()
    y, x = _corner(frames.shape[1], frames.shape[2])
    return torch.from_numpy(np.ascontiguousarray(frames[:, y : y + CROP, x : x + CROP].transpose(3, 0, 1, 2)))


class FilesDataset(torch.utils.data.Dataset[Tensor]):
    """Video files, repeated up to `length` items."""

    def __init__(self, files: tuple[str, ...], read: Callable[[Any], Tensor], length: int) -> None:
        self.files, self.read, self.length = files, read, length

    def __len__(self) -> int:
        return self.length

    def __getitem__(self, index: int) -> Tensor:
        return self.read(self.files[index % len(self.files)])


_EPOCH: Final = 1 << 20


def data_loader(inputs: PipelineInputs, *, read: str, prefetch: int = 2) -> Batches:
    """Yield batches of torch's DataLoader over files."""
    dataset = FilesDataset(inputs.files, {"torchcodec": torchcodec_frames, "decord": decord_frames}[read], _EPOCH)
    loader = torch.utils.data.DataLoader(
        dataset,
        batch_size=inputs.batch,
        shuffle=True,
        num_workers=inputs.workers,
        prefetch_factor=prefetch,
        worker_init_fn=_single_threaded,
        multiprocessing_context="spawn",
    )
    for batch in loader:
        yield normalize(batch)


def webdataset_loader(inputs: PipelineInputs, *, prefetch: int = 2) -> Batches:
    """Yield batches of webdataset over the same tars, decoded by torchcodec."""
    import webdataset

    dataset = (
        webdataset.WebDataset(list(inputs.tars), shardshuffle=False, empty_check=False, nodesplitter=None)
        .repeat()
        .shuffle(64)
        .to_tuple("mp4")
        .map(_first)
        .map(torchcodec_frames)
        .batched(inputs.batch, collation_fn=torch.stack)
    )
    loader = webdataset.WebLoader(
        dataset,
        batch_size=None,
        num_workers=min(inputs.workers, len(inputs.tars)),
        prefetch_factor=prefetch,
        worker_init_fn=_single_threaded,
    )
    for batch in loader:
        yield normalize(batch)


def streaming_loader(inputs: PipelineInputs, *, prefetch: int = 2) -> Batches:
    """Yield batches of mosaicml-streaming with the same MP4s, decoded by torchcodec."""
    from streaming import MDSWriter, StreamingDataset

    folder = Path(inputs.folder) / "mds"
    if not (folder / "index.json").exists():
        with MDSWriter(out=str(folder), columns={"mp4": "bytes"}) as out:
            for file in inputs.files:
                out.write({"mp4": Path(file).read_bytes()})

    dataset = StreamingDataset(local=str(folder), shuffle=True, batch_size=inputs.batch, epoch_size=str(_EPOCH))
    loader = torch.utils.data.DataLoader(
        dataset,
        batch_size=inputs.batch,
        num_workers=inputs.workers,
        prefetch_factor=prefetch,
        collate_fn=_decoded,
        worker_init_fn=_single_threaded,
    )
    for batch in loader:
        yield normalize(batch)


def _decoded(samples: list[dict[str, bytes]]) -> Tensor:
    return torch.stack([torchcodec_frames(sample["mp4"]) for sample in samples])


def spdl_loader(inputs: PipelineInputs, *, prefetch: int = 2) -> Batches:
    """Yield batches of SPDL's thread pipeline: demux, decode, convert and crop, with as many threads as workers."""
    from spdl.pipeline import PipelineBuilder

    spdl = spdl_io()

    def source() -> Iterator[str]:
        while True:
            for place in np.random.permutation(len(inputs.files)).tolist():
                yield inputs.files[place]

    def clip(file: str) -> Tensor:
        packets = spdl.demux_video(file)
        # SPDL rejects repeated frames and would drop the clip.
        wanted, places = np.unique(_choose(len(packets)), return_inverse=True)
        # Decodes each needed GOP up to the wanted frame, as SPDL's documentation recommends.
        frames = spdl.sample_decode_video(packets, wanted.tolist(), filter_desc="format=pix_fmts=rgb24")
        array = torch.from_numpy(spdl.to_numpy(spdl.convert_frames(frames)))
        y, x = _corner(array.shape[1], array.shape[2])
        return array[torch.from_numpy(places), y : y + CROP, x : x + CROP].permute(3, 0, 1, 2).contiguous()

    pipeline = (
        PipelineBuilder()
        .add_source(source())
        .pipe(clip, concurrency=inputs.workers)
        .aggregate(inputs.batch)
        .pipe(lambda clips: normalize(torch.stack(clips)))
        .add_sink(prefetch)
        .build(num_threads=inputs.workers + 1)
    )
    with pipeline.auto_stop():
        yield from pipeline


PIPELINES: Final[Mapping[str, tuple[Callable[..., Batches], tuple[Mapping[str, Any], ...]]]] = {
    "DataLoader + torchcodec": (data_loader, ({"read": "torchcodec"}, {"read": "torchcodec", "prefetch": 4})),
    "DataLoader + decord": (data_loader, ({"read": "decord"}, {"read": "decord", "prefetch": 4})),
    "webdataset + torchcodec": (webdataset_loader, ({}, {"prefetch": 4})),
    "mosaicml-streaming + torchcodec": (streaming_loader, ({}, {"prefetch": 4})),
    "SPDL": (spdl_loader, ({}, {"prefetch": 4})),
}
"""Rivals, each with the settings to sweep in addition to the number of workers."""

NEEDS: Final = {
    "DataLoader + torchcodec": "torchcodec",
    "DataLoader + decord": "decord",
    "webdataset + torchcodec": "webdataset",
    "mosaicml-streaming + torchcodec": "streaming",
    "SPDL": "spdl.io",
}


def missing(name: str) -> str | None:
    """Return why a rival cannot run here, or None."""
    try:
        importlib.import_module(NEEDS[name])
    except (ImportError, OSError, RuntimeError) as error:
        return f"{type(error).__name__}: {str(error).splitlines()[0] if str(error) else ''}"
    return None


def normalize(batch: Tensor) -> Tensor:
    """Normalise uint8 [B, 3, T, H, W] to float32 in two in-place passes, torch's fastest way."""
    return batch.to(torch.float32).mul_(_SCALE).add_(_BIAS)


def _first(sample: tuple[bytes, ...]) -> bytes:
    return sample[0]


def _choose(count: int) -> list[int]:
    """Return one random frame of each of FRAMES segments."""
    edges = np.linspace(0, count, FRAMES + 1)
    places = edges[:-1] + np.random.random(FRAMES) * np.diff(edges)
    return [min(int(place), count - 1) for place in places]


def _corner(height: int, width: int) -> tuple[int, int]:
    return np.random.randint(0, height - CROP + 1), np.random.randint(0, width - CROP + 1)


def _single_threaded(_worker: int) -> None:
    torch.set_num_threads(1)
