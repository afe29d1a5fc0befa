"""Builds the parts of a run from its configuration: datasets, loaders, model, optimizer, schedule."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any, Final

import torch
from torch import nn

from fastvid.errors import UsageError
from fastvid.format.dataset import Dataset
from fastvid.load.batch.annotations import IGNORED_LABEL
from fastvid.load.batch.batch import Batch
from fastvid.load.clips.views import ONE_VIEW, Views
from fastvid.load.loader import ClipLoader
from fastvid.load.memory.device import upload
from fastvid.load.options import Output, Skip, Workers
from fastvid.load.order.mixture import Mixture
from fastvid.models import zoo
from fastvid.models.ghost import use_ghost_norm
from fastvid.models.pipeline import local_devices, place_on_devices
from fastvid.models.two_stream import TwoStream, load_stream_weights
from fastvid.models.weights import load_weights
from fastvid.train.config.config import Config
from fastvid.train.loop.loop import EvalData
from fastvid.train.parts.freeze import Freezer
from fastvid.train.parts.optim import make_optimizer
from fastvid.train.parts.replica import Replica
from fastvid.train.parts.schedule import Schedule
from fastvid.train.ranks.elastic import Member
from fastvid.train.records.observers import Callback, Logger, Observers, observers
from fastvid.train.run.agreement import check_agreement, facts
from fastvid.train.run.splits import open_datasets

log = logging.getLogger(__name__)

_FORMATS: Final = {4: torch.channels_last, 5: torch.channels_last_3d}  # by number of kernel dimensions
_LOGGERS: Final = {
    "tensorboard": "fastvid.train.records.tensorboard:TensorBoard",
    "wandb": "fastvid.train.records.wandb:Wandb",
}
ModelSource = nn.Module | Callable[..., nn.Module]

_LABEL: Final = "label"  # column that a ClipLoader reads labels from


@dataclass(frozen=True)
class Parts:
    """The parts of a run before its first step."""

    config: Config
    train_set: Dataset | Mixture
    eval_set: Dataset | None
    loader: Labelled
    eval_data: EvalData | None
    replica: Replica
    loggers: Observers
    callbacks: Observers


def parts(
    config: Config,
    state: Mapping[str, Any] | None,
    member: Member,
    reader: Member,
    make: ModelSource | None = None,
) -> Parts:
    """Build the parts of a run; a run and its dry run both call this, so they refuse the same settings."""
    loggers = observers("run.loggers", _other_loggers(config) if member.leads else (), Logger, _LOGGERS)
    callbacks = observers("run.callbacks", config.run.callbacks, Callback, {})
    config, train_set, eval_set = open_datasets(config, state, member)
    loader = train_loader(config, train_set, reader)
    try:
        check_agreement(facts(config, loader.clips.state_dict()["fingerprint"], train_set, eval_set), member)
        replica = make_replica(config, samples_per_epoch(loader.clips), member, make)
        evaluated = None if eval_set is None else eval_data(config, eval_set, reader)
        if state is None and member.leads:
            load_initial_weights(config, replica.model)
    except BaseException:
        loader.clips.close()
        raise
    return Parts(config, train_set, eval_set, loader, evaluated, replica, loggers, callbacks)


def _other_loggers(config: Config) -> list[str]:
    """Return the loggers besides metrics.jsonl, which is always written."""
    return [name for name in config.run.loggers if name != "jsonl"]


def train_loader(config: Config, dataset: Dataset | Mixture, member: Member) -> Labelled:
    """Return the loader of the training split."""
    return _loader(config, dataset, member, train=True)


def eval_data(
    config: Config, dataset: Dataset, member: Member, views: Views = ONE_VIEW, *, targets: bool = True
) -> EvalData:
    """Return the evaluation split with its loader: every sample once, in the order of the dataset.

    Without `targets`, the loader delivers only what a prediction needs.
    """
    return EvalData(_loader(config, dataset, member, views, train=False, targets=targets), len(dataset))


def _loader(
    config: Config,
    dataset: Dataset | Mixture,
    member: Member,
    views: Views = ONE_VIEW,
    *,
    train: bool,
    targets: bool = True,
) -> Labelled:
    data = config.data
    world = member.world
    asked = config.task.loader_arguments(data) if targets else {}
    own = data.fields if targets else ()
    fields = () if data.label == _LABEL else (data.label,)
    clips = ClipLoader(
        dataset,
        frames=data.frames if train else data.eval_frames,
        spatial=data.spatial if train else data.eval_spatial,
        after=data.after if train else (),
        streams=data.streams,
        flow_stack=data.flow_stack,
        views=views if views.num_views > 1 else None,
        global_batch_size=data.global_batch_size if train else max(data.eval_batch_size // views.num_views, world.size),
        group_size=data.group_size if train else 1,
        device=member.device,
        decoder=data.decoder,
        seed=config.run.seed,
        shuffle=data.shuffle if train else False,
        balance=data.balance if train else None,
        clips_per_video=data.clips_per_video if train else 1,
        last=data.last if train else "keep",
        rank=world.rank,
        world_size=world.size,
        **{**asked, "fields": tuple(dict.fromkeys((*own, *asked.get("fields", ()), *fields)))},
        on_error=Skip() if data.on_error == "skip" else "raise",
        workers=Workers(data.workers, num_threads=data.num_threads, prefetch=data.prefetch),
        output=_output(config, member.device),
    )
    return Labelled(clips, data.label)


def _output(config: Config, device: torch.device) -> Output:
    data = config.data
    (red, green, blue), (red_std, green_std, blue_std) = data.mean, data.std
    return Output(
        dtype=getattr(torch, data.dtype),
        mean=(red, green, blue),
        std=(red_std, green_std, blue_std),
        channels_last=channels_last(config, device),
    )


class Labelled:
    """A loader whose labels may come from another column of the annotations."""

    def __init__(self, clips: ClipLoader, column: str = _LABEL) -> None:
        self.clips, self.column = clips, column

    @property
    def epoch(self) -> int:
        """See `fastvid.train.parts.loader_protocol.Loader`."""
        return int(self.clips.state_dict()["epoch"])

    @property
    def global_batch_size(self) -> int:
        """See `fastvid.train.parts.loader_protocol.Loader`."""
        return self.clips.global_batch_size

    def __iter__(self) -> Iterator[Batch]:
        epoch, state = self.clips.epoch, self.clips.state_dict()
        if state["epoch"] != epoch:
            # The state was saved at the epoch's last batch: the epoch has no more batches, but is still evaluated.
            self.clips.load_state_dict(state | {"epoch": epoch, "position": 0})
            return
        if self.column == _LABEL:
            yield from self.clips
            return
        for batch in self.clips:
            values = batch.fields[self.column]
            label = torch.tensor([IGNORED_LABEL if value is None else int(value) for value in values])
            yield Batch(batch, label=upload(label, batch.video.device).where(batch.valid, IGNORED_LABEL))

    @property
    def steps_left(self) -> int:
        """See `fastvid.train.parts.loader_protocol.Loader`."""
        return self.clips.steps_left if self.epoch == self.clips.epoch else 0

    def set_batch_size(self, global_batch_size: int) -> None:
        """See `fastvid.train.parts.loader_protocol.Loader`."""
        self.clips.set_batch_size(global_batch_size)

    def state_dict(self) -> dict[str, Any]:
        """See `fastvid.train.parts.loader_protocol.Loader`."""
        return self.clips.state_dict()

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """See `fastvid.train.parts.loader_protocol.Loader`."""
        self.clips.load_state_dict(state)

    def go(self, epoch: int, start: int, stop: int) -> None:
        """See `fastvid.train.parts.loader_protocol.Loader`."""
        self.clips.load_state_dict(self.clips.state_dict() | {"epoch": epoch, "position": start})
        # Do not prefetch beyond `stop`.
        self.clips.batches = replace(self.clips.batches, num_samples=stop)


def build_model(config: Config, member: Member, make: ModelSource | None = None) -> nn.Module:
    """Return the model with randomly initialized weights, the same on every rank."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(config.run.seed)
        model = zoo.build(
            config.model.name if make is None else make,
            config.model.num_classes,
            config.data.num_frames,
            **config.model.arguments,
        )
    check_streams(config, model)
    if config.model.ghost_norm:
        use_ghost_norm(model, config.data.group_size)
    model = model.to(member.device)
    if member.device.type == "cuda":
        # Training batches all have one shape, so trying cuDNN's algorithms pays off within the first steps.
        torch.backends.cudnn.benchmark = True
    if channels_last(config, member.device):
        for parameter in model.parameters():
            if parameter.ndim in _FORMATS:
                parameter.data = parameter.data.contiguous(memory_format=_FORMATS[parameter.ndim])
    if config.model.pipeline > 1:
        place_on_devices(model, local_devices(member.device, config.model.pipeline), config.model.pipeline_batches)
    if config.model.compile:
        model.compile()
    return model


def channels_last(config: Config, device: torch.device) -> bool:
    """Return whether a model on a device, and the batches for it, use the channels-last memory format."""
    chosen = config.model.channels_last
    return device.type == "cuda" and config.run.amp != "off" if chosen is None else chosen


def check_streams(config: Config, model: nn.Module) -> None:
    """Check that the loader delivers the streams and flow stacks that the model takes."""
    data = config.data
    streams = tuple(getattr(model, "streams", data.streams))
    if streams != data.streams:
        raise UsageError(
            f"data.streams is {','.join(data.streams)!r}, model {config.model.name!r} takes {','.join(streams)!r}",
            hint=f"set data.streams={','.join(streams)}",
        )
    config.task.check_streams(streams)
    stack = getattr(model, "flow_stack", data.flow_stack)
    if stack != data.flow_stack:
        raise UsageError(
            f"data.flow_stack is {data.flow_stack}, the model was built for {stack}",
            hint=f"set data.flow_stack={stack} or model.options.flow_stack={data.flow_stack}",
        )


def load_initial_weights(config: Config, model: nn.Module) -> None:
    """Load the configured weights, if any; skip a last layer with another number of classes.

    Called on rank 0 only, because the strategy broadcasts the weights.
    """
    weights = config.model.weights
    if weights is None:
        return
    if isinstance(model, TwoStream):
        for report in load_stream_weights(model, weights.split(",")):
            log.info("weights of %s: %s", weights, report)
    else:
        log.info("weights of %s: %s", weights, load_weights(model, weights))


def make_replica(config: Config, samples_per_epoch: int, member: Member, make: ModelSource | None = None) -> Replica:
    """Return model, optimizer and schedule before the first step."""
    run = config.run
    model = build_model(config, member, make)
    freezer = Freezer(model, config.optim.freeze, samples_per_epoch) if config.optim.freeze else None
    schedule = Schedule.of(
        config.optim,
        epochs=run.epochs,
        samples_per_epoch=samples_per_epoch,
        global_batch_size=config.data.global_batch_size,
    )
    return Replica(
        model,
        make_optimizer(model, config.optim),
        schedule,
        scale_loss=run.amp == "fp16" and member.device.type == "cuda",
        ema_decay=config.optim.ema_decay,
        ema_clips=config.optim.base_batch_size,
        freezer=freezer,
    )


def check_device(config: Config, device: torch.device) -> None:
    """Check that a device supports the precision. A dry run does not, because it need not be on the run's device."""
    if config.run.amp == "fp16" and device.type != "cuda":
        raise UsageError(f"run.amp is 'fp16', but the device is {device.type}", hint="set run.amp=bf16")


def samples_per_epoch(clips: ClipLoader) -> int:
    """Return the samples that a whole epoch of a loader delivers over all ranks."""
    batches = clips.batches
    return batches.count(0) * batches.size if batches.last == "drop" else batches.num_samples
