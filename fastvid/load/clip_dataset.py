"""The clips of a `ClipLoader` as a map-style dataset, for torch's DataLoader and trainers that build on it.

`ClipDataset` returns clips by index. `ExactSampler` yields the indices in the order of a `ClipLoader`: each rank gets
the same clips, and states of the two can be exchanged.
"""

from __future__ import annotations

import itertools
import os
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from typing import Any, Final, NamedTuple, cast

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import Dataset as MapStyle
from torch.utils.data import DistributedSampler, Subset, default_collate, get_worker_info
from torch.utils.data._utils.collate import default_collate_fn_map

from fastvid.decode.backends import Backend
from fastvid.errors import FastvidError, UsageError
from fastvid.format.dataset import Dataset
from fastvid.format.schema import FLOW
from fastvid.load.batch.batch import Batch
from fastvid.load.batch.labels import Extras, entry_of
from fastvid.load.batch.spec import STATE_VERSION, Spec
from fastvid.load.clips.clip import Crops, Frames
from fastvid.load.clips.plan import Plan, Planner, prefetch_threads
from fastvid.load.device import LoaderStream, resolve
from fastvid.load.options import Output, Workers, with_moved
from fastvid.load.order.draws import resolve_subset
from fastvid.load.order.epoch import MASKED, Batches, EpochOrders, Order, Share
from fastvid.load.order.mixture import Mixture
from fastvid.load.stats import Counters
from fastvid.load.trainers import check_use
from fastvid.load.workers.clip_worker import Row, Watched, fetch_rows
from fastvid.load.workers.lanes import Decoders, choose_backends
from fastvid.runtime.processes import World
from fastvid.runtime.values import check_choice, check_integer


class SampleVisit(NamedTuple):
    """A sample at one position of an epoch: what an `ExactSampler` yields in place of an index. It decides the clip."""

    sample: int  # index in the dataset
    position: int  # in the epoch
    seed: int
    epoch: int
    start: int  # first position of its global batch
    stop: int  # one past the last position of its global batch


class ClipRow(dict[str, Any]):
    """One clip: the entries of a `Batch` without the first axis. torch's `default_collate` makes a `Batch` of rows."""


class ClipDataset(MapStyle[ClipRow]):
    """Map-style dataset of clips: ``clips[i]`` is a dict with the clip of sample i.

    For code that has a DataLoader of its own; `ClipLoader` needs none and starts sooner. With an `ExactSampler` the
    clips are those of a `ClipLoader`, bit for bit. An integer index is a position of an unshuffled epoch, whose number
    `set_epoch` sets: unless it is called, other samplers yield the same frames and crops in every epoch. A negative
    index counts from the end.

    A DataLoader asks for a whole batch in one call, which is planned at once, reads remote storage concurrently, and
    decodes a sample's packets once for all its clips. Its default ``collate_fn`` makes a `Batch`. It works in worker
    processes started by fork, forkserver and spawn; each opens a decoder of its own. A damaged clip is an error.

    Args:
        dataset: The samples; a `Mixture` for several datasets.
        frames: The frame sampler.
        spatial: One crop and at most one flip.
        seed: Determines frames and crops, 0 <= seed < 2**64; the order too if an `ExactSampler` is used.
        streams: Video streams of each sample, see `ClipLoader`.
        extras: Texts, labels, columns and signals of the row; no sound.
        decoder: Name of a back-end that decodes on the CPU, or a `Backend`.
        output: The form of the video tensors; clips are collated by the DataLoader.
        **moved: Any field of `extras` and `output`, as version 0.2 had them.

    Raises:
        UsageError: If an argument is invalid.
        MissingDependency: If the decoder cannot run here.
    """

    def __init__(
        self,
        dataset: Dataset | Mixture | Subset[Any],
        *,
        frames: Frames | None = None,
        spatial: Crops | None = None,
        seed: int = 0,
        streams: Sequence[str] | str | None = None,
        extras: Extras = Extras(),
        decoder: str | Backend = "pyav",
        output: Output = Output(),
        **moved: Any,
    ) -> None:
        self.dataset, self.decoder = resolve_subset(dataset), decoder
        extras, output = with_moved("ClipDataset", {"extras": extras, "output": output}, moved)
        if extras.audio is not None:
            raise UsageError("a ClipDataset has no sound", hint="use a ClipLoader for audio=")
        output = replace(output, collate="stack")
        # Orders with shares are always random; this one is never used, since the sampler has its own.
        order = Order(shuffle=isinstance(self.dataset, Mixture) and self.dataset.weights is not None)
        spec = Spec.of(self.dataset, frames, spatial, order, extras, output, streams=streams)
        varies = spec.rules.shape is None and FLOW not in spec.rules.streams
        self.spec = replace(spec, output=replace(output, collate="list")) if varies else spec
        """Everything that decides the pixels of the clips."""
        self.seed, self.epoch = check_integer("seed", seed, 0, 2**64 - 1), 0
        self._opened: tuple[int, Decoders] | None = None
        self._open()  # reports a wrong argument here, not in a worker process

    def __len__(self) -> int:
        return len(self.dataset)

    def __repr__(self) -> str:
        return f"ClipDataset({len(self)} samples, frames={self.spec.rules.sampler_text}, epoch {self.epoch})"

    def __getstate__(self) -> dict[str, Any]:
        return self.__dict__ | {"_opened": None}

    def set_epoch(self, epoch: int) -> None:
        """Set the epoch that integer indices refer to; worker processes that have already started keep the old one.

        Raises:
            UsageError: If the epoch is out of range.
        """
        self.epoch = check_integer("epoch", epoch, 0, 2**64 - 1)

    def __getitem__(self, index: int | SampleVisit) -> ClipRow:
        """Return one clip.

        Raises:
            IndexError: If the dataset has no such sample.
            FastvidError: If the clip cannot be read or decoded.
        """
        return self.__getitems__([index])[0]

    def __getitems__(self, indices: Sequence[int | SampleVisit]) -> list[ClipRow]:
        """Return several clips, planned and read together. torch's DataLoader calls this for each batch.

        Raises:
            IndexError: If the dataset lacks one of the samples.
            FastvidError: If a clip cannot be read or decoded.
        """
        visits = [one if isinstance(one, SampleVisit) else self._visit(one) for one in indices]
        rows: list[ClipRow] = []
        for (seed, epoch), group in itertools.groupby(visits, lambda visit: (visit.seed, visit.epoch)):
            try:
                rows += self._read(seed, epoch, list(group))
            except FastvidError as error:
                # torch adds the text of its traceback to the message, and the frames of a thread say nothing about it.
                raise error.with_traceback(None) from None
        return rows

    def _visit(self, index: int) -> SampleVisit:
        index = check_integer("index", index)
        number = index + len(self) * (index < 0)
        if not 0 <= number < len(self):
            raise IndexError(f"sample {index} is outside a dataset of {len(self)} samples")
        return SampleVisit(number, number, self.seed, self.epoch, number, number + 1)

    def _open(self) -> Decoders:
        """Return this process's decoders, opened on first use; a forked process does not use its parent's."""
        if self._opened is None or self._opened[0] != os.getpid():
            stream = LoaderStream(resolve("cpu"))
            chosen = choose_backends(self.decoder, self.spec, stream.device)
            # `together`: the packets of a video that several rows show are decoded once.
            decoders = Decoders(self.spec, stream, chosen, Workers(num_threads=1), together=True)
            self._opened = os.getpid(), decoders
        return self._opened[1]

    def _read(self, seed: int, epoch: int, visits: Sequence[SampleVisit]) -> list[ClipRow]:
        decoders = self._open()
        order = self.spec.orders.order(seed, epoch)
        planner = Planner(self.dataset, self.spec.rules, order, decoders.backend, decoders.join)
        samples, positions = (np.array([visit[field] for visit in visits], dtype=np.int64) for field in range(2))
        plan = planner.plan(Share(visits[0].start, visits[0].stop, positions), samples)
        for error in plan.errors.values():
            raise error
        batch = _decoded(plan, decoders, prefetch_threads(self.dataset))
        lengths = (batch.frame_index >= 0).sum(1).tolist()
        wanted = {} if self.spec.signals is None else self.spec.signals.wanted
        shown = {"frame_index", "seconds"} | {entry_of(one, self.dataset)[0] for one in wanted if wanted[one] is None}
        # Slices of the batch's tensors, which `collate_rows` joins without a copy.
        each = {
            name: [row[:length] for row, length in zip(value, lengths, strict=True)] if name in shown else list(value)
            for name, value in batch.items()
            if isinstance(value, Tensor | tuple | list) and name not in _OF_BATCH
        }
        return [
            ClipRow(
                {name: values[row] for name, values in each.items()} | {name: getattr(visit, name) for name in _PLACE},
                fields={name: values[row] for name, values in batch.fields.items()},
            )
            for row, visit in enumerate(visits)
        ]


_OF_BATCH: Final = frozenset({"weight", "valid"})
"""Entries that depend on the other rows of a batch."""

_PLACE: Final = ("sample", "position", "epoch", "start", "stop")
"""Entries of a `ClipRow` that say where in an epoch it is."""

_OF_ROW: Final = frozenset({*_PLACE, "fields"})
"""Entries of a `ClipRow` that are not those of one row of a batch."""

_LARGE: Final = frozenset({"video", "flow"})


def _decoded(plan: Plan, decoders: Decoders, num_fetchers: int) -> Batch:
    """Read and decode the clips of a plan in which every row was planned without an error."""
    canvas = decoders.memory.open(plan)
    rows = [Row(canvas, row) for row in plan.reads]
    if num_fetchers:
        with ThreadPoolExecutor(min(num_fetchers, len(rows)), thread_name_prefix="fastvid-fetch") as pool:
            for row, (found,) in zip(rows, pool.map(lambda row: fetch_rows([row]), rows), strict=True):
                if isinstance(found, Exception):
                    canvas.fail(row.row, found)
                    raise found
                canvas.keep(row.row, *found)
    lane = decoders.lanes[0].take()

    def done(row: Row, error: Exception | None, _: Counters) -> None:
        if error is not None:
            canvas.fail(row.row, error)
            raise error
        if row.row in canvas.planes:
            canvas.cut(row.row)

    try:
        lane.make(rows, Watched(), done)
    finally:
        decoders.lanes[0].put_back(lane)
    return decoders.assembler.make(canvas)[0]


def collate_rows(rows: Sequence[ClipRow], **_of_torch: Any) -> Batch:
    """Make a `Batch` of clips; torch's `default_collate` calls it for a list of `ClipRow`.

    The weight of a clip is 1 / (clips of the global batch) if an `ExactSampler` chose the rows, else 1 / len(rows).
    """
    shapes = {tuple(row["video"].shape) for row in rows}
    if len(shapes) > 1:
        hint = "give the DataLoader a collate_fn, use a sampler and a crop of one shape, or a ClipLoader"
        raise UsageError(f"clips of a batch have the shapes {', '.join(map(str, sorted(shapes)))}", hint=hint)
    spans = {(row["start"], row["stop"]) for row in rows}
    start, stop = min(start for start, _ in spans), max(stop for _, stop in spans)
    # Rows of one index, which a sampler with replacement may repeat, are of one span, too.
    clips = max(stop - start, len(rows)) if len(spans) == 1 else len(rows)
    each = {name: [row[name] for row in rows] for name in rows[0] if name not in _OF_ROW}
    fields = {name: tuple(row["fields"][name] for row in rows) for name in rows[0]["fields"]}
    return Batch(
        {name: _collated(name, values) for name, values in each.items()},
        weight=torch.full((len(rows),), 1.0 / clips),
        valid=torch.ones(len(rows), dtype=torch.bool),
        sample=torch.tensor([row["sample"] for row in rows]),
        position=torch.tensor([row["position"] for row in rows]),
        epoch=rows[0]["epoch"],
        start=start,
        stop=stop,
        fields=fields,
    )


def _collated(name: str, values: list[Any]) -> Tensor | tuple[Any, ...]:
    if not isinstance(values[0], Tensor):
        return tuple(values)
    return _joined(values) if name in _LARGE else torch.stack(values)


def _joined(clips: list[Tensor]) -> Tensor:
    """Return clips as one tensor [B, ...], without a copy if they are adjacent slices of one tensor."""
    first = clips[0]
    memory, strides, step = first.untyped_storage().data_ptr(), first.stride(), first.numel()
    are_neighbours = get_worker_info() is None and all(
        clip.untyped_storage().data_ptr() == memory
        and clip.storage_offset() == first.storage_offset() + number * step
        and clip.stride() == strides
        for number, clip in enumerate(clips)
    )
    if are_neighbours:
        return first.as_strided((len(clips), *first.shape), (step, *strides))
    # In a worker process of a DataLoader, `default_collate` stacks into shared memory, which is sent without a copy.
    joined: Tensor = default_collate(clips)
    return joined


# `default_collate` looks up types here before it collates a mapping entry by entry.
default_collate_fn_map[ClipRow] = collate_rows


class ExactSampler(DistributedSampler[SampleVisit]):
    """Yields the samples that this rank reads in an epoch, as a `ClipLoader` of the same arguments shares them out.

        sampler = ExactSampler(clips, global_batch_size=64)
        loader = DataLoader(clips, batch_size=64 // world_size, sampler=sampler, num_workers=8)

    The state is that of a `ClipLoader` and can be exchanged with it, for any world size and batch size. Each ``for``
    begins at the position of the loaded state, or at the beginning of the epoch if none was loaded; after the last
    batch, or `set_epoch`, the next one begins an epoch. It is a `DistributedSampler`, so Lightning leaves it as it is.
    Accelerate and the Hugging Face Trainer share out batches themselves: give them rank=0, world_size=1.

    Args:
        clips: The clips.
        global_batch_size: Clips per step over all ranks; a multiple of the world size, of each rank's groups and clips
            of one video. The DataLoader's batch_size is this number divided by the world size.
        order: Which samples an epoch visits, in which order, and how it ends: last="drop" discards the clips that do
            not fill the last batch; "keep" delivers them, and some ranks then have fewer clips, or one batch less.
        rank: This process among `world_size`; by default torch's process group, else torchrun's environment, else 0.
        world_size: Processes that share each global batch.
        **moved: Any field of `order`, as version 0.2 had them.

    Raises:
        UsageError: If an argument is invalid, or if the dataset is too small for one batch.
    """

    def __init__(
        self,
        clips: ClipDataset,
        *,
        global_batch_size: int,
        order: Order = Order(),
        rank: int | None = None,
        world_size: int | None = None,
        **moved: Any,
    ) -> None:
        if not hasattr(clips, "spec"):
            hint = "give it the dataset of the DataLoader, a ClipDataset"
            raise UsageError(f"clips is a {type(clips).__name__}, expected a ClipDataset", hint=hint)
        (order,) = with_moved("ExactSampler", {"order": order}, moved)
        check_choice("last", order.last, ("drop", "keep"))
        self.clips, self.world, self._found_world = clips, World.resolve(rank, world_size), rank is None
        self.spec = replace(clips.spec, orders=EpochOrders(clips.dataset, order))
        self.batches = Batches.of(self.spec.orders, global_batch_size, order, self.world)
        if self.batches.size % (least := self.world.size * self.batches.unit):
            told = f"global_batch_size {global_batch_size} is not a multiple of {least}: {self.world.size} ranks"
            told += f" with whole groups of {self.batches.unit}" if self.batches.unit > 1 else ""
            raise UsageError(told, hint="a DataLoader has one batch size on all ranks; a ClipLoader takes any number")
        super().__init__(cast("Any", clips), self.world.size, self.world.rank, shuffle=False)
        self._seed, self.epoch, self._origin = clips.seed, 0, 0
        self._position = 0  # start of the first global batch that was not yielded completely

    def __iter__(self) -> Iterator[SampleVisit]:
        check_use(self, self.world, found=self._found_world)
        return self._iterate()

    def _iterate(self) -> Iterator[SampleVisit]:
        self._begin()
        order = self.spec.orders.order(self._seed, self.epoch)
        for share in self.batches.shares(self._origin):
            positions = share.positions[share.positions != MASKED]
            samples = order.ids(positions) if len(positions) else np.empty(0, np.int64)
            for left, sample, position in zip(
                range(len(positions) - 1, -1, -1), samples.tolist(), positions.tolist(), strict=True
            ):
                if not left:
                    self._position = share.stop
                yield SampleVisit(sample, position, self._seed, self.epoch, share.start, share.stop)
            self._position = share.stop

    def __len__(self) -> int:
        """Return the clips of this rank in a whole epoch."""
        whole, left = divmod(self.batches.num_samples, self.batches.size)
        rows = whole * self.batches.size // self.world.size
        if self.batches.last == "keep" and left:
            rows += int(np.count_nonzero(self.batches.share(whole * self.batches.size).positions != MASKED))
        return rows

    def set_epoch(self, epoch: int) -> None:
        """Go to the beginning of `epoch`; does nothing if it is the current one, so that a resumed epoch continues.

        Raises:
            UsageError: If the epoch is out of range.
        """
        epoch = check_integer("epoch", epoch, 0, 2**64 - 1)
        if epoch != self.epoch + self._is_over:
            self.epoch, self._position, self._origin = epoch, 0, 0

    def state_dict(self, after: Batch | None = None) -> dict[str, Any]:
        """Return the state {version, fingerprint, seed, epoch, position} after a batch.

        Args:
            after: The last batch that was used. Without it, the state includes everything that the sampler has yielded;
                a DataLoader with worker processes requests batches before it delivers them, so the state is ahead of
                the batches used. A StatefulDataLoader corrects this itself.
        """
        place = (self.epoch, self._position) if after is None else (after.epoch, after.stop)
        own = {"version": STATE_VERSION, "fingerprint": self.spec.fingerprint(), "seed": self._seed}
        return own | dict(zip(("epoch", "position"), place, strict=True))

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Resume from a state of a sampler, or of a `ClipLoader`, of any world size and batch size.

        Raises:
            StateError: If the state belongs to other data, another sampler or other augmentation; says which part.
        """
        self._seed, self.epoch, self._position = self.spec.place(state)
        self._origin = self._position

    @property
    def _is_over(self) -> bool:
        return not self.batches.count(self._position)

    def _begin(self) -> None:
        if self._is_over:
            self.epoch, self._origin = self.epoch + 1, 0
        self._position = self._origin
