"""Writes docs/reference from the docstrings: `python -m tests.docs.reference`.

A page begins with a table of its names, their arguments and the first sentence about each, which can be read in a
clone; what follows is filled in when the site is built. Every public name is on one page, a name that is not public
where people need it: for their own decoders, strategies and storage.
"""

from __future__ import annotations

import importlib
import inspect
import re
from collections.abc import Iterator
from enum import Enum
from pathlib import Path
from typing import Any

import fastvid
import fastvid.errors
import fastvid.train

FOLDER = Path(__file__).parents[2] / "docs" / "reference"

# By page: its title, and by section the names.
PAGES: dict[str, tuple[str, dict[str, str]]] = {
    "datasets": ("Datasets", {
        "Open": """
            fastvid.open fastvid.VideoDataset fastvid.Video fastvid.FrameBatch fastvid.Mixture fastvid.EveryFrame
        """,
        "Make and change": """
            fastvid.shard fastvid.sharding.job.job.JobReport fastvid.sharding.job.index.index_tars
            fastvid.sharding.in_place.index_videos fastvid.sharding.lerobot.jobs.index_lerobot
            fastvid.sharding.job.estimate.estimate_job fastvid.sharding.job.job.transcode_dataset
            fastvid.sharding.sets.split_samples fastvid.sharding.sets.Selection
            fastvid.sharding.sets.make_subset fastvid.sharding.sets.merge_datasets
            fastvid.sharding.change.takedown.take_down fastvid.sharding.job.status.FolderStatus
            fastvid.sharding.verify.verify.verify_dataset
        """,
        "Files": "fastvid.storage.open_storage fastvid.storage.protocol.Storage",
        "Errors": " ".join(sorted(
            f"{'fastvid' if name == 'FastvidError' else 'fastvid.errors'}.{name}"
            for name, found in vars(fastvid.errors).items()
            if isinstance(found, type) and issubclass(found, fastvid.errors.FastvidError)
        )),
    }),
    "loading": ("Loading", {
        "Loaders": """
            fastvid.ClipLoader fastvid.Batch fastvid.Order fastvid.Extras fastvid.Output fastvid.Workers fastvid.Skip
            fastvid.LoaderStats
            fastvid.load.stats.Counters
        """,
        "In another DataLoader": "fastvid.ClipDataset fastvid.ExactSampler",
        "Order and varying shape": "fastvid.BlockShuffle fastvid.ClassBalanced fastvid.Buckets fastvid.Packed",
    }),
    "clips": ("Frames, crops and content", {
        "Frames by number": "fastvid.Segments fastvid.Dense fastvid.Uniform",
        "Frames by time": "fastvid.AtFps fastvid.Window fastvid.Deltas",
        "What a sampler gets": """
            fastvid.load.clips.sampling.Sampler fastvid.VideoInfo fastvid.Draws fastvid.load.order.draws.Purpose
        """,
        "Crops and views": """
            fastvid.RandomResizedCrop fastvid.RandomCrop fastvid.CenterCrop fastvid.MultiScaleCrop
            fastvid.HorizontalFlip fastvid.Resize fastvid.Native fastvid.Views
        """,
        "Transforms on the device": """
            fastvid.ColorJitter fastvid.RandAugment fastvid.Erasing fastvid.GaussianBlur fastvid.Grayscale
            fastvid.load.after.transform.ClipTransform fastvid.load.after.transform.TransformDraws
            fastvid.load.after.transform.column
        """,
        "Sound and text": "fastvid.Audio fastvid.decode.sound.AudioClip fastvid.Text fastvid.MultiHot",
    }),
    "training": ("Training", {
        "Run": """
            fastvid.train.fit fastvid.train.Result fastvid.train.run.scoring.predict fastvid.train.config.config.load
        """,
        "Configure": """
            fastvid.train.Config fastvid.train.DataConfig fastvid.train.DatasetConfig fastvid.train.ModelConfig
            fastvid.train.OptimConfig fastvid.train.RunConfig fastvid.train.ShardConfig
        """,
        "Tasks": """
            fastvid.train.Task fastvid.train.Phase fastvid.train.Classification fastvid.train.MultiLabel
            fastvid.train.Regression
        """,
        "Watch": "fastvid.train.Callback fastvid.train.Logger fastvid.train.RunInfo",
        "Strategies": """
            fastvid.train.Strategy fastvid.train.Round fastvid.train.strategies.link.shared_store
            fastvid.train.strategies.link.Listener fastvid.train.strategies.link.open_link
            fastvid.train.strategies.link.Link fastvid.train.strategies.link.Message
        """,
        "Built-in strategies": """
            fastvid.train.strategies.ddp.Ddp fastvid.train.strategies.kavg.Kavg
            fastvid.train.strategies.asgd.strategy.Asgd fastvid.train.strategies.relay.sweep.Relay
        """,
        "Models and weights": """
            fastvid.models.zoo.names fastvid.models.zoo.build fastvid.models.weights.load_weights
            fastvid.models.weights.read_state_dict fastvid.train.records.checkpoint.Checkpoints
            fastvid.train.records.checkpoint.decode
        """,
    }),
    "decoding": ("Decoding", {
        "A back-end": """
            fastvid.decode.backends.Backend fastvid.decode.backends.backend
            fastvid.decode.request.Decoder
        """,
        "What it is given": """
            fastvid.decode.request.ClipRequest fastvid.decode.request.EncodedClip fastvid.decode.request.Box
        """,
        "What it writes": """
            fastvid.decode.request.Rgb fastvid.decode.request.Planes fastvid.decode.request.Levels
            fastvid.decode.request.DeviceRgb fastvid.decode.request.DevicePlanes
        """,
        "Packets": """
            fastvid.format.packets.StreamInfo fastvid.format.packets.PacketTable fastvid.format.packets.PacketPlan
        """,
    }),
}  # fmt: skip
NOTE = "<!-- written by `python -m tests.docs.reference` -->"
INTRO = """\
All names below can be imported from `fastvid` or `fastvid.train`; `import fastvid` alone loads neither torch nor a
decoder. Recipes, tasks and strategies import everything that they need from `fastvid.train`, also samplers, crops and
transforms. `fastvid.__version__` is the version, a string.
"""


def public() -> Iterator[tuple[str, Any]]:
    """Yield each public name and what it is, under the first module that exports it."""
    for module in (fastvid, fastvid.train):
        for name in module.__all__:
            if name != "__version__" and (module is fastvid or name not in fastvid.__all__):
                yield f"{module.__name__}.{name}", getattr(module, name)


def found(name: str) -> Any:
    """Return what a dotted name stands for."""
    module, _, last = name.rpartition(".")
    return getattr(importlib.import_module(module), last)


def names() -> set[str]:
    """Return every name on a page."""
    return {name for _, sections in PAGES.values() for text in sections.values() for name in text.split()}


def homes(name: str) -> list[Any]:
    """Return what a name stands for, and the classes of fastvid that it inherits from."""
    kind = found(name)
    return [one for one in getattr(kind, "__mro__", [kind]) if getattr(one, "__module__", "").startswith("fastvid")]


def sentence(name: str) -> str:
    """Return the first sentence of a docstring, for a cell of a table."""
    text = inspect.getdoc(found(name))
    assert text, f"{name} has no docstring"
    first = re.split(r"(?<=\.)\s+(?=[A-Z`])", " ".join(text.split("\n\n")[0].split()), maxsplit=1)[0]
    return first.removesuffix(":").replace("|", "\\|").replace("``", "`")


def arguments(name: str) -> str:
    """Return the names of the arguments of a function, or of a class that users make."""
    kind = found(name)
    if isinstance(kind, type) and (issubclass(kind, Exception | dict | Enum) or getattr(kind, "_is_protocol", False)):
        return ""
    names = [
        parameter.name
        for parameter in inspect.signature(kind).parameters.values()
        if parameter.kind not in (parameter.VAR_POSITIONAL, parameter.VAR_KEYWORD)
        and not parameter.name.startswith("_")
    ]
    return f"`{', '.join(names)}`" if names else ""


def page(name: str) -> str:
    """Return a page as Markdown."""
    title, sections = PAGES[name]
    exported = {one for one, _ in public()}
    lines = [f"# {title}", "", NOTE, ""]
    for section, names in sections.items():
        lines += [f"| {section} | | arguments |", "|---|---|---|"]
        for one in names.split():
            short = one.rpartition(".")[2] if one in exported else one
            lines.append(f"| `{short}` | {sentence(one)} | {arguments(one)} |")
        lines.append("")
    for section, names in sections.items():
        lines += [f"## {section}", ""]
        for one in names.split():
            lines += [f"::: {one}", "    options:", "      heading_level: 3", ""]
    return "\n".join(lines)


def index() -> str:
    """Return the page of all public names."""
    exported = {name for name, _ in public()}
    lines = ["# Every public name", "", NOTE, "", *INTRO.splitlines(), ""]
    for name, (title, sections) in PAGES.items():
        names = [one for one in " ".join(sections.values()).split() if one in exported]
        lines += [f"## [{title}]({name}.md)", ""]
        lines += ["| name | |", "|---|---|"] if names else ["What a decoder of your own is given and must write."]
        lines += [*(f"| [{one}]({name}.md#{one}) | {sentence(one)} |" for one in names), ""]
    return "\n".join(lines)


def files() -> dict[Path, str]:
    """Return all pages by file."""
    return {FOLDER / "index.md": index()} | {FOLDER / f"{name}.md": page(name) for name in PAGES}


if __name__ == "__main__":
    FOLDER.mkdir(exist_ok=True)
    for file, text in files().items():
        file.write_text(text)
