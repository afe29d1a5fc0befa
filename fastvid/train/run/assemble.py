"""Build a run from its configuration: checkpoint, datasets, loaders, model, optimizer, schedule.

Before the first step the datasets and settings of all ranks are compared. A node may have an old copy of the dataset,
or a rank may be started with other settings. Without the check, training would run, but on other clips than its records
say.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, Final

import torch
from torch import nn

from fastvid.errors import StateError, UsageError
from fastvid.format.dataset import Dataset
from fastvid.load.clips.views import ONE_VIEW, Views
from fastvid.load.loader import ClipLoader
from fastvid.load.options import Output, Skip, Workers
from fastvid.load.order.epoch import Order
from fastvid.load.order.mixture import Mixture, parts_of
from fastvid.models import zoo
from fastvid.models.ghost import use_ghost_norm
from fastvid.models.two_stream import TwoStream, load_stream_weights
from fastvid.models.weights import load_weights
from fastvid.runtime.values import json_text, sha256
from fastvid.train.config.config import Config, differing, flatten, to_json
from fastvid.train.config.data import MAIN, DatasetConfig
from fastvid.train.parts.optim import Schedule, make_optimizer
from fastvid.train.parts.replica import LABEL, Freezer, Loader, Replica
from fastvid.train.ranks import Member, broadcast_bytes, gather_bytes, highest
from fastvid.train.records.checkpoint import Checkpoints, decode
from fastvid.train.records.records import Callback, Logger, Observers, observers

CHECKPOINTS: Final = "checkpoints"
CLASSES_FILE: Final = "classes.json"
_STEEP: Final = 8.0  # warn if the first learning rate is at least this many times the base rate; our own choice


def open_datasets(
    config: Config, state: Mapping[str, Any] | None, member: Member
) -> tuple[Config, Dataset | Mixture, Dataset | None]:
    """Return the configuration with generations and number of classes filled in, the training set and the evaluation
    set (None without one).

    `state`: contents of the checkpoint to resume from, whose generations are used; None for a new run.
    """
    data = config.data
    main = DatasetConfig(
        path=data.path, split=data.split, where=data.where, generation=data.generation, weight=data.weight
    )
    sources = _at_generations({MAIN: main, **data.mixture}, state, member)
    main, *_ = sources.values()
    opened = {
        name: Dataset(source.path, split=source.split, where=source.where, generation=source.generation)
        for name, source in sources.items()
    }
    weights = {name: source.weight for name, source in sources.items() if source.weight is not None}
    train: Dataset | Mixture = opened[MAIN]
    if len(opened) > 1:
        train = Mixture(opened, weights=weights or None, num_samples=data.epoch_samples)
    evaluated = None
    if data.eval_split is not None:
        evaluated = Dataset(data.path, split=data.eval_split, where=data.where, generation=main.generation)
    mixture = {name: source for name, source in sources.items() if name != MAIN}
    config = replace(config, data=replace(data, generation=main.generation, mixture=mixture))
    if config.model.num_classes is None:
        classes = len(config.task.names(train, config.data)) or None
        config = replace(config, model=replace(config.model, num_classes=classes))
    for dataset in (train, evaluated):
        if dataset is not None:
            config.task.check_data(dataset, config)
    return config, train, evaluated


def _at_generations(
    sources: Mapping[str, DatasetConfig], state: Mapping[str, Any] | None, member: Member
) -> dict[str, DatasetConfig]:
    wanted = [source.generation for source in sources.values()]
    before = [] if state is None else str(state["loader"]["fingerprint"]["generation"]).split(" + ")
    if len(before) == len(wanted):  # otherwise the mixture has changed, and the loader raises
        wanted = [one if isinstance(one, int) else int(number) for one, number in zip(wanted, before, strict=True)]
    if not all(isinstance(one, int) for one in wanted):
        # Only rank 0 looks up the numbers: meanwhile a tag may move or a generation appear, and ranks would differ.
        asked = zip(sources.values(), wanted, strict=True)
        found = [Dataset(source.path, generation=one).generation.number for source, one in asked if member.leads]
        wanted = json.loads(broadcast_bytes(json.dumps(found).encode() if member.leads else None, member) or b"[]")
    return {
        name: replace(source, generation=number) for (name, source), number in zip(sources.items(), wanted, strict=True)
    }


OF_A_NODE: Final = frozenset(
    {
        "data.path", "data.num_threads", "data.prefetch", "data.workers", "model.weights", "run.checkpoints",
        "run.loggers", "run.out",
    }
)  # fmt: skip
"""Settings that may differ between nodes; `model.weights` may, because only rank 0 reads the file."""

_LONGEST: Final = 200  # characters of a value in a message
_NONE: Final = "nothing"


def facts(
    config: Config, fingerprint: Mapping[str, Any], train: Dataset | Mixture, evaluated: Dataset | None
) -> dict[str, str]:
    """Return everything that all ranks must have in common, as text by name."""
    generations = [part.generation for part in parts_of(train)]
    files = [[list(map(asdict, one.shards)), one.annotations_sha256] for one in generations]
    settings = flatten(to_json(config))
    return {
        **{name: str(value) for name, value in fingerprint.items()},
        "generation's files": sha256(json_text(files).encode()),
        "classes": json_text(train.classes),
        "evaluation samples": _NONE if evaluated is None else evaluated.identity,
        **{name: json_text(value) for name, value in settings.items() if not _of_a_node(name)},
    }


def _of_a_node(setting: str) -> bool:
    return setting in OF_A_NODE or (setting.startswith("data.mixture.") and setting.endswith(".path"))


def check_agreement(own: Mapping[str, str], member: Member) -> None:
    """Raise StateError unless all ranks have the same `facts`; call it on every rank."""
    first, *others = (json.loads(data) for data in gather_bytes(json.dumps(own).encode(), member))
    differs = {rank: differing([first, theirs]) for rank, theirs in enumerate(others, 1)}
    ranks = [rank for rank, names in differs.items() if names]
    if not ranks:
        return
    rank, name = ranks[0], differs[ranks[0]][0]
    values = [facts.get(name, _NONE)[:_LONGEST] for facts in (others[rank - 1], first)]
    more = f" (and in {', '.join(differs[rank][1:4])})" if len(differs[rank]) > 1 else ""
    also = f"; so do ranks {', '.join(map(str, ranks[1:]))}" if len(ranks) > 1 else ""
    raise StateError(
        f"rank {rank} differs from rank 0 in {name}{more}: it has {values[0]}, rank 0 has {values[1]}{also}",
        hint="give every node the same dataset, and start every rank with the same settings",
        rank=rank,
    )


log = logging.getLogger(__name__)

_FORMATS: Final = {4: torch.channels_last, 5: torch.channels_last_3d}  # by number of kernel dimensions
_LOGGERS: Final = {
    "tensorboard": "fastvid.train.records.loggers:TensorBoard",
    "wandb": "fastvid.train.records.loggers:Wandb",
}
ModelSource = nn.Module | Callable[..., nn.Module]


@dataclass(frozen=True)
class Run:
    """A run before its first step. Training and dry runs both build it here, so both raise the same errors."""

    config: Config  # with generations and number of classes filled in
    checkpoint: str | None  # file name of the checkpoint to resume from
    state: dict[str, Any] | None  # contents of that checkpoint
    train_set: Dataset | Mixture
    eval_set: Dataset | None
    loader: Loader
    eval_data: Loader | None
    replica: Replica
    loggers: Observers
    callbacks: Observers

    @classmethod
    def of(cls, config: Config, member: Member, reader: Member, make: ModelSource | None = None) -> Run:
        """Build a run; `reader` determines the share of each batch that this process reads."""
        checkpoint, state = read_state(checkpoints_of(config), member)
        if state is not None and not config.run.resume:
            raise UsageError(
                "run.out already contains a run",
                file=config.run.out,
                hint="choose another run.out, or set run.resume=true",
            )
        others = [name for name in config.run.loggers if name != "jsonl"]  # metrics.jsonl is always written
        loggers = observers("run.loggers", others if member.leads else (), Logger, _LOGGERS)
        callbacks = observers("run.callbacks", config.run.callbacks, Callback, {})
        config, train_set, eval_set = open_datasets(config, state, member)
        loader = make_loader(config, train_set, reader, train=True)
        try:
            check_agreement(facts(config, loader.clips.state_dict()["fingerprint"], train_set, eval_set), member)
            replica = make_replica(config, samples_per_epoch(loader.clips), member, make)
            if state is None and member.leads:
                _warn_of_the_first_rate(config, replica.schedule.lr(0))
            evaluated = None if eval_set is None else make_loader(config, eval_set, reader)
            if state is None and member.leads:
                load_initial_weights(config, replica.model)
        except BaseException:
            loader.clips.close()
            raise
        return cls(config, checkpoint, state, train_set, eval_set, loader, evaluated, replica, loggers, callbacks)


def make_loader(
    config: Config,
    dataset: Dataset | Mixture,
    member: Member,
    views: Views = ONE_VIEW,
    *,
    train: bool = False,
    targets: bool = True,
) -> Loader:
    """Return the loader of a split: for training, or (`train` is False) of every sample once, in dataset order.

    `targets`: whether batches contain what the task needs for losses and scores; False for predictions.
    """
    data, world = config.data, member.world
    asked = config.task.loader_arguments(data) if targets else {}
    own = data.fields if targets else ()
    fields = () if data.label == LABEL else (data.label,)
    order = Order(data.shuffle, data.balance, data.clips_per_video, data.group_size, data.last)
    (red, green, blue), (red_std, green_std, blue_std) = data.mean, data.std
    clips = ClipLoader(
        dataset,
        frames=data.frames if train else data.eval_frames,
        spatial=data.spatial if train else data.eval_spatial,
        after=data.after if train else (),
        streams=data.streams,
        views=views if views.num_views > 1 else None,
        global_batch_size=data.global_batch_size if train else max(data.eval_batch_size // views.num_views, world.size),
        order=order if train else Order(shuffle=False, last="keep"),
        device=member.device,
        seed=config.run.seed,
        rank=world.rank,
        world_size=world.size,
        **{**asked, "fields": tuple(dict.fromkeys((*own, *asked.get("fields", ()), *fields)))},
        workers=Workers(
            data.workers,
            num_threads=data.num_threads,
            prefetch=data.prefetch,
            decoder=data.decoder,
            on_error=Skip() if data.on_error == "skip" else "raise",
        ),
        output=Output(
            dtype=getattr(torch, data.dtype),
            mean=(red, green, blue),
            std=(red_std, green_std, blue_std),
            channels_last=channels_last(config, member.device),
            flow_stack=data.flow_stack,
        ),
    )
    return Loader(clips, data.label)


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
        # All training batches have the same shape, so trying cuDNN's algorithms pays off within the first steps.
        torch.backends.cudnn.benchmark = True
    if channels_last(config, member.device):
        for parameter in model.parameters():
            if parameter.ndim in _FORMATS:
                parameter.data = parameter.data.contiguous(memory_format=_FORMATS[parameter.ndim])
    if config.model.compile:
        model.compile()
    return model


def channels_last(config: Config, device: torch.device) -> bool:
    """Return whether the model and its batches use the channels-last memory format on `device`."""
    chosen = config.model.channels_last
    return device.type == "cuda" and config.run.amp != "off" if chosen is None else chosen


def check_streams(config: Config, model: nn.Module) -> None:
    """Raise UsageError unless the loader delivers the streams and the flow stack that the model takes."""
    data = config.data
    streams = tuple(getattr(model, "streams", data.streams))
    if streams != data.streams:
        raise UsageError(
            f"data.streams is {','.join(data.streams)!r}, model {config.model.name!r} takes {','.join(streams)!r}",
            hint=f"set data.streams={','.join(streams)}",
        )
    stack = getattr(model, "flow_stack", data.flow_stack)
    if stack != data.flow_stack:
        raise UsageError(
            f"data.flow_stack is {data.flow_stack}, the model was built for {stack}",
            hint=f"set data.flow_stack={stack} or model.options.flow_stack={data.flow_stack}",
        )


def load_initial_weights(config: Config, model: nn.Module) -> None:
    """Load the file of `model.weights`, if any, except for a last layer with another number of classes.

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
    schedule = Schedule(
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


def _warn_of_the_first_rate(config: Config, first: float) -> None:
    """Warn if the first learning rate, after linear scaling, is many times the rate that was tuned."""
    optim, size = config.optim, config.data.global_batch_size
    if first >= _STEEP * optim.base_lr > 0:
        log.warning(
            "the first learning rate is %.4g, %.3g times optim.base_lr: data.global_batch_size is %d, "
            "optim.base_batch_size %d. To begin at optim.base_lr, as Goyal et al. 2017 do, set optim.warmup_epochs=%d "
            "and optim.warmup_start=%.4f",
            first, first / optim.base_lr, size, optim.base_batch_size, min(5, config.run.epochs),
            optim.base_batch_size / size,
        )  # fmt: skip


def check_device(config: Config, device: torch.device) -> None:
    """Raise UsageError if a device does not support `run.amp`. A dry run, which may use another device, skips this."""
    if config.run.amp == "fp16" and device.type != "cuda":
        raise UsageError(f"run.amp is 'fp16', but the device is {device.type}", hint="set run.amp=bf16")


def samples_per_epoch(clips: ClipLoader) -> int:
    """Return the number of samples that a whole epoch of a loader delivers over all ranks."""
    batches = clips.batches
    return batches.count(0) * batches.size if batches.last == "drop" else batches.num_samples


def read_state(
    checkpoints: Checkpoints, member: Member, name: str | None = None
) -> tuple[str | None, dict[str, Any] | None]:
    """Return name and state of a checkpoint, the same on every rank; (None, None) if there is no checkpoint.

    The newest one is read by the rank that has it: if each node has its own folder, rank 0 may be on a node that has
    just joined.

    `name`: file name or "best", read by rank 0; None for the newest.
    """
    found, owner = None, highest(checkpoints.newest_samples(), member) if name is None else 0
    if member.world.rank == owner:
        found = checkpoints.find(name)
    which = broadcast_bytes(found.name.encode() if found else None, member, owner)
    data = broadcast_bytes(found.data if found else None, member, owner)
    if which is None or data is None:
        return None, None
    return which.decode(), decode(data, which.decode())


def checkpoints_of(config: Config) -> Checkpoints:
    """Return the checkpoints of a run."""
    run = config.run
    return Checkpoints(run.checkpoints or str(Path(run.out) / CHECKPOINTS), run.keep_checkpoints)


def known_classes(config: Config) -> list[str]:
    """Return the class names recorded by the run; empty if it recorded none."""
    try:
        return [str(name) for name in json.loads((Path(config.run.out) / CLASSES_FILE).read_text())]
    except (OSError, ValueError):
        return []


def quiet(member: Member) -> None:
    """Limit the log to warnings on all ranks but rank 0."""
    if not member.leads:
        logging.getLogger("fastvid").setLevel(logging.WARNING)
