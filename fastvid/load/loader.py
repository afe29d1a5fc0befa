"""What a `ClipLoader` delivers, apart from its position: samples in order, decoders, and the form of a batch.

ClipLoader: turn a dataset into batches of clips on a device.

state     {version, fingerprint, seed, epoch, position}: what was delivered
order     position -> sample, by arithmetic (order/)
plan      position -> frames, crop, flip, all before decoding (clips/plan.py)
run       one planner thread, decode threads, batches in order (workers/engine.py)
"""

from __future__ import annotations

import itertools
import logging
import os
import time
from collections.abc import Generator, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Final

import torch
from torch.utils.data import IterableDataset, Subset

from fastvid.decode.backends import Backend
from fastvid.decode.sound import Audio
from fastvid.errors import FastvidError, UnavailableError, UsageError
from fastvid.format.dataset import Dataset
from fastvid.load.after.chain import AnyTransform, TransformChain
from fastvid.load.batch.batch import Assembler
from fastvid.load.batch.batch import Batch as Batch
from fastvid.load.batch.canvas import Patches, SoundMemory, TransformStage
from fastvid.load.batch.labels import MultiHot, RowAnnotations, SignalRows, SignalsAsked, Text
from fastvid.load.batch.sinks import Collate, check_collate, video_spec
from fastvid.load.clips.clip import ClipRules, Crops, Frames, check_streams, depth_of, streams_text, varying_sizes
from fastvid.load.clips.plan import BatchPlanner, ClipPlanner, EpochPlans, prefetch_threads
from fastvid.load.clips.views import ONE_VIEW, Views, check_views
from fastvid.load.device import CopyClock, LoaderStream, resolve
from fastvid.load.options import OnError, Output, Skip, Workers
from fastvid.load.order.buckets import Buckets
from fastvid.load.order.draws import resolve_subset
from fastvid.load.order.epoch import MASKED, Batches, BlockShuffle, ClassBalanced, EpochOrders, Last
from fastvid.load.order.mixture import Mixture
from fastvid.load.order.packed import Packed
from fastvid.load.state import STATE_VERSION, check_state, fingerprint
from fastvid.load.trainers import check_use
from fastvid.load.workers.chosen_backends import ActiveBackends, BatchShape
from fastvid.load.workers.engine import BatchPipeline, EpochPart
from fastvid.load.workers.lanes import AUTO, choose_backends
from fastvid.load.workers.stats import Counters, LoaderStats, batch_callbacks
from fastvid.runtime.processes import World, available_cores
from fastvid.runtime.values import check_integer

_log = logging.getLogger(__name__)

SKIP_SLACK: Final = 5
"""Skipped clips tolerated beyond the allowed rate, so that two bad clips among the first ten do not end a run. If clips
fail at half an allowed rate of 1 %, chance exceeds rate plus slack in fewer than one run in a thousand."""


class Skips:
    """A loader's policy for failed clips."""

    def __init__(self, on_error: OnError) -> None:
        if on_error != "raise" and not isinstance(on_error, Skip):
            raise UsageError(f"on_error is {on_error!r}", hint="use 'raise' or Skip(max_rate)")
        self._skip = None if on_error == "raise" else on_error

    def take(
        self, errors: Mapping[int, Exception], rows: int, step: Counters, total: Counters, views: int = 1
    ) -> dict[int, Exception]:
        """Count the failed clips of a batch.

        `errors`: by row of the canvas, see `fastvid.load.batch.canvas`. `rows`: rows of the batch. `views`:
        canvas rows for each row of each stream. Returns the first error of each masked row.
        """
        first: dict[int, Exception] = {}
        for row in sorted(errors):
            # If one stream or view of a clip fails, the whole clip fails.
            first.setdefault(row // views % rows, errors[row])
        for error in first.values():
            # Wrong arguments, a store that fails or refuses, and bugs in fastvid are not the clip's fault.
            own = isinstance(error, FastvidError) and not isinstance(error, UsageError | UnavailableError)
            if self._skip is None or not own:
                raise error
            step.skips[type(error).__name__] += 1
            _log.warning("clip skipped: %s", error)
        step.clips -= len(first)
        if first:
            assert self._skip is not None
            _check(self._skip.max_rate, first, step, total)
        return first


def _check(max_rate: float, errors: Mapping[int, Exception], step: Counters, total: Counters) -> None:
    skips = total.skips + step.skips
    skipped = skips.total()
    seen = total.clips + step.clips + skipped
    if skipped > SKIP_SLACK + max_rate * seen:
        reasons = ", ".join(f"{count} {reason}" for reason, count in skips.most_common())
        raise FastvidError(
            f"{skipped} of {seen} clips were skipped ({reasons}), more than on_error=Skip({max_rate}) allows",
            hint="run `fastvid verify` to find damaged samples and exclude them with where=",
        ) from errors[max(errors)]


@dataclass(frozen=True, slots=True)
class _Following:
    """The epoch after one that was delivered to its end, and the pipeline that has prefetched from it, if one has."""

    seed: int
    epoch: int
    run: BatchPipeline | None


class ClipSource:
    """Makes the batches of any epoch from any position.

    `dataset`: the samples.
    """

    def __init__(
        self,
        dataset: Dataset | Mixture,
        rules: ClipRules,
        plans: EpochPlans,
        *,
        batches: Buckets | Packed | None,
        streams: tuple[str, ...],
        flow_stack: int,
        views: Views | None,
        audio: Audio | None,
        annotations: RowAnnotations,
        signals: SignalRows | None,
        after: Sequence[AnyTransform],
        collate: Collate,
        output: Output,
        workers: Workers,
        decoder: str | Backend,
        stream: LoaderStream,
        world: World,
    ) -> None:
        self.dataset, self.rules, self._plans, self.world = dataset, rules, plans, world
        self._following: _Following | None = None
        self.streams, self.flow_stack, self.views, self.audio = streams, flow_stack, views, audio
        self.annotations, self.workers, self.stream = annotations, workers, stream
        self.num_threads = workers.num_threads or available_cores()
        clips_per_video = plans.orders.clips_per_video
        if views is not None:
            for sampler, crop in rules.pairs:
                check_views(views, sampler, crop, clips_per_video=clips_per_video, audio=audio is not None)
        patches = Patches(batches.patch, batches.merge, output.layout) if isinstance(batches, Packed) else None
        collate = check_collate(collate, streams, views=views is not None, batches=batches)
        spec = video_spec(rules, output, stream, collate)
        self._depth = depth_of(dataset, streams)
        self._after = TransformChain.of(after, streams, self._depth)
        stage = None if self._after is None else TransformStage(self._after, spec)
        made = (streams, () if views is None else (views.num_views,), collate == "pad", annotations, stage)
        self.assembler = Assembler(stream, *made, seed=0, epoch=0, patches=patches, signals=signals, depth=self._depth)
        self._num_fetchers = prefetch_threads(dataset, workers.num_fetchers)
        required = collate == "pad" and world.size > 1
        self._clip_sizes = None if batches else varying_sizes(dataset, rules, streams, required=required)
        has = (streams, flow_stack, views is not None, clips_per_video, isinstance(batches, Buckets))
        self.backends = ActiveBackends(
            BatchShape(spec, output.dtype, *has, stage, self._depth), self.num_threads, workers
        )
        if decoder != "auto":
            self.backends.use(choose_backends(decoder, stream.device))

    @property
    def fingerprint(self) -> dict[str, str]:
        """Everything that determines the batches besides seed, epoch and position, as text by part."""
        own = fingerprint(
            self.dataset,
            self.rules,
            order=self.plans.orders.text,
            streams=streams_text(self.streams, self.flow_stack),
        )
        own |= {"batches": self.plans.batching.text} if self.plans.batching.text else {}
        own |= {"sampler": f"{own['sampler']} {self.views}"} if self.views else {}
        own |= {} if self.audio is None else {"audio": repr(self.audio)}
        own |= self.annotations.fingerprint
        own |= {} if self.assembler.signals is None else {"signals": self.assembler.signals.text}
        return own if self._after is None else own | {"after": repr(self._after)}

    @property
    def plans(self) -> EpochPlans:
        """The order and the batches of each epoch."""
        return self._plans

    @plans.setter
    def plans(self, plans: EpochPlans) -> None:
        self._plans, self._following = plans, None

    def start(self, seed: int, epoch: int, position: int) -> BatchPipeline:
        """Start the threads that make the batches from `position` to the end of the epoch.

        If the epoch before was delivered to its end, they continue with what was prefetched, and prefetch from the next
        epoch in turn: a loop over epochs waits for the first batch once. A loader that is read once reads nothing else.
        Worker processes do not prefetch so: they would have to be interrupted in the middle of their tasks.
        """
        known, self._following = self._following, None
        follows = known is not None and (known.seed, known.epoch, 0) == (seed, epoch, position)
        run = known.run if known is not None and follows else None
        run = run or self._pipeline(seed, epoch, position, follow=follows and self.workers.kind == "thread")
        run.start(epoch)
        return run

    def finish(self, run: BatchPipeline, seed: int, epoch: int) -> None:
        """Stop the threads after the last batch before an epoch, and keep what they prefetched of it."""
        self._following = _Following(seed, epoch, run if run.follows and run.pause() else None)

    def end(self, run: BatchPipeline) -> None:
        """Stop the threads of an iteration, unless they were stopped by `finish`."""
        if self._following is None or self._following.run is not run:
            run.close()

    def forget(self) -> None:
        """Release what was prefetched for the next iteration."""
        self._following = None

    def close(self) -> None:
        """Release the decoders and what was prefetched."""
        self.forget()
        self.backends.close()

    def _pipeline(self, seed: int, epoch: int, position: int, *, follow: bool) -> BatchPipeline:
        backends = self.backends
        if backends.backend is AUTO:
            planner, batches = self._planner(seed, epoch), self.plans.epoch(seed, epoch)
            backends.decide(planner.plan(next(batches.shares(position))).clips, self.world)
        epochs = itertools.count(epoch) if follow else (epoch,)
        return BatchPipeline(
            (self._part(seed, each, position if each == epoch else 0) for each in epochs),
            backends.lanes,
            backends.finisher,
            prefetch=self.workers.prefetch,
            follows=follow,
            finishes_ahead=not self.assembler.uses_global_generators,
            sounds=None if self.audio is None else SoundMemory(self.audio, backends.pool, self.stream),
            num_fetchers=self._num_fetchers,
        )

    def _planner(self, seed: int, epoch: int) -> BatchPlanner:
        parts = (self.rules, seed, epoch, self.backends.backend, self.streams, self.flow_stack)
        clips = ClipPlanner(*parts, depth=frozenset(self._depth))
        return BatchPlanner(self.dataset, self.plans.orders.order(seed, epoch), clips, clip_sizes=self._clip_sizes)

    def _part(self, seed: int, epoch: int, position: int) -> EpochPart:
        backends, planner = self.backends, self._planner(seed, epoch)
        one = replace(planner.clips, views=self.views or ONE_VIEW, audio=self.audio)
        # Clips that this process prefetches must be decided in this process.
        in_workers = backends.decides and one.runs_in_workers and not self._num_fetchers and self.audio is None
        planner = replace(planner, clips=one, join=backends.join, decide=not in_workers)
        plans = planner.plans(self.plans.epoch(seed, epoch), position)
        assembler = replace(self.assembler, seed=seed, epoch=epoch)
        return EpochPart(epoch, plans, assembler, one if in_workers else None)


class ClipLoader(IterableDataset[Batch]):
    """Iterable over batches of clips: each sample once per epoch, in an order independent of the number of workers.

    One ``for`` yields the rest of the current epoch, then the epoch advances; none is empty. After a ``break``, and
    with a state saved in the loop body, the next ``for`` continues with the next batch, if need be of the next epoch.

    Other trainers take the loader as it is, or ``DataLoader(loader, batch_size=None)``, which passes its batches on.
    It shares batches among the ranks and starts workers itself, so a trainer must do neither; iterating then is an
    error that says what to change.

    Threads live only as long as an iteration. A process may fork between iterations, but not continue one in a child.

    Args:
        dataset: The samples; a `Mixture` for several datasets. A `torch.utils.data.Subset` selects samples.
        frames: The frame sampler: `Segments`, `Dense`, `Uniform`; in seconds `AtFps`, `Window`, `Deltas`; or your own.
            For a mixture one of all datasets, or a mapping with one for each by name.
        spatial: One crop, `Resize` or `Native`, and at most one flip. For a mixture of all, or a mapping by name.
        streams: Video streams of each sample: "rgb", "flow", or both, of the same pixels; or cameras, whose frames show
            the same moments. All pictures by default. The first is `Batch.video`.
        flow_stack: Flows per frame, L: half before and half after it.
        views: Several clips and crops of each video, for evaluation; `Batch.video` is then [B, V, 3, T, H, W].
        global_batch_size: Clips per step over all ranks; at least one per rank, and a multiple of `clips_per_video`.
        batches: `Buckets` or `Packed` for batches of varying shape, in place of `global_batch_size`. With `Buckets` the
            sampler makes the frames of each bucket's shape and the crop its size; with `Packed` `Batch.video` is a
            sequence of patches.
        group_size: Consecutive clips of a batch that always go to the same rank; must divide the batch, and above 1
            requires last="drop".
        device: Device of the batches; "cuda" is the constructing thread's current GPU. They are finished on a stream of
            the loader, and belong to the stream that is current where the next one is requested.
        decoder: Name of a back-end, several joined by "+" that share one queue ("pyav+dali-gpu"), a `Backend`, or
            "auto": the fastest available one, tried for a second when the first iteration starts. On a CPU "auto"
            compares decoders for VP9 and MJPEG only; H.264, HEVC and AV1 start at once.
        seed: Determines order, frames and crops, 0 <= seed < 2**64.
        shuffle: True for a uniformly random order, a `BlockShuffle` for one that touches few shards at a time, False
            for dataset order, as in evaluation.
        balance: Class shares of the epoch; None visits every sample once.
        clips_per_video: K clips of each visited video, for contrastive learning. They are neighbours in `Batch.video`
            [n * K, 3, T, H, W], never split between ranks, and each has its own frames, crop, flip and transforms.
        collate: How clips become `Batch.video`: "stack" needs one shape; "pad" adds zeros after the last frame, row and
            column, up to the largest clip of the global batch; "list" keeps one tensor per clip.
        last: How to treat the remaining samples at the end of an epoch: "drop", "mask" (pad the batch with masked rows)
            or "keep" (a smaller batch). "mask" and "keep" count each video once.
        rank: This process among `world_size`; by default torch's process group, else torchrun's environment, else 0.
        world_size: Processes that share each global batch.
        audio: The sound of the clips, `Audio(rate)`, in `Batch.audio`; not with `views`.
        fields: Annotation columns to deliver in `Batch.fields`.
        text: Column of the text to deliver in `Batch.text`, chosen among several and sometimes dropped.
        labels: Column of several labels per sample, to deliver in `Batch.labels`; `loader.labels.classes` names them.
        signals: Numbers that the dataset has for every frame, in entries of their names, [B, T] or [B, T, A]: of items
            around each, ``{"action": Deltas([0.0, 0.1])}``; of a list of names those of the frames that a clip shows.
        after: Transforms of RGB on the device, before normalisation, in this order: `ColorJitter`, `RandAugment`,
            `Erasing`, `GaussianBlur`, `Grayscale`, your own `ClipTransform`, or any callable of one clip [T, 3, H, W].
            They depend on the seed, the epoch and the position of the clip.
        output: The form of the video tensors.
        workers: Who decodes, and how far ahead.
        on_error: What to do with a damaged clip: "raise", or `Skip(max_rate)` to mask and count it.
        show_stats: Show on stderr where the time goes: in place on a terminal, as log lines elsewhere.
        stats_file: JSON Lines file for the same statistics, one line per batch; appended to if it exists.

    Raises:
        UsageError: If an argument is invalid, or if the dataset is too small for one batch.
        MissingDependency: If the decoder cannot run here.
    """

    def __init__(
        self,
        dataset: Dataset | Mixture | Subset[Any],
        *,
        frames: Frames,
        spatial: Crops,
        global_batch_size: int | None = None,
        batches: Buckets | Packed | None = None,
        streams: Sequence[str] | str | None = None,
        flow_stack: int = 1,
        views: Views | None = None,
        group_size: int = 1,
        device: str | torch.device = "cpu",
        decoder: str | Backend = "auto",
        seed: int = 0,
        shuffle: bool | BlockShuffle = True,
        balance: ClassBalanced | None = None,
        clips_per_video: int = 1,
        collate: Collate = "stack",
        last: Last = "drop",
        rank: int | None = None,
        world_size: int | None = None,
        audio: Audio | None = None,
        fields: Sequence[str] = (),
        text: Text | None = None,
        labels: MultiHot | None = None,
        signals: SignalsAsked = (),
        after: Sequence[AnyTransform] = (),
        output: Output = Output(),
        workers: Workers = Workers(),
        on_error: OnError = "raise",
        show_stats: bool = False,
        stats_file: str | os.PathLike[str] | None = None,
    ) -> None:
        self._skips = Skips(on_error)
        dataset = resolve_subset(dataset)
        rules, streams = ClipRules.of(dataset, frames, spatial), check_streams(streams, flow_stack, dataset.streams)
        self._found_world = rank is None
        self.world = World.resolve(rank, world_size)
        """This process's rank, and the world size."""
        orders = EpochOrders(dataset, shuffle=shuffle, balance=balance, clips_per_video=clips_per_video)
        planned = (orders, dataset, rules, self.world, last)
        annotations = RowAnnotations.of(dataset, fields, text, labels)
        self.device = resolve(device)
        self._source = ClipSource(
            dataset,
            rules,
            EpochPlans.of(*planned, size=global_batch_size, group=group_size, planned=batches),
            batches=batches,
            streams=streams,
            flow_stack=flow_stack,
            views=views,
            audio=audio,
            annotations=annotations,
            signals=SignalRows.of(dataset, frames, streams, signals, views=views is not None),
            after=after,
            collate=collate,
            output=output,
            workers=workers,
            decoder=decoder,
            stream=LoaderStream(self.device),
            world=self.world,
        )
        self.labels = None if annotations.labels is None else annotations.labels.labels
        """The classes of `Batch.labels`; None without labels=."""
        self.workers, self.num_threads = workers, self._source.num_threads
        self.stats = LoaderStats(num_threads=self.num_threads, cores=available_cores())
        """Where the time of the last and of all batches went."""
        self.stats.num_frames = rules.num_frames or 0
        self._copies = CopyClock(self.device)
        self._reports = batch_callbacks(show_stats=show_stats, stats_file=stats_file)
        self._seed, self._epoch, self._position = check_integer("seed", seed, 0, 2**64 - 1), 0, 0
        self._origin = 0  # first position of the current iteration, or of the next one
        self._run: BatchPipeline | None = None

    def __repr__(self) -> str:
        return (
            f"ClipLoader({len(self.dataset)} samples, frames={self._source.rules.sampler_text}, {self.plans}, rank"
            f" {self.world.rank} of {self.world.size}, decoder={self.backend.name!r}, device={str(self.device)!r},"
            f" epoch {self._epoch}, position {self._position})"
        )

    def __len__(self) -> int:
        """Return `steps_per_epoch`, which is what trainers and `DataLoader` take a length for."""
        return self.steps_per_epoch

    def __reduce__(self) -> str | tuple[Any, ...]:
        hint = "use num_workers=0, or make the loader in the process that iterates over it"
        raise UsageError("a ClipLoader was sent to another process", hint=hint)

    @property
    def steps_per_epoch(self) -> int:
        """Batches of a whole epoch, for learning-rate schedules; the same after resuming within one."""
        return self.plans.epoch(self._seed, self._epoch).count(0)

    @property
    def steps_left(self) -> int:
        """Batches of the current ``for`` loop, or of the next one."""
        return self.plans.steps(self._seed, self._epoch, self._origin)

    @property
    def backend(self) -> Backend:
        """The decoder back-end; named "auto" until the first iteration has chosen one."""
        return self._source.backends.backend

    @property
    def dataset(self) -> Dataset | Mixture:
        """The samples."""
        return self._source.dataset

    @property
    def plans(self) -> EpochPlans:
        """The order and the batches of each epoch."""
        return self._source.plans

    @property
    def seed(self) -> int:
        """The seed of order, frames and crops."""
        return self._seed

    @property
    def epoch(self) -> int:
        """The epoch of the current ``for`` loop, or of the next one."""
        return self._epoch + self._is_over

    @property
    def position(self) -> int:
        """Samples of the epoch delivered so far, over all ranks."""
        return 0 if self._is_over else self._position

    @property
    def global_batch_size(self) -> int:
        """Samples per global batch, over all ranks."""
        return self.batches.size

    @property
    def batches(self) -> Batches:
        """The batches of every epoch. Raises UsageError if their shapes vary."""
        return self.plans.of_one_size

    @batches.setter
    def batches(self, batches: Batches) -> None:
        self._source.plans = EpochPlans(self.plans.orders, batches)

    def set_epoch(self, epoch: int) -> None:
        """Go to the beginning of `epoch`; does nothing if it is the current one, so that a resumed epoch continues.

        Raises:
            UsageError: If the epoch is out of range.
        """
        epoch = check_integer("epoch", epoch, 0, 2**64 - 1)
        if epoch != self.epoch:
            self._seek(self._seed, epoch, 0)

    def set_batch_size(self, global_batch_size: int) -> None:
        """Change the global batch size from the current position on. Ends a running iteration; clips that it had
        prefetched are read again.

        Raises:
            UsageError: If the size is below the world size, or exceeds the epoch with last="drop".
        """
        batches = replace(self.batches, size=global_batch_size)
        self._stop()
        self.batches = batches

    def state_dict(self) -> dict[str, Any]:
        """Return the state {version, fingerprint, seed, epoch, position}; all values can be stored as JSON. With
        decoder="auto" the state also contains the chosen decoder."""
        state = {
            "version": STATE_VERSION,
            "fingerprint": self._source.fingerprint,
            "seed": self._seed,
            "epoch": self._epoch,
            "position": self._position,
        }
        # Resuming keeps the chosen back-end, because pixels differ slightly between back-ends.
        return state | ({"decoder": self.backend.name} if self._source.backends.chosen else {})

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Resume from a state of a loader of any world size and batch size. Ends a running iteration.

        Raises:
            StateError: If the state belongs to other data, another sampler or other augmentation; says which part.
        """
        seed, epoch, position = check_state(state, self._source.fingerprint, self.plans.orders.num_samples)
        self.plans.epoch(seed, epoch).is_over(position)  # raises an error if a batch contains the position
        self._seek(seed, epoch, position)
        if self.backend is AUTO and "decoder" in state:
            self._source.backends.restore(str(state["decoder"]))

    def cached(self, num_batches: int = 2) -> Iterator[Batch]:
        """Yield the next `num_batches` >= 1 batches over and over, for as many batches as one ``for``: measures how
        fast the loop would be if data were free. Sets `stats.ceiling` (clips/s) at the end; the position is unchanged.
        """
        place, total, begun, clips = (self._seed, self._epoch, self._position), self.steps_left, 0.0, 0
        held = list(itertools.islice(self, num_batches))
        self._seek(*place)
        for number in range(total if held else 0):
            if number:  # the first batch is warm-up
                clips += held[0].stop - held[0].start
            if number == 1:
                begun = time.perf_counter()
            yield held[number % len(held)]
        if clips:
            self.stats.ceiling = clips / (time.perf_counter() - begun)

    def close(self) -> None:
        """End a running iteration and close the decoders. The loader can be used again."""
        self._stop()
        self._source.close()

    def __iter__(self) -> Iterator[Batch]:
        check_use(self, self.world, found=self._found_world)
        self._stop()
        return self._iterate()

    def _iterate(self) -> Generator[Batch, None, None]:
        self._stop()  # again: iterators may be used in another order than they were created
        self._epoch, self._position, self._origin = self.epoch, self.position, self.position
        run = self._run = self._source.start(self._seed, self._epoch, self._position)
        num_samples = self.plans.epoch(self._seed, self._epoch).num_samples
        first, asked, step = True, time.perf_counter(), Counters()
        try:
            while True:
                self.stats.ready, self.stats.queued = run.ready, run.queued
                work = run.next(self.workers.timeout)
                if work is None:
                    break
                waited = time.perf_counter() - asked
                step.add(work.counters)
                samples = work.plan.samples
                step.clips, step.batches = sum(sample != MASKED for sample in samples), 1
                # Before the batch is finished: meanwhile fetch threads would request clips that nobody will read.
                self._skips.take(work.errors, len(samples), step, self.stats.total, *self._source.assembler.views)
                with self._copies:
                    batch = run.take(work)
                step.finish_seconds = work.counters.finish_seconds
                step.fill_seconds, step.wait_seconds = (waited, 0.0) if first else (0.0, waited)
                step.copy_seconds = self._copies.seconds()
                step.take_traffic()
                self.stats.step = step
                self.stats.total.add(step)
                del work
                self._position = batch.stop
                for report in self._reports:
                    report(self.stats, self._epoch, batch.stop, num_samples)
                given = time.perf_counter()
                yield batch
                del batch
                if self._run is not run:
                    raise UsageError(
                        "this iteration was ended by another iteration, load_state_dict, set_epoch or close",
                        hint="use one loader per concurrent iteration; a loader has only one position",
                    )
                asked = time.perf_counter()
                first, step = False, Counters(compute_seconds=asked - given)
            self._epoch, self._position = self._epoch + 1, 0
            self._source.finish(run, self._seed, self._epoch)
        finally:
            self._source.end(run)
            self.stats.total.take_traffic()  # of what was prefetched and not delivered
            if self._run is run:
                self._run, self._origin = None, self._position

    @property
    def _is_over(self) -> bool:
        """Whether the loader stands between two epochs: all batches were delivered, and their ``for`` has ended."""
        return self._run is None and self.plans.epoch(self._seed, self._epoch).is_over(self._position)

    def _seek(self, seed: int, epoch: int, position: int) -> None:
        self._seed, self._epoch, self._position = seed, epoch, position
        self._source.forget()
        self._stop()

    def _stop(self) -> None:
        run, self._run = self._run, None
        if run is not None:
            run.close()
        self._origin = self._position
