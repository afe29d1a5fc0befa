"""What a run tells loggers and callbacks, those of the user among them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import nn

from fastvid.errors import FastvidError, UsageError
from fastvid.runtime.import_names import check_keywords, import_name


@dataclass(frozen=True, slots=True)
class RunInfo:
    """A run at its start.

    Attributes:
        out: Folder of the run.
        config: The configuration with everything resolved, as JSON values.
        rank: Number of this process.
        world_size: Number of processes.
        samples: Samples that the model has been trained on: 0, or more if the run resumes.
        model: The model, without the wrapper of a strategy.
    """

    out: Path
    config: Mapping[str, Any]
    rank: int
    world_size: int
    samples: int
    model: nn.Module


class Logger:
    """Sends what a run records to another place; called on rank 0 alone. Override what it needs.

    ``run.loggers=my_code:MyLogger`` names a class, or a function that returns an object; it is called without
    arguments. A dry run makes the object, but does not start it. An exception in a method ends the run.
    """

    def start(self, run: RunInfo) -> None:
        """Begin; called once, before the first row."""

    def write(self, kind: str, row: Mapping[str, Any]) -> None:
        """Record a row of metrics.

        Args:
            kind: "start", "train" or "eval", see `fastvid.train.records.metrics.Recorder`.
            row: JSON values by name; numbers that are not finite are None. ``samples`` is their place in the run. After
                a resume, samples may repeat.
        """

    def finish(self, summary: Mapping[str, Any] | None) -> None:
        """End; called once.

        Args:
            summary: What summary.json contains; None if an error ends the run.
        """


class Callback:
    """Does something at fixed points of a run; called on every rank. Override what it needs.

    ``run.callbacks=my_code:MyCallback`` names a class, or a function that returns an object; it is called without
    arguments. A dry run makes the object, but calls no method. An exception in a method on any rank ends the run. What
    should happen once asks for ``run.rank == 0`` in `on_start`; a method that communicates must do so on every rank,
    and not at all with a strategy whose ranks share no batches.
    """

    def on_start(self, run: RunInfo) -> None:
        """Called before the first step."""

    def on_step(self, row: Mapping[str, Any]) -> None:
        """Called every `run.log_every_steps` steps, with the row of metrics, which is that of all ranks."""

    def on_eval(self, row: Mapping[str, Any]) -> None:
        """Called after an evaluation, with the row of metrics; the model has its trained weights again."""

    def on_checkpoint(self, samples: int) -> None:
        """Called when the state after so many samples is complete on every rank; rank 0 then writes it."""

    def on_end(self, summary: Mapping[str, Any]) -> None:
        """Called after the last step, also if a signal stopped the run; not if an error ends it."""


class Observers:
    """Loggers or callbacks, called in order."""

    def __init__(self, setting: str, members: Mapping[str, object] | None = None) -> None:
        self.setting, self.members = setting, dict(members or {})

    def call(self, method: str, *arguments: Any) -> None:
        """Call a method of each."""
        for name, member in self.members.items():
            try:
                getattr(member, method)(*arguments)
            except FastvidError:
                raise
            except Exception as error:
                raise FastvidError(
                    f"{self.setting} {name!r} failed in {method}: {type(error).__name__}: {error}",
                    hint=f"correct it, or remove it from {self.setting}; the same command then resumes the run",
                ) from error


def observers(setting: str, names: Sequence[str], base: type, known: Mapping[str, str]) -> Observers:
    """Return loggers or callbacks by name."""
    members = {}
    for name in names:
        make = import_name(setting, known.get(name, name))
        if not callable(make):
            raise UsageError(f"{setting} {name!r} is not callable", hint="name a class, or a function that returns it")
        check_keywords(setting, name, make, ())
        members[name] = make()
        if not isinstance(members[name], base):
            raise UsageError(
                f"{setting} {name!r} is a {type(members[name]).__name__}",
                hint=f"derive its class from fastvid.train.{base.__name__}",
            )
    return Observers(setting, members)
