"""What a `ClipLoader` delivers, apart from its position: samples in order, decoders, and the form of a batch."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass, replace

from fastvid.audio.window import Audio
from fastvid.decode.backends import Backend
from fastvid.format.dataset import Dataset
from fastvid.load.after.chain import AnyTransform, TransformChain
from fastvid.load.batch.annotations import RowAnnotations
from fastvid.load.batch.batch import Assembler
from fastvid.load.batch.patches import Patches
from fastvid.load.batch.signal_rows import SignalRows
from fastvid.load.batch.sound import SoundMemory
from fastvid.load.batch.transformed import TransformStage
from fastvid.load.batch.video import Collate, check_collate, video_spec
from fastvid.load.clips.batching import EpochPlans
from fastvid.load.clips.clip_sizes import varying_sizes
from fastvid.load.clips.plan import BatchPlanner, prefetch_threads
from fastvid.load.clips.planner import ClipPlanner
from fastvid.load.clips.rules import ClipRules
from fastvid.load.clips.streams import depth_of, streams_text
from fastvid.load.clips.views import ONE_VIEW, Views, check_views
from fastvid.load.memory.device import LoaderStream
from fastvid.load.options import Output, Workers
from fastvid.load.order.buckets import Buckets
from fastvid.load.order.mixture import Mixture
from fastvid.load.order.packed import Packed
from fastvid.load.state import fingerprint
from fastvid.load.workers.chosen_backends import ActiveBackends, BatchShape
from fastvid.load.workers.engine import BatchPipeline
from fastvid.load.workers.lanes import AUTO, choose_backends
from fastvid.load.workers.pending import EpochPart
from fastvid.runtime.cores import available_cores
from fastvid.runtime.world import World


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
