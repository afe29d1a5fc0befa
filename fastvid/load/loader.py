"""ClipLoader: turn a dataset into batches of clips on a device.

spec      everything that decides pixels; its text is the fingerprint in a state (batch/spec.py)
state     {version, fingerprint, seed, epoch, position}: how much of which epoch was delivered
order     position in the epoch -> sample, computed, not stored (order/)
plan      position -> frames, crop, flip, all before decoding (clips/plan.py)
pipeline  one planner thread, decode threads, batches delivered in order (workers/engine.py)
"""

from __future__ import annotations

import itertools
import logging
import time
from collections.abc import Generator, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any, Final

import numpy as np
import torch
from torch.utils.data import IterableDataset, Subset

from fastvid.decode.backends import Backend
from fastvid.errors import FastvidError, UnavailableError, UsageError
from fastvid.format.dataset import Dataset
from fastvid.load.after.chain import AnyTransform
from fastvid.load.batch.batch import Batch as Batch
from fastvid.load.batch.canvas import Canvas
from fastvid.load.batch.labels import Extras
from fastvid.load.batch.spec import STATE_VERSION, Spec
from fastvid.load.clips.clip import Crops, Frames, varying_sizes
from fastvid.load.clips.plan import EpochPlans, Plan, Planner, prefetch_threads
from fastvid.load.clips.views import Views
from fastvid.load.device import CopyClock, LoaderStream, resolve
from fastvid.load.options import OnError, Output, Skip, Workers, with_moved
from fastvid.load.order.buckets import Buckets
from fastvid.load.order.draws import resolve_subset
from fastvid.load.order.epoch import MASKED, Batches, Order
from fastvid.load.order.mixture import Mixture
from fastvid.load.order.packed import Packed
from fastvid.load.stats import Counters, LoaderStats, batch_callbacks
from fastvid.load.trainers import check_use
from fastvid.load.workers.engine import BatchPipeline
from fastvid.load.workers.lanes import Decoders, choose_backends
from fastvid.runtime.processes import World, available_cores
from fastvid.runtime.values import check_integer

_log = logging.getLogger(__name__)

SKIP_SLACK: Final = 5
"""Skipped clips tolerated beyond the allowed rate, so that two bad clips among the first ten do not end a run. If 0.5 %
of the clips fail and 1 % may be skipped, fewer than one run in a thousand ends by chance."""


def count_skips(on_error: OnError, canvas: Canvas, step: Counters, total: Counters) -> None:
    """Count the failed clips of a batch; raise the first error if it must not be skipped, or if too many were."""
    first: dict[int, Exception] = {}
    for number in sorted(canvas.errors):
        # If one stream or view of a clip fails, the whole clip fails.
        first.setdefault(canvas.plan.row_of(number), canvas.errors[number])
    for error in first.values():
        # Wrong arguments, a store that fails or refuses, and bugs in fastvid are not the clip's fault: never skipped.
        own = isinstance(error, FastvidError) and not isinstance(error, UsageError | UnavailableError)
        if not isinstance(on_error, Skip) or not own:
            # The frames of a decode thread say nothing about a clip, and all about a bug.
            raise error.with_traceback(None) if isinstance(error, FastvidError) else error
        step.skips[type(error).__name__] += 1
        _log.warning("clip skipped: %s", error)
    step.clips -= len(first)
    skips = total.skips + step.skips
    skipped, seen = skips.total(), total.clips + step.clips + skips.total()
    if first and isinstance(on_error, Skip) and skipped > SKIP_SLACK + on_error.max_rate * seen:
        reasons = ", ".join(f"{count} {reason}" for reason, count in skips.most_common())
        raise FastvidError(
            f"{skipped} of {seen} clips were skipped ({reasons}), more than on_error={on_error} allows",
            hint="run `fastvid verify` to find damaged samples and exclude them with where=",
        ) from first[max(first)]


def _sizes(
    given: int | Buckets | Packed | None, moved: dict[str, Any], world: World
) -> tuple[int | None, Buckets | Packed | None]:
    """Return the global batch size, or else `Buckets` or `Packed`; takes their older names out of `moved`."""
    if "batch_size" in moved and given is None:
        given = moved.pop("batch_size")
        if world.size > 1 and isinstance(given, int):
            hint = f"use global_batch_size={given * world.size}, the clips of a step over all ranks"
            raise UsageError(f"batch_size is {given} in a world of {world.size} ranks", hint=hint)
    if isinstance(given, Buckets | Packed):
        return None, given
    return given, moved.pop("batches", None)


class ClipLoader(IterableDataset[Batch]):
    """Iterable over batches of clips: each sample once per epoch, in an order independent of the number of workers.

    A ``for`` loop yields the rest of the current epoch, then advances to the next epoch; it is never empty. After a
    ``break``, and after loading a state saved in the loop body, the next ``for`` continues with the next batch, if need
    be of the next epoch.

    Pass the loader to other trainers as it is, or as ``DataLoader(loader, batch_size=None)``, which passes its batches
    through. The loader shares batches among the ranks and starts workers itself. If a trainer is about to do either
    again, iterating raises an error that says what to change.

    Threads exist only during an iteration. A process may fork between iterations; a child must not continue one.

    Args:
        dataset: The samples; a `Mixture` for several datasets. A `torch.utils.data.Subset` selects samples.
        frames: The frame sampler: `Segments`, `Dense`, `Uniform`; in seconds `AtFps`, `Window`, `Deltas`; or your own.
            For a mixture, one sampler for all datasets, or a mapping from a dataset's name to its sampler.
        spatial: One crop, `Resize` or `Native`, and at most one flip. For a mixture also a mapping by dataset name.
        global_batch_size: Clips per step over all ranks; at least one per rank, and a multiple of `clips_per_video`. Or
            `Buckets` or `Packed` for batches of varying shape: with `Buckets` the sampler and the crop are set to each
            bucket's number of frames and size; with `Packed` `Batch.video` is a sequence of patches.
        streams: Video streams of each sample: "rgb", "flow", or both with the same crops; or cameras, whose frames show
            the same moments. By default all streams of pictures. The first is `Batch.video`.
        views: Several clips and crops of each video, for evaluation; `Batch.video` is then [B, V, 3, T, H, W].
        order: Which samples an epoch visits, in which order, and how it ends.
        extras: Sound, texts, labels, columns and signals of the clips.
        after: Transforms of RGB on the device, before normalisation, in this order: `ColorJitter`, `RandAugment`,
            `Erasing`, `GaussianBlur`, `Grayscale`, your own `ClipTransform`, or any callable of one clip [T, 3, H, W].
            They depend on the seed, the epoch and the position of the clip.
        output: The form of the video tensors.
        device: Device of the batches; "cuda" is the constructing thread's current GPU. Batches are finished on a CUDA
            stream of the loader; use each on the stream that is current where it is requested.
        seed: Determines order, frames and crops, 0 <= seed < 2**64.
        rank: This process among `world_size`; by default torch's process group, else torchrun's environment, else 0.
        world_size: Processes that share each global batch.
        workers: Threads or processes, the decoder, how far to prefetch, and what to do with damaged clips.
        **moved: Any field of `order`, `extras`, `output` and `workers`, as version 0.2 had them: ``shuffle=False``;
            also ``batches=`` and, in a world of one process, PyTorch's ``batch_size=`` for `global_batch_size`.

    Raises:
        UsageError: If an argument is invalid, or if the dataset is too small for one batch.
        MissingDependency: If the decoder cannot run here.
    """

    def __init__(
        self,
        dataset: Dataset | Mixture | Subset[Any],
        *,
        frames: Frames | None = None,
        spatial: Crops | None = None,
        global_batch_size: int | Buckets | Packed | None = None,
        streams: Sequence[str] | str | None = None,
        views: Views | None = None,
        order: Order = Order(),
        extras: Extras = Extras(),
        after: Sequence[AnyTransform] = (),
        output: Output = Output(),
        device: str | torch.device = "cpu",
        seed: int = 0,
        rank: int | None = None,
        world_size: int | None = None,
        workers: Workers = Workers(),
        **moved: Any,
    ) -> None:
        self.device, self._found_world = resolve(device), rank is None
        self.world = World.resolve(rank, world_size)
        """This process's rank, and the world size."""
        size, batches = _sizes(global_batch_size, moved, self.world)
        groups = {"order": order, "extras": extras, "output": output, "workers": workers}
        order, extras, output, workers = with_moved("ClipLoader", groups, moved)
        self.dataset: Dataset | Mixture = resolve_subset(dataset)
        """The samples."""
        asked: dict[str, Any] = {"streams": streams, "views": views, "after": after, "batches": batches}
        self.spec = Spec.of(self.dataset, frames, spatial, order, extras, output, **asked)
        """Everything that decides the pixels of the batches."""
        self.plans = EpochPlans(self.spec.orders, self.spec.batching(self.world, order, size))
        """The order and the batches of each epoch."""
        required = output.collate == "pad" and self.world.size > 1
        self._clip_sizes = None if batches else varying_sizes(self.dataset, self.spec.rules, required=required)
        self._num_fetchers = prefetch_threads(self.dataset, workers.num_fetchers)
        self.workers = replace(workers, num_threads=workers.num_threads or available_cores())
        self._stream, self._is_auto = LoaderStream(self.device), workers.decoder == "auto"
        self._use(choose_backends(workers.decoder, self.spec, self.device))
        labels = self.spec.annotations.labels
        self.labels = None if labels is None else labels.labels
        """The classes of `Batch.labels`; None without labels=."""
        self.stats = LoaderStats(num_threads=self.workers.num_threads or 0, cores=available_cores())
        """Where the time of the last batch, and of all batches, was spent."""
        self.stats.num_frames = self.spec.rules.num_frames or 0
        self._copies = CopyClock(self.device)
        self._reports = batch_callbacks(show_stats=workers.show_stats, stats_file=workers.stats_file)
        self._seed, self._epoch, self._position = check_integer("seed", seed, 0, 2**64 - 1), 0, 0
        self._origin = 0  # first position of the current iteration, or of the next one
        self.plans.check(self._seed)
        self._run: BatchPipeline | None = None
        self._paused: BatchPipeline | None = None  # what was prefetched for the next iteration

    def __repr__(self) -> str:
        return (
            f"ClipLoader({len(self.dataset)} samples, frames={self.spec.rules.sampler_text}, {self.plans}, rank"
            f" {self.world.rank} of {self.world.size}, decoder={self.backend.name!r}, device={str(self.device)!r},"
            f" epoch {self._epoch}, position {self._position})"
        )

    def __len__(self) -> int:
        """Return `steps_per_epoch`: trainers and `DataLoader` expect the length in batches."""
        return self.steps_per_epoch

    def __reduce__(self) -> str | tuple[Any, ...]:
        hint = "use num_workers=0, or make the loader in the process that iterates over it"
        raise UsageError("a ClipLoader was sent to another process", hint=hint)

    @property
    def steps_per_epoch(self) -> int:
        """Batches of a whole epoch, for learning-rate schedules; also when resuming in the middle of one."""
        return self.plans.epoch(self._seed, self._epoch).count(0)

    @property
    def steps_left(self) -> int:
        """Batches of the current ``for`` loop, or of the next one."""
        return self.plans.steps(self._seed, self._epoch, self._origin)

    @property
    def backend(self) -> Backend:
        """The decoder back-end in use; with decoder="auto" the one that was chosen."""
        return self._decoders.backend

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
        self.plans, self._paused = EpochPlans(self.plans.orders, batches), None

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
        own = {"version": STATE_VERSION, "fingerprint": self.spec.fingerprint(self.plans.batching.text)}
        state = own | {"seed": self._seed, "epoch": self._epoch, "position": self._position}
        # Resuming keeps the chosen back-end, because pixels differ slightly between back-ends.
        return state | ({"decoder": self.backend.name} if self._is_auto else {})

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Resume from a state of a loader of any world size and batch size. Ends a running iteration.

        Raises:
            StateError: If the state belongs to other data, another sampler or other augmentation; says which part.
        """
        seed, epoch, position = self.spec.place(state, self.plans.batching.text)
        self.plans.epoch(seed, epoch).is_over(position)  # raises an error if a batch contains the position
        self._seek(seed, epoch, position)
        if self._is_auto and state.get("decoder", self.backend.name) != self.backend.name:
            try:
                chosen = choose_backends(str(state["decoder"]), self.spec, self.device)
                self._decoders.close()
                self._use(chosen)
            except FastvidError as error:
                _log.warning("decoder %s of the state is not available here: %s", state["decoder"], error)

    def cached(self, num_batches: int = 2) -> Iterator[Batch]:
        """Yield the next `num_batches` >= 1 batches over and over, for as many batches as one ``for``.

        Measures how fast the loop would be if data took no time: sets `stats.ceiling` (clips/s) at the end. The
        position is unchanged.
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
        self._paused = None
        self._decoders.close()

    def __iter__(self) -> Iterator[Batch]:
        check_use(self, self.world, found=self._found_world)
        self._stop()
        return self._iterate()

    def _iterate(self) -> Generator[Batch, None, None]:
        self._stop()  # again: iterators may be used in another order than they were created
        self._epoch, self._position, self._origin = self.epoch, self.position, self.position
        epochs, prefetch = self._epochs(self._seed, self._epoch, self._position), self.workers.prefetch
        run = self._paused or BatchPipeline(epochs, self._decoders, prefetch=prefetch, num_fetchers=self._num_fetchers)
        self._run, self._paused = run, None
        run.start()
        first, asked, step = True, time.perf_counter(), Counters()
        try:
            while True:
                self.stats.ready, self.stats.queued = run.ready, run.queued
                work = run.next(self.workers.timeout)
                if work is None:
                    break
                waited = time.perf_counter() - asked
                step.add(*work.costs)
                samples = work.plan.samples
                step.clips, step.batches = int(np.count_nonzero(samples != MASKED)), 1
                # Raise before the batch is finished; meanwhile fetch threads would request clips that nobody will read.
                count_skips(self.workers.on_error, work, step, self.stats.total)
                with self._copies.measured():
                    batch = run.take(work)
                step.finish_seconds += work.finish_seconds
                step.fill_seconds, step.wait_seconds = (waited, 0.0) if first else (0.0, waited)
                step.copy_seconds = self._copies.seconds()
                step.take_traffic()
                self.stats.step = step
                self.stats.total.add(step)
                del work
                self._position = batch["stop"]
                for report in self._reports:
                    report(self.stats, self._epoch, self._position, self.plans.orders.num_samples)
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
            # Only threads: worker processes would have to be interrupted in the middle of their tasks.
            if run.pause(follow=self.workers.kind == "thread"):
                self._paused = run
        finally:
            if self._paused is not run:
                run.close()
            self.stats.total.take_traffic()  # requests for clips that were prefetched and not delivered
            if self._run is run:
                self._run, self._origin = None, self._position

    @property
    def _is_over(self) -> bool:
        """Whether the loader is between two epochs: all batches were delivered, and their ``for`` loop has ended."""
        return self._run is None and self.plans.epoch(self._seed, self._epoch).is_over(self._position)

    def _seek(self, seed: int, epoch: int, position: int) -> None:
        self._seed, self._epoch, self._position = seed, epoch, position
        self._paused = None
        self._stop()

    def _stop(self) -> None:
        run, self._run = self._run, None
        if run is not None:
            run.close()
        self._origin = self._position

    def _use(self, chosen: Sequence[Backend]) -> None:
        together = self.spec.rules.views is not None or self.spec.orders.clips_per_video > 1
        self._decoders = Decoders(self.spec, self._stream, chosen, self.workers, together)

    def _epochs(self, seed: int, first: int, position: int) -> Iterator[Iterator[Plan]]:
        """Yield the plans of the rest of the first epoch, then those of each later epoch."""
        rules, plans, decoders = self.spec.rules, self.plans, self._decoders
        for epoch in itertools.count(first):
            order = plans.orders.order(seed, epoch)
            one_shape = self.spec.output.collate == "stack" and self.spec.batches is None
            planner = Planner(self.dataset, rules, order, decoders.backend, decoders.join, self._clip_sizes, one_shape)
            yield planner.plans(plans.epoch(seed, epoch), position)
            position = 0
