"""The base class of tasks: what a model learns from a batch, and how well it does.

The training loop knows neither labels nor losses. It asks the task of the run:

    loader_arguments, names, check_data     before the first step: which data it needs
    prepare, inputs                         change a batch, and select the model's arguments from it
    loss                                    one loss per clip, which training minimizes
    measure, metrics                        numbers per clip, and metrics computed from their sums
    predict, target, score                  predictions, and metrics computed from those of a whole split

`Sums` are named numbers that add up over clips, steps and ranks. A task need not know about ranks: the loop weights and
masks clips, and sums numbers over micro-batches, steps and ranks.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, fields, is_dataclass
from typing import Any, ClassVar, Final, Protocol, TypeVar

import torch
from torch import Tensor

from fastvid.errors import UsageError
from fastvid.format.dataset import Dataset
from fastvid.load.batch.batch import Batch
from fastvid.load.order.draws import Draws, Purpose
from fastvid.load.order.mixture import Mixture, part_of
from fastvid.runtime.names import import_name
from fastvid.runtime.values import check_choice
from fastvid.train.tasks import BUILT_IN

Base = TypeVar("Base")

LOSS: Final = "loss"
CLIPS: Final = "clips"
"""Names of the two entries that all `Sums` have: the sum of the clips' losses, and the number of clips."""


class Sums(Mapping[str, Tensor]):
    """Sums over clips by name, in one vector, so that one all-reduce sums them over the ranks. Ordered.

    `vector`: float64 [names], on the device of the clips.
    """

    def __init__(self, names: Sequence[str], vector: Tensor) -> None:
        self.names, self.vector = tuple(names), vector

    @classmethod
    def over(cls, rows: Mapping[str, Tensor], counted: Tensor) -> Sums:
        """Sum numbers over the clips that count.

        `rows`: by name, one number per clip, [b]; must include LOSS. `counted`: which clips count, bool [b]; the
        numbers of the other clips are ignored, even if NaN.
        """
        numbers = [value.double() for value in rows.values()]
        stacked = torch.stack([*numbers, torch.ones_like(numbers[0])])
        return cls([*rows, CLIPS], torch.where(counted, stacked, 0.0).sum(1))

    def __getitem__(self, name: str) -> Tensor:
        if name not in self.names:
            raise KeyError(f"there is no sum {name!r}; there are {', '.join(self.names)}")
        return self.vector[self.names.index(name)]

    def __iter__(self) -> Iterator[str]:
        return iter(self.names)

    def __len__(self) -> int:
        return len(self.names)

    def __add__(self, other: Sums) -> Sums:
        assert self.names == other.names, (self.names, other.names)
        return Sums(self.names, self.vector + other.vector)

    def numbers(self, vector: Tensor | None = None) -> dict[str, float]:
        """Return the sums as plain numbers by name; `vector` is used instead of the own vector if given."""
        return dict(zip(self.names, (self.vector if vector is None else vector).tolist(), strict=True))


class DataSettings(Protocol):
    """The fields of `fastvid.train.DataConfig` that tasks read."""

    @property
    def label(self) -> str: ...

    @property
    def group_size(self) -> int: ...

    @property
    def streams(self) -> tuple[str, ...]: ...


class ModelSettings(Protocol):
    """The fields of `fastvid.train.ModelConfig` that tasks read."""

    @property
    def num_classes(self) -> int | None: ...


class RunSettings(Protocol):
    """The fields of `fastvid.train.Config` that tasks read."""

    @property
    def data(self) -> DataSettings: ...

    @property
    def model(self) -> ModelSettings: ...


@dataclass(frozen=True)
class Phase:
    """Whether a batch is used for training or evaluation, and what random numbers depend on.

    Attributes:
        training: Whether the batch is trained on; False in an evaluation.
        seed: Seed of the run.
        group_size: Consecutive clips of a batch that are always on one rank, see `DataConfig.group_size`.
    """

    training: bool
    seed: int = 0
    group_size: int = 1

    def seeds(self, batch: Batch) -> list[int]:
        """Return a random seed per clip, 0 to 2**63 - 1, the same on any number of ranks.

        In training it depends on the run's seed, the epoch and the clip's position; in an evaluation on the run's seed
        and the sample, so that every evaluation draws the same numbers.
        """
        epoch, places = (batch.epoch, batch.position) if self.training else (0, batch.sample)
        return [Draws(self.seed, epoch, max(0, place)).words(Purpose.TASK, 1)[0] >> 1 for place in places.tolist()]


@dataclass(frozen=True)
class Task:
    """Base class of all tasks; override the methods that differ. Options are fields of a frozen dataclass.

    `outputs` are whatever the model returns: a tensor, a dict or an object such as transformers' ``ModelOutput``.
    All methods are pure functions of their arguments.

    Attributes:
        metric: Name of the metric that models are compared by, for the best checkpoint and in sweeps.
        higher_is_better: Whether a higher value of `metric` is better.
        scores_split: Whether an evaluation during the run also calls `score`, with the predictions for the whole split,
            which take memory on every rank; for metrics that cannot be computed from sums over clips.
        probabilities: Whether predictions are probabilities of classes, shown highest first.
    """

    metric: ClassVar[str] = LOSS
    higher_is_better: ClassVar[bool] = False
    scores_split: ClassVar[bool] = False
    probabilities: ClassVar[bool] = False

    def check(self, config: RunSettings) -> None:
        """Raise a UsageError for settings that the task does not support; called before data is read."""

    def loader_arguments(self, data: DataSettings) -> dict[str, Any]:  # noqa: ARG002
        """Return the arguments of `fastvid.ClipLoader` that deliver what the task needs, such as ``fields=``."""
        return {}

    def names(self, dataset: Dataset | Mixture, data: DataSettings) -> tuple[str, ...]:  # noqa: ARG002
        """Return the names of the model's outputs; how many there are is the default of `model.num_classes`."""
        return tuple(dataset.classes)

    def check_data(self, dataset: Dataset | Mixture, config: RunSettings) -> None:
        """Raise a UsageError if a sample of a split cannot be trained on or scored; called before the first step."""

    def prepare(self, batch: Batch, phase: Phase) -> Batch:  # noqa: ARG002
        """Return a batch with further or changed entries, one row per clip, for example mixed clips or masks."""
        return batch

    def inputs(self, batch: Batch) -> tuple[Any, ...]:
        """Return the model's arguments: by default one tensor per stream, pictures before flow."""
        return (batch.video,) if "flow" not in batch or batch.flow is batch.video else (batch.video, batch.flow)

    def loss(self, outputs: Any, batch: Batch) -> Tensor:
        """Return one loss per clip, floating point [b]; the losses of masked clips are ignored.

        By default the entry ``loss``, [b], of the outputs of a model that computes its own loss.

        Args:
            outputs: What the model returned for these clips.
            batch: The clips, after `prepare`; only the rows of one micro-batch.
        """
        del batch
        return output(outputs, LOSS)

    def scored(self, batch: Batch) -> Tensor:
        """Return which clips count in the metrics, bool [b]; by default the clips that are not masked."""
        return batch.valid

    def measure(self, outputs: Any, batch: Batch) -> dict[str, Tensor]:  # noqa: ARG002
        """Return further numbers per clip by name, each [b], whose sums over clips `metrics` needs.

        If there is an entry ``loss``, it is reported instead of the loss that training minimizes.
        """
        return {}

    def metrics(self, sums: Mapping[str, float]) -> dict[str, float]:  # noqa: ARG002
        """Return metrics, with units in their names, computed from sums over clips; the mean loss is always added.

        Args:
            sums: Sums of the numbers of `measure` and of ``loss``, and ``clips``, the number of clips, which may be 0.
        """
        return {}

    def predict(self, outputs: Any) -> Tensor:  # noqa: ARG002
        """Return predictions, floating point [b, k]; they are then averaged over the views of each video."""
        raise UsageError(
            f"{type(self).__name__} makes no predictions",
            hint="use a task that has a method predict, or read the metrics of the run's own evaluations",
        )

    def target(self, batch: Batch) -> Tensor:  # noqa: ARG002
        """Return what `score` compares predictions with, [b, ...]."""
        raise _lacks(self, "target")

    def score(self, predictions: Tensor, targets: Tensor) -> dict[str, float]:  # noqa: ARG002
        """Return metrics by name, with units in the names, that compare predictions with targets.

        Args:
            predictions: Means over the views of each sample, float64 [n, k], on the CPU.
            targets: What `target` returned for these samples, float64 [n, t], flattened, on the CPU.
        """
        raise _lacks(self, "score")

    def details(
        self,
        predictions: Tensor,  # noqa: ARG002
        targets: Tensor,  # noqa: ARG002
        names: Sequence[str],  # noqa: ARG002
    ) -> tuple[list[dict[str, Any]], Tensor | None]:
        """Return what the report of an evaluation shows besides the metrics; arguments as in `score`.

        Returns:
            A row for each output of the model; and the confusion matrix, int64 [k, k], numbers of samples by true
            class (row) and predicted class (column), or None if the task does not predict classes.
        """
        return [], None

    @property
    def predicts(self) -> bool:
        """Whether the task makes predictions."""
        return type(self).predict is not Task.predict

    def value(self, numbers: Mapping[str, float]) -> float:
        """Return the value of `metric` in `numbers`, negated unless higher is better: higher results are better.

        Raises:
            UsageError: If `numbers` does not have `metric`.
        """
        if self.metric not in numbers:
            raise UsageError(
                f"{type(self).__name__}.metric is {self.metric!r}, which is none of its metrics",
                hint=f"set it to one of {', '.join(numbers)}",
            )
        number = numbers[self.metric]
        return number if self.higher_is_better else -number

    def row(self, sums: Mapping[str, float]) -> dict[str, float]:
        """Return the mean loss and the task's metrics, computed from sums over clips."""
        return {LOSS: sums[LOSS] / max(1.0, sums["clips"]), **self.metrics(sums)}

    def losses(self, outputs: Any, batch: Batch) -> Tensor:
        """Return `loss` after checking its shape.

        Raises:
            UsageError: If it is not one number per clip.
        """
        found = self.loss(outputs, batch)
        rows = batch.num_rows
        if not isinstance(found, Tensor) or found.shape != (rows,) or not found.is_floating_point():
            raise UsageError(
                f"{type(self).__name__}.loss returned {_described(found)}, expected floating point [{rows}]",
                hint="return one loss per clip, for example with reduction='none' and .flatten(1).mean(1)",
            )
        return found

    @torch.no_grad()
    def sums(self, outputs: Any, batch: Batch, losses: Tensor | None = None) -> Sums:
        """Return the sums of the loss and the numbers of `measure` over the clips that count.

        `losses`: the result of `losses` for these clips, [b], if it is known; None computes it.
        """
        rows = self.measure(outputs, batch)
        if LOSS not in rows:
            rows = {LOSS: self.losses(outputs, batch) if losses is None else losses.detach(), **rows}
        for name, value in rows.items():
            if value.shape != (batch.num_rows,):
                raise UsageError(
                    f"{type(self).__name__}.measure returned {_described(value)} as {name!r}, "
                    f"expected [{batch.num_rows}]",
                    hint="return one number per clip; the trainer adds them up",
                )
        return Sums.over(rows, self.scored(batch))


def check_column(
    dataset: Dataset | Mixture, column: str, is_right: Callable[[Any], bool], what: str, *, hint: str
) -> None:
    """Raise UsageError unless `is_right` returns True for every sample's value in a column of the annotations.

    `what`: a noun for a right value, for the message.
    """
    values = dataset.column(column).to_pylist()
    wrong = [row for row, value in enumerate(values) if not is_right(value)]
    if wrong:
        first = wrong[0]
        owner, _ = part_of(dataset, first)
        raise UsageError(
            f"{len(wrong)} of {len(values)} samples have no {what} in column {column!r}; "
            f"the first has {values[first]!r}",
            key=dataset.key(first),
            split=owner.split,
            file=owner.storage.url,
            hint=hint,
        )


def output(outputs: Any, name: str = "logits") -> Tensor:
    """Return a model's output tensor, or its entry `name`, as a tensor of at least single precision."""
    found = outputs
    if not isinstance(outputs, Tensor):
        found = outputs.get(name) if isinstance(outputs, Mapping) else getattr(outputs, name, None)
    if not isinstance(found, Tensor):
        known = f" with {', '.join(map(str, outputs))}" if isinstance(outputs, Mapping) else ""
        raise UsageError(
            f"the model returned {type(outputs).__name__}{known}, expected a tensor or something with {name!r}",
            hint=f"return a tensor or {name!r} from the model, or override the methods of the task that read it",
        )
    return found.float() if found.dtype in (torch.float16, torch.bfloat16) else found


def find_class(setting: str, name: str, known: Mapping[str, str], base: type[Base]) -> type[Base]:
    """Return the class derived from `base` that a setting names: one of `known`, import strings by name, or
    ``module:class``."""
    check_choice(f"unknown {setting} {{}}", name, sorted(known), "module:class")
    kind = import_name(setting, known.get(name, name))
    if not (isinstance(kind, type) and issubclass(kind, base)):
        told = f"{setting} is {name!r}, which is not a {base.__name__.lower()}"
        raise UsageError(told, hint=f"derive the class from fastvid.train.{base.__name__}")
    return kind


def find_task(name: str) -> type[Task]:
    """Return the class of a task, given its name or ``module:class``."""
    return find_class("task", name, BUILT_IN, Task)


def check_task(task: object) -> None:
    """Check that the value of `Config.task` is a task."""
    if not isinstance(task, Task):
        raise UsageError(
            f"task is {task!r}, which is not a task",
            hint="give an object of a class derived from fastvid.train.Task, such as Classification()",
        )
    assert is_dataclass(task)
    known = {field.name for field in fields(task)}
    if other := sorted(name for name in vars(task) if name not in known and not name.startswith("_")):
        raise UsageError(
            f"{type(task).__name__}.{other[0]} is not a field, so a run could not record it",
            hint=f"decorate {type(task).__name__} with @dataclass(frozen=True) and annotate its options",
        )


def _described(value: object) -> str:
    if isinstance(value, Tensor):
        return f"{str(value.dtype).removeprefix('torch.')} {list(value.shape)}"
    return type(value).__name__


def _lacks(task: Task, method: str) -> UsageError:
    return UsageError(
        f"{type(task).__name__} has the method predict, but no {method}",
        hint="predictions are scored by both target and score",
    )
