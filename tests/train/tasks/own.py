"""Runs of tasks on real clips of four kinds, whose labels and numbers follow from the kind.

Started as ``python -m tests.train.tasks.own FOLDER SCENARIO...`` on every rank. FOLDER/shards is the dataset of `make`.
"""

from functools import partial

import fastvid
from fastvid.train import (
    Classification,
    Config,
    DataConfig,
    ModelConfig,
    MultiLabel,
    OptimConfig,
    Regression,
    RunConfig,
)
from fastvid.train.records import records as metrics
from fastvid.train.run import launch
from tests import datasets
from tests.examples import kit
from tests.train.strategies import lab

TRAIN, HELD_OUT = 24, 8
LABELS = (["jump"], ["wave"], ["jump", "wave"], [])
FILTERS = ("hue=h=0", "hue=h=120", "hue=h=240", "hue=s=0")
TASKS = {
    "classification": Classification(label_smoothing=0.1),
    "multi_label": MultiLabel("actions"),
    "regression": Regression(("angle", "speed"), error="huber"),
    "masks": kit.load("masked_autoencoding").Restore(),
}
OPTIMIZERS = {"regression": ("sgd", 0.1), "masks": ("adam", 0.01)}


def make(folder):
    """Make a dataset of clips of four kinds."""
    kinds = [datasets.make_clip(folder / f"{n}.mp4", size="48x48", filters=FILTERS[n]) for n in range(4)]
    count = TRAIN + HELD_OUT
    columns = {
        "split": ["train"] * TRAIN + ["val"] * HELD_OUT,
        "actions": [LABELS[n % 4] for n in range(count)],
        "angle": [float(n % 4) for n in range(count)],
        "speed": [2.0 - n % 4 % 2 for n in range(count)],
    }
    samples = [(f"clip{n:02d}", kinds[n % 4], n % 4) for n in range(count)]
    classes = ("red", "green", "blue", "grey")
    datasets.pack(folder / "shards", [samples], classes=classes, columns=columns)


def exact(num_classes, num_frames):
    """Return a net in float64: over a hundred steps, rounding to float32 would depend on the number of ranks."""
    net = kit.load("multi_label").Net(num_classes, num_frames).double()
    net.register_forward_pre_hook(lambda _net, clips: tuple(clip.double() for clip in clips))
    return net


def config(folder, name, **run):
    """Return the configuration of a run of a task."""
    clips = {
        "frames": fastvid.Segments(4), "eval_frames": fastvid.Segments(4, jitter=False),
        "spatial": (fastvid.CenterCrop(32),), "eval_spatial": (fastvid.CenterCrop(32),),
    }  # fmt: skip
    own = {"masks": "masked_autoencoding:Net", "regression": "tests.train.tasks.own:exact"}.get(name, "multi_label:Net")
    name_of, rate = OPTIMIZERS.get(name, ("sgd", 0.2))
    return Config(
        data=DataConfig(
            path=str(folder / "shards"), global_batch_size=8, eval_batch_size=4, last="mask", num_threads=1, **clips
        ),
        model=ModelConfig(name=own),
        optim=OptimConfig(name=name_of, base_lr=rate, base_batch_size=8, decay="cosine", clip_norm=1.0),
        run=RunConfig(
            out=str(folder / name),
            timeout_s=60.0,
            **({"epochs": 36 if name == "regression" else 12, "log_every_steps": 1} | run),
        ),
        task=TASKS[name],
    )


def trained(name, folder, member):
    """Train a task, and return its losses and its score."""
    result = launch.run_as(config(folder.parent, name), member)
    rows = metrics.read(folder / metrics.METRICS_FILE) if member.leads else []
    score = None if result.score is None else result.score.as_row()
    return {"losses": [row["loss"] for row in metrics.curve(rows)], "score": score}


SCENARIOS = {name: partial(trained, name) for name in TASKS}

if __name__ == "__main__":
    lab.main(SCENARIOS)
