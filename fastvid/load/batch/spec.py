"""`Spec`: everything that decides the pixels of a loader's batches; its parts, as text, are the fingerprint in a state.

A state is five values from which any loader of the same data can resume: version, fingerprint, seed, epoch and
position. It contains neither the world size nor the batch size. The fingerprint consists of named parts in readable
text, so that an error can say which part of a state does not match the loader.

`VideoSpec` says what the video tensor of a batch is: its rows' shapes, and how rows of different shapes are put
together.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Final, cast

import numpy as np
import numpy.typing as npt
import torch

from fastvid.decode.colours import Layout, Pixels, empty_batch
from fastvid.errors import StateError, UsageError
from fastvid.format.dataset import Dataset
from fastvid.format.schema import AUDIO, FLOW, PICTURES
from fastvid.load.after.chain import AnyTransform, TransformChain
from fastvid.load.batch.labels import IGNORED_LABEL, Extras, MultiHotLabels, SignalRows, TextColumns
from fastvid.load.clips.clip import ClipRules, Crops, Frames, clip_sizes, joined
from fastvid.load.clips.sampling import with_length
from fastvid.load.clips.views import Views, check_views
from fastvid.load.device import LoaderStream
from fastvid.load.options import Collate, Output, Resize
from fastvid.load.order.buckets import Buckets, Planned
from fastvid.load.order.draws import DRAWS_VERSION, BatchDraws, Purpose
from fastvid.load.order.epoch import MASKED, Batches, ClipShape, EpochOrders, EveryFrame, Order
from fastvid.load.order.mixture import Mixture, parts_of
from fastvid.load.order.packed import Packed
from fastvid.runtime.arrays import BoolArray, IntArray
from fastvid.runtime.processes import World
from fastvid.runtime.values import check_kind


@dataclass(frozen=True, eq=False)
class Spec:
    """Everything that decides the batches of a loader besides seed, epoch, position and world."""

    dataset: Dataset | Mixture
    rules: ClipRules
    orders: EpochOrders
    annotations: RowAnnotations
    signals: SignalRows | None = None
    after: TransformChain | None = None
    output: Output = Output()
    batches: Buckets | Packed | None = None

    @classmethod
    def of(
        cls,
        dataset: Dataset | Mixture,
        frames: Frames | None,
        spatial: Crops | None,
        order: Order,
        extras: Extras,
        output: Output,
        *,
        streams: Sequence[str] | str | None = None,
        views: Views | None = None,
        after: Sequence[AnyTransform] = (),
        batches: Buckets | Packed | None = None,
    ) -> Spec:
        """Build from the arguments of a loader."""
        if frames is None or spatial is None:
            lacking, example = ("spatial", "RandomResizedCrop(224)") if frames else ("frames", "Segments(8)")
            raise UsageError(f"{lacking} is missing", hint=f"give for example {lacking}={example}")
        if views is not None:
            check_kind("views", views, Views, use="Views(num_clips, num_crops)")
        rules = ClipRules.of(dataset, frames, spatial, streams, output.flow_stack, views, extras.audio)
        signals = SignalRows.of(dataset, frames, rules.streams, extras.signals, views=views is not None)
        chain = TransformChain.of(after, rules.streams, rules.depth)
        annotations = RowAnnotations(dataset, extras)
        if extras.audio is not None:
            parts = parts_of(dataset)
            without = [part for part in parts if AUDIO not in part.generation.extras]
            # Samples encoded without sound are silent; videos in place may have sound, which is not read.
            if len(without) == len(parts) or any(part.generation.root is not None for part in without):
                what = "the dataset" if len(parts) == 1 else "a part of the mixture"
                hint = "store it by `fastvid shard --audio copy`, or aac"
                raise UsageError(f"no sample of {what} has sound", hint=hint)
        return cls(dataset, rules, EpochOrders(dataset, order), annotations, signals, chain, output, batches)

    def __post_init__(self) -> None:
        rules, collate = self.rules, self.output.collate
        for sampler, crop in rules.pairs if rules.views else ():
            assert rules.views is not None
            sound = rules.audio is not None
            check_views(rules.views, sampler, crop, clips_per_video=self.orders.clips_per_video, audio=sound)
        if self.batches is not None and collate != "stack":
            raise UsageError(f"collate={collate!r} was given with batches=", hint="leave out collate: the plan decides")
        packed = isinstance(self.batches, Packed)
        if (packed or collate != "stack") and (rules.views or FLOW in rules.streams):
            given = "batches=Packed" if packed else f"collate={collate!r}"
            hint = "use collate='stack', and a sampler and a crop of one shape"
            raise UsageError(f"{given} was given with {'views' if rules.views else 'flow'}", hint=hint)

    def fingerprint(self, batching: str = "") -> dict[str, str]:
        """Return everything that determines the clips besides seed, epoch and position, as text by part.

        `batching`: text of `Buckets` or `Packed`; empty for batches of one size.
        """
        rules, sets = self.rules, parts_of(self.dataset)
        parts = {
            "dataset": " + ".join(part.dataset_id for part in sets),
            "generation": " + ".join(str(part.generation.number) for part in sets),
            "split": " + ".join(repr(part.split) for part in sets),
            "filter": " + ".join(f"{part.where!r} {part.selection}".strip() for part in sets),
            _SELECTION: " + ".join(part.identity for part in sets),
            "order": self.orders.text,
            "sampler": f"{rules.sampler_text} {rules.views}" if rules.views else rules.sampler_text,
            "augmentation": f"{DRAWS_VERSION} {joined(rules.spatials)}",
        }
        stack = f" flow_stack={rules.flow_stack}" if FLOW in rules.streams else ""
        # Parts at their defaults are omitted, so that states saved before these arguments existed still load.
        asked = {
            "streams": "" if rules.streams == (PICTURES,) else ",".join(rules.streams) + stack,
            "batches": batching,
            "audio": "" if rules.audio is None else repr(rules.audio),
            "text": "" if self.annotations.text is None else repr(self.annotations.text.text),
            "labels": "" if self.annotations.labels is None else repr(self.annotations.labels.labels),
            "signals": "" if self.signals is None else repr(self.signals.wanted),
            "after": "" if self.after is None else repr(self.after),
            "resize": "" if self.output.resize == "exact" else self.output.resize,
        }
        return {name: _plain(text) for name, text in (parts | asked).items() if text or name in parts}

    def place(self, state: Mapping[str, Any], batching: str = "") -> tuple[int, int, int]:
        """Return the seed, epoch and position of a state; raise StateError if its fingerprint is another."""
        seed, epoch, position, theirs = parse_state(state, self.orders.num_samples)
        own = self.fingerprint(batching)
        if state["version"] < STATE_VERSION:
            self._check_earlier(theirs)
            del own[_SELECTION]
        for part in [*own, *(part for part in theirs if part not in own)]:
            if _plain(theirs.get(part)) != own.get(part):
                raise StateError(
                    f"state was saved with another {part}: {theirs.get(part)}, this loader has {own.get(part)}",
                    hint="use the same arguments and data, as of `fastvid.open(DIR, generation=N)`, or begin an epoch",
                )
        return seed, epoch, position

    def _check_earlier(self, theirs: Mapping[str, Any]) -> None:
        """Raise a StateError for a state of fastvid 0.2 whose clips have other frames now."""
        if "AtFps(" in str(theirs.get("sampler")) and "Buckets(" in str(theirs.get("batches")):
            changed = "AtFps spread the frames of a bucket over the whole video, and now keeps its rate"
        elif any(part.shard(0).is_described for part in parts_of(self.dataset)):
            changed = "the videos were indexed by a later one, for which clips in seconds have other frames"
        else:
            return
        hint = "start at the beginning of an epoch, or finish this one with fastvid 0.2"
        raise StateError(f"state was saved by fastvid 0.2: {changed}", hint=hint)

    def batching(self, world: World, order: Order, size: int | None) -> Batches | Planned:
        """Return how epochs are divided into batches: of one size, or planned from the sizes of all clips."""
        orders, planned, rules = self.orders, self.batches, self.rules
        if planned is None and size is None:
            raise UsageError("global_batch_size is missing", hint="give the clips of a step over all ranks, such as 64")
        if planned is None:
            return Batches.of(orders, cast(int, size), order, world)
        if size is not None or order.group_size != 1:
            told = f"global_batch_size is {size} and group_size {order.group_size} with batches={planned}"
            raise UsageError(told, hint="leave out both: batches= decides the size of each batch")
        if orders.clips_per_video > 1:
            hint = "use global_batch_size: a planned batch may divide the clips of a video"
            raise UsageError(f"clips_per_video is {orders.clips_per_video} with batches={planned}", hint=hint)
        for sampler, spatial in rules.pairs:
            for shape in planned.shapes:
                with_length(sampler, shape[0])
                spatial.of_size(shape[1:])
        return planned.plan(clip_sizes(self.dataset, rules), world, order.last, self.dataset.key)


class RowAnnotations:
    """The entries of batches that come from the annotations."""

    def __init__(self, dataset: Dataset | Mixture, extras: Extras) -> None:
        self.label = dataset.labels  # label of each sample of the dataset, int64 [N], -1 for none
        self.columns = {name: dataset.column(name) for name in extras.fields}
        # Items have the texts and labels of their samples.
        self.items = dataset if isinstance(dataset, EveryFrame) else None
        owner = dataset if self.items is None else self.items.samples
        self.text = None if extras.text is None else TextColumns(extras.text, owner)
        self.labels = None if extras.labels is None else MultiHotLabels(extras.labels, owner)
        self.mixture = dataset if isinstance(dataset, Mixture) else None

    def on_device(self, samples: IntArray, valid: BoolArray) -> dict[str, npt.NDArray[Any]]:
        """Return the entries that belong on the device: label, int64 [B], and if requested labels, float32 [B, C].

        `samples`: sample of each row, int64 [B]; MASKED for padding. `valid`: which rows are not masked, bool
        [B].
        """
        label = np.where(valid, self.label[samples], -1)
        made: dict[str, npt.NDArray[Any]] = {"label": np.where(label < 0, IGNORED_LABEL, label)}
        return made if self.labels is None else made | {"labels": self.labels.rows(self._owners(samples), valid)}

    def on_host(self, samples: IntArray, draws: BatchDraws) -> dict[str, Any]:
        """Return the entries that stay on the host: fields, and text and dataset if there are any.

        `samples`: sample of each row, int64 [B]; MASKED for padding. `draws`: the random numbers of each row.
        """
        rows = _numbered(samples)
        made: dict[str, Any] = {
            "fields": {
                name: tuple(None if row is None else column[row].as_py() for row in rows)
                for name, column in self.columns.items()
            }
        }
        if self.text is not None:
            # Word 0 chooses and word 1 drops, so that drop= does not change which texts are chosen.
            numbers = draws.uniform(Purpose.TEXT, 2).tolist()
            owners = _numbered(self._owners(samples))
            made["text"] = tuple(self.text.row(owner, *drawn) for owner, drawn in zip(owners, numbers, strict=True))
        if self.mixture is not None:
            made["dataset"] = tuple("" if row is None else self.mixture.name_of(row) for row in rows)
        return made

    def _owners(self, samples: IntArray) -> IntArray:
        """Return the sample of each row, int64 [B]; of `EveryFrame` that of the item. MASKED stays."""
        return samples if self.items is None else np.where(samples == MASKED, MASKED, self.items.place(samples)[0])


def _plain(text: Any) -> Any:
    """Return a part of a fingerprint with numpy's numbers as Python writes them, because they mean the same."""
    return _NUMPY.sub(r"\1", text) if isinstance(text, str) else text


def _numbered(samples: IntArray) -> list[int | None]:
    """Return sample numbers as a list, with None for MASKED."""
    return [None if sample == MASKED else sample for sample in samples.tolist()]


STATE_VERSION: Final = 2
"""Version 1, of fastvid 0.2, does not say which samples were selected."""

_SELECTION: Final = "selection"
_NUMPY: Final = re.compile(r"\bnp\.(?:u?int\d+|float64|str_)\(([^()]*)\)")
_KEYS: Final = ("version", "fingerprint", "seed", "epoch", "position")


def parse_state(state: Mapping[str, Any], num_samples: int) -> tuple[int, int, int, Mapping[str, Any]]:
    """Return the seed, epoch, position and fingerprint of a state.

    `num_samples`: samples per epoch.
    """
    missing = [key for key in _KEYS if not isinstance(state, Mapping) or key not in state]
    if missing:
        told = f"it lacks {', '.join(missing)}" if isinstance(state, Mapping) else repr(state)
        raise StateError(f"not a loader state: {told}", hint="pass a ClipLoader's state_dict()")
    if state["version"] not in (1, STATE_VERSION):
        raise StateError(f"loader state has version {state['version']!r}, expected 1 or {STATE_VERSION}")
    theirs = state["fingerprint"]
    if not isinstance(theirs, Mapping):
        raise StateError(f"fingerprint of the state is a {type(theirs).__name__}, expected a mapping of its parts")
    for name, limit in (("seed", 2**64 - 1), ("epoch", 2**64 - 1), ("position", num_samples)):
        value = state[name]
        if not isinstance(value, int) or isinstance(value, bool) or not 0 <= value <= limit:
            raise StateError(f"{name} of the state is {value!r}, expected an integer from 0 to {limit}")
    return state["seed"], state["epoch"], state["position"], theirs


Video = torch.Tensor | list[torch.Tensor]
"""One tensor of all rows, or a list of one tensor a row."""


_SMALLEST: Final = (1, 2, 2)
"""Frames, height and width of a batch that has only masked rows, if nothing else decides them."""


@dataclass(frozen=True, slots=True)
class Shapes:
    """Shapes of a batch's rows, each (T, H, W) in pixels."""

    rows: list[ClipShape]  # shape of each row; zeros for a masked row of a batch whose rows differ
    uniform: ClipShape | None  # the shape of all rows; None if they differ, or are delivered as a list
    padded: ClipShape | None = None  # the shape that rows are padded to; None if they are not padded


_MASKED: Final = (0, 0, 0)


@dataclass(frozen=True)
class VideoSpec:
    """Shape, normalisation and device of a batch's video tensor."""

    shape: ClipShape | None  # frames per clip, height and width in pixels; None if they differ between clips
    layout: Layout
    pixels: Pixels | None  # how values are normalised; None for uint8 levels 0 to 255 as decoded
    stream: LoaderStream
    channels_last: bool = False
    collate: Collate = "stack"  # how rows are put together
    resize: Resize = "exact"  # how decoders on the host resize

    @classmethod
    def of(cls, spec: Spec, stream: LoaderStream) -> VideoSpec:
        """Return the form of a loader's video on the stream's device; for `Packed`, of the clips before patching."""
        output, collate = spec.output, spec.output.collate
        if isinstance(spec.batches, Packed):
            collate = "list"
        pixels = None if output.dtype is torch.uint8 else output.pixels
        form = (output.channels_last, collate, output.resize)
        return cls(spec.rules.shape, output.layout, pixels, stream, *form)

    @property
    def dtype(self) -> torch.dtype:
        """Data type of the batch."""
        return torch.uint8 if self.pixels is None else self.pixels.dtype

    @cached_property
    def channels(self) -> tuple[tuple[float, float], ...] | None:
        """Scale and bias of each channel where rows are normalised on the host; None where levels stay as decoded."""
        on_host = self.stream.device.type == "cpu"
        return tuple(self.pixels.channels()) if self.pixels is not None and on_host else None

    def shapes(self, rows: IntArray, planned: ClipShape | None) -> Shapes:
        """Return the shapes of a batch's rows.

        `rows`: frames, height and width of each, int64 [N, 3], see `Plan.shapes`. `planned`: shape of the largest clip
        of the global batch, of which these are one rank's rows; None if only planned clips tell it.
        """
        whole = self.shape if planned is None else planned
        if self.collate == "stack":
            shapes = dict.fromkeys([whole or _MASKED, *map(tuple, rows.tolist())])
            kinds = [shape for shape in shapes if shape != _MASKED] or [_SMALLEST]
            if len(kinds) > 1:
                raise UsageError(
                    f"clips of a batch have the shapes {', '.join(map(str, kinds))} (frames, height, width)",
                    hint="use collate='pad' or 'list', Buckets, or a sampler and a crop of one shape",
                )
            return Shapes(kinds * len(rows), kinds[0])
        each: list[ClipShape] = [(frames, height, width) for frames, height, width in rows.tolist()]
        if self.collate == "list":
            return Shapes(each, None)
        t, h, w = map(max, zip(*each, whole or _MASKED, strict=True))
        largest = (t, h, w) if t else _SMALLEST
        if whole not in (None, largest):
            told = f"a clip has more frames, rows or columns than counted: {largest}, expected at most {whole}"
            raise UsageError(told, hint="let the sampler's count() and the crop's sizes() return what draw() makes")
        whole = largest
        return Shapes(each, None, whole) if set(each) != {whole} else Shapes(each, whole)

    def arranged(self, levels: torch.Tensor) -> torch.Tensor:
        """Return uint8 levels [B, 3, T, H, W] on the device in the layout and memory format of the batch."""
        if self.layout == "BCTHW" and not self.channels_last:
            return levels
        return self.empty(levels.shape, torch.uint8).copy_(levels if self.layout == "BCTHW" else levels.transpose(1, 2))

    def empty(self, shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
        """Allocate an uninitialised tensor [B, C, T, H, W] in the layout and memory format of the batch."""
        whole = cast("tuple[int, int, int, int, int]", tuple(shape))
        return empty_batch(whole, self.layout, dtype, self.stream.device, channels_last=self.channels_last)

    def collated(self, rows: list[torch.Tensor], shapes: Shapes) -> Video:
        """Return the rows as a list, or as one tensor if `shapes` says that they are padded with zeros.

        `rows`: tensors [3, T, H, W] or [T, 3, H, W], in the layout of the batch.
        """
        if shapes.padded is None:
            return rows
        video = self.empty((len(rows), 3, *shapes.padded), rows[0].dtype).zero_()
        for into, row, (frames, height, width) in zip(video, rows, shapes.rows, strict=True):
            along = into if self.layout == "BCTHW" else into.transpose(0, 1)
            along[:, :frames, :height, :width] = row if self.layout == "BCTHW" else row.transpose(0, 1)
        return video
