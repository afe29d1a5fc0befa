"""Whole loading pipelines, all with the same output: batches of uint8 [B, 3, T, H, W] on the host, for a device.

Each pipeline draws its own samples, frames (one from each of T segments) and crops, reads and decodes them, and yields
batches endlessly. Rivals follow their documentation.
"""

from __future__ import annotations

import importlib
import itertools
import math
import queue
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache, partial
from operator import itemgetter
from pathlib import Path
from typing import Any, Final, NamedTuple

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import interpolate

from bench.common.linked import prepare, video_decoder
from bench.decode.rivals import KEPT, OpenDecoders, spdl_io
from bench.decode.tiles import Cropped
from fastvid.errors import JobError
from fastvid.load.workers.clip_worker import FETCH_CLIPS
from fastvid.tune.measure import FastvidRunner

CROP: Final = 224
FRAMES: Final = 8


def torchcodec_frames(source: Any, crop: str = "RandomCrop", seek: str = "approximate", kept: int = 0) -> Tensor:
    """Decode random frames and a random crop of a video by torchcodec, uint8 [3, T, H, W].

    `source`: path or bytes.
    """
    decoder = _torchcodec_decoders(seek, kept)[source]
    count = decoder.metadata.num_frames
    frames = decoder.get_frames_at(choose(count)).data
    y, x, height, width = region(frames.shape[2], frames.shape[3], crop)
    shown = frames[:, :, y : y + height, x : x + width]
    if (height, width) != (CROP, CROP):
        shown = interpolate(shown, (CROP, CROP), mode="bilinear", antialias=True)
    return shown.transpose(0, 1).contiguous()


@cache
def _torchcodec_decoders(seek: str, kept: int) -> OpenDecoders:
    decoder = video_decoder()
    return OpenDecoders(lambda source: decoder(source, seek_mode=seek, num_ffmpeg_threads=1), kept)


def spdl_frames(spdl: Any, crop: str, file: str) -> Tensor:
    """Decode random frames of a video by SPDL, cropped at random by FFmpeg's filter, uint8 [3, T, H, W]."""
    packets = spdl.demux_video(file)
    # SPDL rejects repeated frames and would drop the clip.
    wanted, places = np.unique(choose(len(packets)), return_inverse=True)
    y, x, height, width = region(packets.height, packets.width, crop)
    steps = f"crop={width}:{height}:{x}:{y},scale={CROP}:{CROP},format=pix_fmts=rgb24"
    # Decodes each needed GOP up to the wanted frame, as SPDL's documentation recommends.
    frames = spdl.sample_decode_video(packets, wanted.tolist(), filter_desc=steps)
    array = torch.from_numpy(spdl.to_numpy(spdl.convert_frames(frames)))
    return array[torch.from_numpy(places)].permute(3, 0, 1, 2).contiguous()


def choose(count: int) -> list[int]:
    """Return one random frame of each of FRAMES segments."""
    edges = np.linspace(0, count, FRAMES + 1)
    places = edges[:-1] + np.random.random(FRAMES) * np.diff(edges)
    return [min(int(place), count - 1) for place in places]


def region(height: int, width: int, crop: str) -> tuple[int, int, int, int]:
    """Return the row, column, height and width of a random crop, drawn as torchvision's class of that name does."""
    rows = columns = CROP
    while crop == "RandomResizedCrop":
        side = math.sqrt(height * width * np.random.uniform(0.08, 1))
        stretch = math.sqrt(math.exp(np.random.uniform(math.log(3 / 4), math.log(4 / 3))))
        rows, columns = round(side / stretch), round(side * stretch)
        if rows <= height and columns <= width:
            break
    return np.random.randint(0, height - rows + 1), np.random.randint(0, width - columns + 1), rows, columns


@dataclass(frozen=True)
class PipelineInputs:
    """Inputs of every pipeline."""

    url: str
    files: tuple[str, ...]
    tars: tuple[str, ...]
    folder: str
    batch: int
    workers: int
    crop: str

    def loading(self, prefetch: int, **options: Any) -> dict[str, Any]:
        """Return the arguments of a DataLoader with worker processes."""
        workers = {"num_workers": self.workers, "prefetch_factor": prefetch, "worker_init_fn": _single_threaded}
        return {"batch_size": self.batch, **workers, **options}

    def decoded(self, samples: list[dict[str, bytes]]) -> Tensor:
        """Decode samples to a batch."""
        return torch.stack([torchcodec_frames(sample["mp4"], self.crop) for sample in samples])


Batches = Iterator[Tensor]


def fastvid_loader(inputs: PipelineInputs, *, workers: str = "thread", epoch: int | None = None) -> Batches:
    """Yield batches of fastvid. As for the rivals, the few videos are repeated to form a long epoch."""
    import fastvid

    loader = fastvid.ClipLoader(
        fastvid.Mixture([fastvid.open(inputs.url)], weights=[1.0], num_samples=epoch or _EPOCH),
        frames=fastvid.Segments(FRAMES),
        spatial=getattr(fastvid, inputs.crop)(CROP),
        global_batch_size=inputs.batch if epoch is None else epoch // 2,
        workers=fastvid.Workers(workers, num_threads=inputs.workers, decoder="pyav"),  # type: ignore[arg-type]
        last="drop",
        rank=0,
        world_size=1,
        output=fastvid.Output(dtype=torch.uint8),
    )
    while True:
        for batch in loader:
            yield batch.video


def decoder_alone(inputs: PipelineInputs) -> Batches:
    """Decode as `python -m bench decode` does, on as many threads, and discard the RGB. Yields the same zero batch each
    time that a batch of clips has been decoded."""
    corpus = Cropped(inputs.url, "tsn8", shown=inputs.crop)
    jobs = [FastvidRunner(corpus, "rgb", "disk") for _ in range(inputs.workers)]
    count = len(corpus.requests)
    turns = itertools.count(step=FETCH_CLIPS)
    decoded: queue.Queue[None] = queue.Queue(2 * inputs.batch)

    def decode(job: FastvidRunner) -> None:
        while True:
            first = next(turns)
            job.run([place % count for place in range(first, first + FETCH_CLIPS)])
            for _ in range(FETCH_CLIPS):
                decoded.put(None)

    for job in jobs:
        threading.Thread(target=decode, args=(job,), daemon=True).start()
    same = torch.zeros(inputs.batch, 3, FRAMES, CROP, CROP, dtype=torch.uint8)
    while True:
        for _ in range(inputs.batch):
            decoded.get()
        yield same


class FilesDataset(torch.utils.data.Dataset[Tensor]):
    """Video files, repeated up to `length` items."""

    def __init__(self, files: tuple[str, ...], read: Callable[[Any], Tensor], length: int) -> None:
        self.files, self.read, self.length = files, read, length

    def __len__(self) -> int:
        return self.length

    def __getitem__(self, index: int) -> Tensor:
        return self.read(self.files[index % len(self.files)])


_EPOCH: Final = 1 << 20
_LITDATA_COPIES: Final = 32  # of 48 videos: more clips than a round of 60 batches of 16 reads


def data_loader(inputs: PipelineInputs, *, prefetch: int = 2, **options: Any) -> Batches:
    """Yield batches of torch's DataLoader over files."""
    dataset = FilesDataset(inputs.files, partial(torchcodec_frames, crop=inputs.crop, **options), _EPOCH)
    workers = inputs.loading(prefetch, shuffle=True)
    yield from torch.utils.data.DataLoader(dataset, multiprocessing_context="spawn", **workers)


def webdataset_loader(inputs: PipelineInputs, *, prefetch: int = 2) -> Batches:
    """Yield batches of webdataset over the same tars, decoded by torchcodec."""
    import webdataset

    dataset = (
        webdataset.WebDataset(list(inputs.tars), shardshuffle=False, empty_check=False, nodesplitter=None)
        .repeat()
        .shuffle(64)
        .map(itemgetter("mp4"))
        .map(partial(torchcodec_frames, crop=inputs.crop))
        .batched(inputs.batch, collation_fn=torch.stack)
    )
    yield from webdataset.WebLoader(
        dataset,
        batch_size=None,
        num_workers=min(inputs.workers, len(inputs.tars)),
        prefetch_factor=prefetch,
        worker_init_fn=_single_threaded,
    )


def streaming_loader(inputs: PipelineInputs, *, prefetch: int = 2) -> Batches:
    """Yield batches of mosaicml-streaming with the same MP4s, decoded by torchcodec."""
    from streaming import MDSWriter, StreamingDataset

    folder = Path(inputs.folder) / "mds"
    if not (folder / "index.json").exists():
        with MDSWriter(out=str(folder), columns={"mp4": "bytes"}) as out:
            for file in inputs.files:
                out.write({"mp4": Path(file).read_bytes()})

    dataset = StreamingDataset(local=str(folder), shuffle=True, batch_size=inputs.batch, epoch_size=str(_EPOCH))
    yield from torch.utils.data.DataLoader(dataset, **inputs.loading(prefetch, collate_fn=inputs.decoded))


def litdata_loader(inputs: PipelineInputs, *, prefetch: int = 2) -> Batches:
    """Yield batches of litdata with the same MP4s, decoded by torchcodec.

    Each is stored many times, because its workers start anew with each epoch, which few videos would make short.
    """
    import litdata

    folder = Path(inputs.folder) / f"litdata-{_LITDATA_COPIES}"
    if not (folder / "index.json").exists():
        options: dict[str, Any] = {"chunk_bytes": "8MB", "num_workers": 1, "start_method": "spawn"}
        litdata.optimize(_bytes_of, list(inputs.files) * _LITDATA_COPIES, str(folder), **options)
    dataset = litdata.StreamingDataset(str(folder), shuffle=True, drop_last=True)
    loader = litdata.StreamingDataLoader(dataset, **inputs.loading(prefetch, collate_fn=inputs.decoded, drop_last=True))
    while True:
        yield from loader


def _bytes_of(file: str) -> dict[str, bytes]:
    return {"mp4": Path(file).read_bytes()}


def spdl_loader(inputs: PipelineInputs, *, prefetch: int = 2) -> Batches:
    """Yield batches of SPDL's thread pipeline: demux, decode, convert and crop, with as many threads as workers."""
    from spdl.pipeline import PipelineBuilder

    spdl = spdl_io()

    def source() -> Iterator[str]:
        while True:
            for place in np.random.permutation(len(inputs.files)).tolist():
                yield inputs.files[place]

    pipeline = (
        PipelineBuilder()
        .add_source(source())
        .pipe(partial(spdl_frames, spdl, inputs.crop), concurrency=inputs.workers)
        .aggregate(inputs.batch)
        .pipe(torch.stack)
        .add_sink(prefetch)
        .build(num_threads=inputs.workers + 1)
    )
    with pipeline.auto_stop():
        yield from pipeline


_READS: Final = ({"prefetch": 2}, {"prefetch": 4})
_SEEKS: Final = tuple({"seek": seek} | one for seek in ("approximate", "exact") for one in _READS)


class Way(NamedTuple):
    """A rival: what starts it, the settings to sweep beside the number of workers, and its libraries in `NEWEST`."""

    start: Callable[..., Batches]
    settings: Sequence[Mapping[str, Any]]
    needs: tuple[str, ...]


PIPELINES: Final[Mapping[str, Way]] = {
    "DataLoader + torchcodec": Way(data_loader, _SEEKS, ("torchcodec",)),
    "DataLoader + torchcodec kept open": Way(partial(data_loader, kept=KEPT), _SEEKS, ("torchcodec",)),
    "webdataset + torchcodec": Way(webdataset_loader, _READS, ("webdataset", "torchcodec")),
    "mosaicml-streaming + torchcodec": Way(streaming_loader, _READS, ("streaming", "torchcodec")),
    "litdata + torchcodec": Way(litdata_loader, _READS, ("litdata", "torchcodec")),
    "SPDL": Way(spdl_loader, _READS, ("spdl",)),
}


def check_installed(name: str) -> None:
    """Raise a JobError if a rival cannot run here."""
    try:
        prepare()
        for library in PIPELINES[name].needs:
            importlib.import_module(library)
    except (ImportError, OSError, RuntimeError) as error:
        raise JobError(f"{type(error).__name__}: {(str(error) or ' ').splitlines()[0]}") from error


def _single_threaded(_worker: int) -> None:
    torch.set_num_threads(1)
