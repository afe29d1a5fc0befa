"""How the code of version 0.2 makes loaders, with all arguments where 0.2 had them, and what it delivers.

``version_02.tar.xz`` has what 0.2 (1ac67bd5) wrote, and in told.json what it delivered of that, by these functions.
"""

import contextlib
import io
import zlib

import torch

import fastvid
from fastvid.cli.main import main as fastvid_command


def datasets(folder):
    """The datasets by name; what is in place is in `folder`, wherever 0.2 had it."""
    places = {"in place": str(folder / "videos")}
    return {name: fastvid.open(folder / name, root=places.get(name)) for name in ("encoded", "in place", "tars")}


def loaders(folder):
    """Loaders by name, with the arguments of 0.2."""
    found = datasets(folder)
    encoded = fastvid.open(folder / "encoded", split="train", where="num_frames > 9")
    common = {"spatial": fastvid.RandomCrop(32), "decoder": "pyav"}
    common |= {"output": fastvid.Output(dtype=torch.uint8), "workers": fastvid.Workers(num_threads=1)}
    one, two = common | {"global_batch_size": 1}, common | {"global_batch_size": 2}
    window, paced = fastvid.Window(seconds=0.2, fps=10), fastvid.AtFps(5, max_frames=3)
    buckets = fastvid.Buckets([(2, 32, 32)], per_batch=1)
    mixture = fastvid.Mixture([found["encoded"], found["tars"]], weights=(3, 1), num_samples=16)
    crops = (fastvid.RandomResizedCrop(32), fastvid.HorizontalFlip())
    loader = fastvid.ClipLoader
    return {
        "segments": loader(encoded, frames=fastvid.Segments(3), **two, fields=("caption",), seed=5),
        "dense": loader(
            found["encoded"], frames=fastvid.Dense(4, 2), **two | {"spatial": crops}, balance=fastvid.ClassBalanced()
        ),
        "in order": loader(
            found["encoded"], frames=fastvid.Uniform(2), **two, shuffle=False, last="keep", collate="list"
        ),
        "seconds": loader(found["encoded"], frames=window, **two, clips_per_video=2, shuffle=fastvid.BlockShuffle(4)),
        "mixture": loader(mixture, frames=fastvid.Uniform(2), **two),
        "buckets": loader(found["encoded"], frames=window, **common, batches=buckets),
        "in place": loader(found["in place"], frames=fastvid.Segments(3), **one),
        "in place, paced": loader(found["in place"], frames=paced, **one),
        "paced buckets": loader(found["encoded"], frames=paced, **common, batches=buckets),
    }


def clips(loader):
    """Key, frames and digest of the pixels of each clip of the rest of the epoch."""
    return [
        [key, frames.tolist(), zlib.crc32(video.contiguous().numpy().tobytes())]
        for batch in loader
        for key, frames, video in zip(batch.key, batch.frame_index, batch.video, strict=True)
    ]


def pictures(dataset):
    """Shape and digest of all frames of each sample."""
    found = {}
    for key in dataset.keys.to_pylist():
        frames = dataset[key].frames(range(len(dataset[key]))).data
        found[key] = [list(frames.shape), zlib.crc32(frames.tobytes())]
    return found


def run(*words):
    """Run a command of fastvid, and return what it prints."""
    with contextlib.redirect_stdout(io.StringIO()) as printed:
        assert fastvid_command([str(word) for word in words]) == 0, words
    return printed.getvalue()
