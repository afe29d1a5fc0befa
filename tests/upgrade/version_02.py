"""What version 0.2 wrote, and how its code makes loaders: all arguments are where 0.2 had them.

``PYTHONPATH=CHECKOUT_OF_0.2 python tests/upgrade/version_02.py tests/upgrade/version_02.tar.xz`` writes it anew, with
the last commit of 0.2, 1ac67bd5.
"""

import contextlib
import io
import json
import os
import shutil
import subprocess
import sys
import tarfile
import tempfile
import zlib
from pathlib import Path

import torch

import fastvid
from fastvid.cli.main import main as fastvid_command

RECIPE = """
import torch
from fastvid.train import CenterCrop, Config, DataConfig, ModelConfig, OptimConfig, RandomCrop, RunConfig, Segments

def small(num_classes):
    torch.manual_seed(0)
    return torch.nn.Sequential(torch.nn.AdaptiveAvgPool3d(2), torch.nn.Flatten(), torch.nn.Linear(24, num_classes))

def recipe():
    return Config(
        data=DataConfig(
            path="encoded", split="train", eval_split="val", frames=Segments(2), eval_frames=Segments(2, jitter=False),
            spatial=(RandomCrop(32),), eval_spatial=(CenterCrop(32),), global_batch_size=2, num_threads=1,
        ),
        model=ModelConfig(name="recipe:small"),
        optim=OptimConfig(base_lr=0.02, base_batch_size=2, decay="constant"),
        run=RunConfig(out="run", epochs=1, log_every_steps=1),
    )
"""


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


def _film(path, number, *options):
    from fastvid.media.ffmpeg import find_ffmpeg

    path.parent.mkdir(parents=True, exist_ok=True)
    source = f"testsrc2=s=64x48:r=25:d={(8 + number) / 25},hue=h={number * 37}"
    words = [find_ffmpeg().path, "-v", "error", "-f", "lavfi", "-i", source, "-c:v", "libx264", "-preset", "ultrafast"]
    subprocess.run([*words, "-g", "8", "-pix_fmt", "yuv420p", *options, "-y", str(path)], check=True)


def write(folder):
    """Write datasets, states and a run, and what 0.2 makes of them."""
    os.chdir(folder)
    sys.path.insert(0, str(folder))  # for the model of the recipe
    for number in range(8):
        _film(Path("raw", "ab"[number % 2], f"{number}.mp4"), number)
    _film(Path("videos/plain.mp4"), 5)
    _film(Path("straight.mp4"), 6)
    from fastvid.media.ffmpeg import find_ffmpeg

    turn = ["-display_rotation:v:0", "90", "-i", "straight.mp4", "-c", "copy", "videos/turned.mp4"]
    subprocess.run([find_ffmpeg().path, "-v", "error", *turn], check=True)
    with tarfile.open("foreign.tar", "w") as tar:
        for number, name in enumerate(("plain", "turned")):
            tar.add(f"videos/{name}.mp4", f"{number:05d}.mp4")
    run("shard", "raw", "--out", "encoded", "--short-side", "48")
    table = "key,split,caption\n" + "".join(f"{'ab'[n % 2]}/{n},{'train' if n else 'val'},film {n}\n" for n in range(8))
    Path("table.csv").write_text(table)
    run("tag", "encoded", "paper")
    run("relabel", "encoded", "--from", "table.csv")
    run("index", "videos", "--out", "in place")
    Path("tars").mkdir()
    Path("foreign.tar").rename("tars/00000.tar")
    run("index", "tars")
    Path("recipe.py").write_text(RECIPE)
    run("train", "recipe.py")
    shutil.copytree("run", "longer")
    run("train", "recipe.py", "run.out=longer", "run.epochs=2")
    trained = [json.loads(line) for line in Path("longer/metrics.jsonl").read_text().splitlines()]
    told = {"pictures": {name: pictures(dataset) for name, dataset in datasets(folder).items()}, "loaders": {}}
    told["losses"] = [row["loss"] for row in trained if row["kind"] == "train"]
    for name, loader in loaders(folder).items():
        next(iter(loader))
        state = json.loads(json.dumps(loader.state_dict()))
        told["loaders"][name] = {"state": state, "clips": clips(loader)}
    Path("told.json").write_text(json.dumps(told))


if __name__ == "__main__":
    assert fastvid.__version__ == "0.2.0"
    archive = Path(sys.argv[1]).absolute()
    with tempfile.TemporaryDirectory() as folder:
        write(Path(folder))
        with tarfile.open(archive, "w:xz") as tar:
            for name in ("encoded", "in place", "videos", "tars", "run", "recipe.py", "told.json"):
                tar.add(name)
