"""ClipLoader: a dataset and a decoder become batches of clips on a device.

state     {version, fingerprint, seed, epoch, position}: what was delivered, and nothing about how
order     position -> sample, by arithmetic (order.py)
plan      position -> frames, crop, flip (plan.py), all before decoding
run       one planner thread, decode threads, batches in order (engine.py)
"""

from __future__ import annotations

import itertools
import logging
import os
import time
from collections.abc import Generator, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any, get_args

import torch

from fastvid.decode.backends import Backend
from fastvid.decode.colours import IMAGENET_MEAN, IMAGENET_STD, Layout, Pixels
from fastvid.errors import UsageError
from fastvid.format.dataset import Dataset
from fastvid.load.batch.batch import Batch as Batch
from fastvid.load.batch.batch import assemble
from fastvid.load.batch.sinks import Product
from fastvid.load.clips.augment import Spatial, Transform
from fastvid.load.clips.plan import Planner, reads_at_once
from fastvid.load.clips.planner import ClipPlanner
from fastvid.load.clips.sampling import Sampler
from fastvid.load.clips.streams import check_streams
from fastvid.load.clips.views import ONE_VIEW, Views, check_views
from fastvid.load.order.batches import MASKED, Batches, Last
from fastvid.load.order.blocks import BlockShuffle
from fastvid.load.order.epoch import ClassBalanced, Visits
from fastvid.load.order.mixture import Mixture
from fastvid.load.order.permutation import Order
from fastvid.load.state import STATE_VERSION, check_state, fingerprint
from fastvid.load.workers.chosen_backends import BatchShape, Served
from fastvid.load.workers.engine import Run, Work
from fastvid.load.workers.lanes import AUTO, choose_backends
from fastvid.load.workers.progress_view import CopyClock, reporters
from fastvid.load.workers.skips import OnError as OnError
from fastvid.load.workers.skips import Skips, Workers
from fastvid.load.workers.stats import Counters, LoaderStats
from fastvid.runtime.checks import check_choice, check_least, check_seconds
from fastvid.runtime.cores import available_cores
from fastvid.runtime.world import World

_log = logging.getLogger(__name__)


class ClipLoader:
    """Batches of clips, every sample of an epoch exactly once, the same whatever the number of workers.

    One ``for`` gives the rest of the epoch, after which the epoch advances. A loop that is left early goes on where it
    stopped. State taken while a batch is held resumes with the batch after it.

    Threads start with an iteration and end with it. A process may fork between iterations, but a fork made during one
    has no threads in the child, where going on is an error: begin the iteration in the child, or use spawn.

    Args:
        dataset: The samples; a `Mixture` for several datasets.
        frames: Which frames make a clip: `Segments`, `Dense`, `Uniform`.
        spatial: One crop and at most one flip.
        streams: Video streams of each sample: "rgb", "flow", or both, with the same frames and crop. The first one is
            `Batch.video`.
        flow_stack: Flows L for each frame, half before and half behind it.
        views: Several clips and crops of each video, for evaluation; `Batch.video` is then [B, V, 3, T, H, W].
        global_batch_size: Clips of a step over all ranks; at least the world size.
        group_size: Neighbouring clips of a batch that one rank always gets together; divides the batch, with
            last="drop".
        device: Where batches lie.
        decoder: Name of a back-end, several joined by "+" that serve one queue ("pyav+dali-gpu"), a `Backend`, or
            "auto": the fastest of those that run here, tried for a second when the first iteration begins. On a CPU
            there is a choice for VP9 and MJPEG only; H.264, HEVC and AV1 begin at once.
        seed: Decides order, frames and crops, 0 <= seed < 2**64.
        shuffle: True visits samples in a uniformly random order, a `BlockShuffle` in one that touches few shards at a
            time; False as they lie in the dataset, for evaluation.
        balance: Gives classes shares of the epoch; None visits every sample once.
        repeats: Clips in a row of each sample that is visited, each with frames and crop of its own.
        last: Samples left at the end of an epoch: "drop", "mask" (fill the batch with masked rows) or "keep" (a smaller
            batch). "mask" and "keep" count each video once.
        rank: This process among `world_size`; by default torch's process group, else torchrun's environment, else 0.
        world_size: Processes that share each global batch.
        fields: Further annotation columns to deliver.
        layout: "BCTHW" or "BTCHW".
        dtype: A floating type for normalised values, or torch.uint8 for levels 0 to 255.
        mean: Of R, G, B in 0 to 1; not used for torch.uint8.
        std: Of R, G, B in 0 to 1; not used for torch.uint8.
        on_error: What a damaged clip does: "raise", or "skip", which masks and counts it. It is never replaced.
        max_skip_rate: Share of this rank's clips that may be skipped before it is an error after all, 0 to 1.
        num_threads: Decode threads; by default the cores this rank may use.
        device_lanes: Decoders of a back-end that decodes on a GPU; by default one for each of its NVDEC engines.
        prefetch: Batches made ahead. Memory is at most prefetch + 1 batches of this rank, besides those you keep.
        num_fetchers: Threads that read ahead of those, or the processes, that decode; by default none for local disks,
            where each reads for itself, and as many as a remote storage takes requests at once, 32 at most.
        timeout: Seconds that a batch may take before WorkerError names the clips in progress and ends the iteration.
        workers: "thread" decodes in threads of this process. "process" takes as many processes, of about 100 MB, which
            leave the interpreter to the training step, and write batches into memory that forked children share. One
            that hangs in native code or crashes is killed, its clip named and treated as `on_error` says.
        clip_timeout: Seconds that reading, or decoding, a clip may take in a process before it counts as hung.
        show_stats: Show on stderr where the time goes: in place on a terminal, as log lines elsewhere.
        stats_file: Takes the same as JSON, one line a batch; an existing file is continued.

    Raises:
        UsageError: An argument is wrong, or the dataset gives no batch.
        MissingDependency: The decoder does not run here.
    """

    def __init__(
        self,
        dataset: Dataset | Mixture,
        *,
        frames: Sampler,
        spatial: Sequence[Transform] | Transform,
        global_batch_size: int,
        streams: Sequence[str] | str = ("rgb",),
        flow_stack: int = 1,
        views: Views | None = None,
        group_size: int = 1,
        device: str | torch.device = "cpu",
        decoder: str | Backend = "auto",
        seed: int = 0,
        shuffle: bool | BlockShuffle = True,
        balance: ClassBalanced | None = None,
        repeats: int = 1,
        last: Last = "drop",
        rank: int | None = None,
        world_size: int | None = None,
        fields: Sequence[str] = (),
        layout: Layout = "BCTHW",
        dtype: torch.dtype = torch.float32,
        mean: tuple[float, float, float] = IMAGENET_MEAN,
        std: tuple[float, float, float] = IMAGENET_STD,
        on_error: OnError = "raise",
        max_skip_rate: float = 0.01,
        num_threads: int | None = None,
        device_lanes: int | None = None,
        prefetch: int = 2,
        num_fetchers: int | None = None,
        timeout: float = 600.0,
        workers: Workers = "thread",
        clip_timeout: float = 60.0,
        show_stats: bool = False,
        stats_file: str | os.PathLike[str] | None = None,
    ) -> None:
        check_least(1, num_threads=num_threads, device_lanes=device_lanes, prefetch=prefetch)
        check_seconds(timeout=timeout, clip_timeout=clip_timeout)
        check_choice("workers", workers, get_args(Workers))
        self._skips = Skips(on_error, max_skip_rate)
        self.dataset = dataset
        self.frames = frames
        self.spatial = Spatial.of(spatial)
        self.shuffle, self.views = shuffle, views
        self.streams, self.flow_stack = check_streams(streams, flow_stack, dataset.streams), flow_stack
        self.world = World.resolve(rank, world_size)
        self._visits = Visits(dataset, shuffle=shuffle, balance=balance, repeats=repeats)
        self.batches = Batches(self._visits.num_samples, global_batch_size, last, self.world, group_size)
        self.device = torch.device(device)
        self.num_threads = num_threads = num_threads or available_cores()
        self.stats = LoaderStats(num_threads=num_threads, cores=available_cores(), num_frames=frames.num_frames)
        self._copies = CopyClock(self.device)
        self._reports = reporters(show_stats=show_stats, stats_file=stats_file)
        self._labels, self._fields = dataset.labels, {name: dataset.column(name) for name in fields}
        self._prefetch, self._timeout = prefetch, timeout
        self._num_fetchers = reads_at_once(dataset, num_fetchers)
        Order(0, seed)  # refuses a seed out of range
        self._seed, self._epoch, self._position = seed, 0, 0
        self._origin = 0  # where the iteration under way began, or the next one will
        self._run: Run | None = None
        pixels = Pixels(mean, std, torch.float32 if dtype is torch.uint8 else dtype, layout)
        levels = None if dtype is torch.uint8 else pixels
        product = Product(frames.num_frames, self.spatial.crop.output, layout, levels, self.device)
        if views is not None:
            check_views(views, self.frames, self.spatial, repeats=repeats)
        shape = BatchShape(product, dtype, self.streams, self.flow_stack, views is not None, repeats > 1)
        apart = clip_timeout if workers == "process" else None
        self._served = Served(shape, num_threads, prefetch, device_lanes, apart)
        if decoder != "auto":
            self._served.use(choose_backends(decoder))

    def __repr__(self) -> str:
        return (
            f"ClipLoader({len(self.dataset)} samples, frames={self.frames}, global_batch_size={self.batches.size},"
            f" rank {self.world.rank} of {self.world.size}, decoder={self.backend.name!r}, device={str(self.device)!r},"
            f" epoch {self._epoch}, position {self._position})"
        )

    def __len__(self) -> int:
        """Batches of one ``for``: the one under way, or else the next."""
        return self.batches.count(self._origin)

    @property
    def backend(self) -> Backend:
        """What decodes; named "auto" until the first iteration has chosen."""
        return self._served.backend

    @property
    def seed(self) -> int:
        """What order, frames and crops are drawn from."""
        return self._seed

    @property
    def epoch(self) -> int:
        """The epoch under way, or the next one to begin."""
        return self._epoch

    @property
    def position(self) -> int:
        """Samples of the epoch that were delivered, over all ranks."""
        return self._position

    @property
    def global_batch_size(self) -> int:
        """Samples of a global batch, over all ranks."""
        return self.batches.size

    def set_epoch(self, epoch: int) -> None:
        """Goes to the beginning of `epoch`; does nothing when it is the current one, so a resumed epoch goes on.

        Raises:
            UsageError: The epoch is out of range.
        """
        if epoch != self._epoch:
            Order(0, self._seed, epoch)
            self._go(self._seed, epoch, 0)

    def set_batch_size(self, global_batch_size: int) -> None:
        """Takes another global batch size from where the loader stands. An iteration under way ends; what it had read
        ahead is read again.

        Raises:
            UsageError: The size is smaller than the world, or larger than an epoch that drops its rest.
        """
        batches = replace(self.batches, size=global_batch_size)
        self._stop()
        self.batches = batches

    def state_dict(self) -> dict[str, Any]:
        """Where the loader is: {version, fingerprint, seed, epoch, position}; plain values that fit into JSON. With
        decoder="auto" also the decoder that was chosen."""
        state = {
            "version": STATE_VERSION,
            "fingerprint": self._fingerprint(),
            "seed": self._seed,
            "epoch": self._epoch,
            "position": self._position,
        }
        # What was chosen is kept, because back-ends differ by a level of colour here and there.
        return state | ({"decoder": self.backend.name} if self._served.chosen else {})

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Goes where a state was taken, by a loader of any world size and batch size. An iteration under way ends.

        Raises:
            StateError: The state belongs to other data, another sampler or another augmentation; says which part.
        """
        self._go(*check_state(state, self._fingerprint(), self._visits.num_samples))
        if self.backend is AUTO and "decoder" in state:
            self._served.restore(str(state["decoder"]))

    def cached(self, num_batches: int = 2) -> Iterator[Batch]:
        """The next `num_batches` again and again, as often as one ``for`` gives batches: how fast a loop would be if
        data cost nothing. Afterwards `stats.ceiling` says so; the loader stays where it was.

        Args:
            num_batches: Batches kept, at least 1.
        """
        place, total = (self._seed, self._epoch, self._position), len(self)
        held = list(itertools.islice(self, num_batches))
        self._go(*place)
        begun = clips = 0.0
        for number in range(total if held else 0):
            if number:  # the first one warms up
                clips += held[0].stop - held[0].start
            if number == 1:
                begun = time.perf_counter()
            yield held[number % len(held)]
        if clips:
            self.stats.ceiling = clips / (time.perf_counter() - begun)

    def close(self) -> None:
        """Ends an iteration under way and closes the decoders. The loader can be used again."""
        self._stop()
        self._served.close()

    def __iter__(self) -> Iterator[Batch]:
        self._stop()
        return self._iterate()

    def _iterate(self) -> Generator[Batch, None, None]:
        # What ran before must end first, also when the iterators were made in another order than they are used.
        self._stop()
        self._origin = self._position
        if not self.batches.count(self._position):
            # State that was taken with the last batch of an epoch in hand.
            self._epoch, self._position, self._origin = self._epoch + 1, 0, 0
            return
        order = self._visits.order(self._seed, self._epoch)
        parts = (self.frames, self.spatial, self._seed, self._epoch, self.backend, self.streams, self.flow_stack)
        planner = Planner(self.dataset, order, ClipPlanner(*parts))
        if self.backend is AUTO:
            self._served.decide(planner.plan(self.batches.share(self._position)).clips, self.world)
        one = replace(planner.clips, backend=self.backend, views=self.views or ONE_VIEW)
        # What is read ahead here must be decided here.
        apart = one if self._served.decides and one.travels and not self._num_fetchers else None
        planner = replace(planner, clips=one, join=self._served.join, decide=apart is None)
        run = Run(
            planner.plans(self.batches, self._position),
            self._served.lanes,
            self._served.finisher,
            prefetch=self._prefetch,
            planner=apart,
            num_fetchers=self._num_fetchers,
        )
        self._run = run
        first, asked = True, time.perf_counter()
        step = Counters()
        try:
            while True:
                self.stats.ready, self.stats.queued = run.ready, run.queued
                work = run.next(self._timeout)
                if work is None:
                    break
                waited = time.perf_counter() - asked
                step.add(work.counters)
                begun = time.perf_counter()
                batch = self._finish(work, step)
                step.finish_seconds += time.perf_counter() - begun
                step.batches = 1
                if first:
                    step.fill_seconds = waited
                else:
                    step.wait_seconds = waited
                step.copy_seconds = self._copies.seconds()
                self.stats.step = step
                self.stats.total.add(step)
                del work
                self._position = batch.stop
                for report in self._reports:
                    report(self.stats, self.epoch, batch.stop, self.batches.num_samples)
                given = time.perf_counter()
                yield batch
                del batch
                if self._run is not run:
                    raise UsageError(
                        "this iteration was ended by another iteration, load_state_dict, set_epoch or close",
                        hint="a loader has one position, so it serves one iteration at a time",
                    )
                asked = time.perf_counter()
                step = Counters(compute_seconds=asked - given)
                first = False
            self._epoch, self._position = self._epoch + 1, 0
        finally:
            run.close()
            if self._run is run:
                self._run, self._origin = None, self._position

    def _finish(self, work: Work, step: Counters) -> Batch:
        """The batch, or the error that it holds."""
        plan, views = work.plan, (self.views.num_views,) if self.views else ()
        step.clips = sum(sample != MASKED for sample in plan.samples)
        errors = self._skips.take(work.errors, len(plan.samples), step, self.stats.total, *views)
        rows = [None if sample == MASKED else sample for sample in plan.samples]
        fields = {
            name: tuple(None if row is None else column[row].as_py() for row in rows)
            for name, column in self._fields.items()
        }
        with self._copies:
            made = [video.view(-1, *views, *video.shape[1:]) for video in work.canvas.finish()]
        for video in made if errors else ():
            video[list(errors)] = 0  # also its other streams and views
        return assemble(
            made[0],
            plan,
            work.frames,
            set(errors),
            labels=self._labels,
            frames_shape=(*views, self.frames.num_frames),
            epoch=self._epoch,
            fields=fields,
            flow=dict(zip(self.streams, made, strict=True)).get("flow"),
        )

    def _go(self, seed: int, epoch: int, position: int) -> None:
        self._seed, self._epoch, self._position = seed, epoch, position
        self._stop()

    def _stop(self) -> None:
        run, self._run = self._run, None
        if run is not None:
            run.close()
        self._origin = self._position

    def _fingerprint(self) -> dict[str, str]:
        streams = ",".join(self.streams) + (f" flow_stack={self.flow_stack}" if "flow" in self.streams else "")
        own = fingerprint(self.dataset, self.frames, self.spatial, order=self._visits.text, streams=streams)
        return own | {"sampler": f"{own['sampler']} {self.views}"} if self.views else own
