"""A run on real clips of 48 pixels: its configuration, its dataset, and its recipe."""

from itertools import pairwise

from fastvid.train import CenterCrop, Config, DataConfig, ModelConfig, OptimConfig, RandomCrop, RunConfig, Segments
from tests import datasets

RECIPE = """
from tests.train import small

def recipe():
    optim = {{"warmup_epochs": 0.5, "decay": "cosine"}}
    return small.config({data!r}, {out!r}, optim=optim, run={{"checkpoint_every_s": 0.0}})
"""


def config(path, out, *, options=(), optim=(), run=(), **data):
    """Return the configuration of a run of two epochs; further arguments change its sections."""
    return Config(
        data=DataConfig(
            path=str(path), frames=Segments(2), eval_frames=Segments(2, jitter=False), spatial=(RandomCrop(32),),
            eval_spatial=(CenterCrop(32),), **{"global_batch_size": 4, "eval_batch_size": 4, "num_threads": 1} | data,
        ),
        model=ModelConfig(name="tsm-r18", options={"width": 8, "dropout": 0.2} | dict(options)),
        optim=OptimConfig(**{"base_lr": 0.02, "base_batch_size": 4} | dict(optim)),
        run=RunConfig(out=str(out), **{"epochs": 2, "log_every_steps": 1, "timeout_s": 60.0} | dict(run)),
    )  # fmt: skip


def pack(folder, train, held_out, *ends, kinds=4, size="48x48", name="shards", **columns):
    """Write a dataset of two classes, in shards that end before these samples; its clips are of several lengths."""
    clips = [datasets.make_clip(folder / f"{n}.mp4", frames=8 + n, size=size) for n in range(kinds)]
    count = train + held_out
    samples = [(f"clip{n:02d}", clips[n % kinds], n % 2) for n in range(count)]
    columns = {"split": ["train"] * train + ["val"] * held_out, **columns}
    shards = [samples[first:end] for first, end in pairwise((0, *ends, count))]
    datasets.pack(folder / name, shards, columns=columns)
