"""Sends metrics to TensorBoard and Weights & Biases."""

from __future__ import annotations

import importlib
import json
import secrets
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

from fastvid.errors import MissingDependency
from fastvid.runtime.values import json_text
from fastvid.storage import LocalStorage
from fastvid.train.records.records import Logger, RunInfo


class TensorBoard(Logger):
    """Writes rows as TensorBoard scalars to tensorboard/ in the run's folder, with the samples seen as the step."""

    def __init__(self) -> None:
        self._make = _imported("torch.utils.tensorboard", "tensorboard").SummaryWriter
        self._writer: Any = None

    def start(self, run: RunInfo) -> None:
        self._writer = self._make(str(run.out / "tensorboard"), flush_secs=10)

    def write(self, kind: str, row: Mapping[str, Any]) -> None:
        for name, value in _numbers(kind, row).items():
            self._writer.add_scalar(name, value, row["samples"])

    def finish(self, summary: Mapping[str, Any] | None) -> None:  # noqa: ARG002
        """Flush and close."""
        self._writer.close()


RUN_FILE: Final = "wandb.json"
"""File in the run's folder with the ID of its wandb run, so that a resumed run continues the same wandb run."""


class Wandb(Logger):
    """Logs the configuration, the rows of metrics and the summary to a run of wandb.

    wandb's environment variables set the destination: WANDB_PROJECT (by default "fastvid"), WANDB_ENTITY, WANDB_MODE
    and others. Each number is logged as ``KIND/NAME`` over ``samples``. A resumed run continues the same wandb run.
    """

    def __init__(self) -> None:
        self._wandb = _imported("wandb", "wandb")
        self._run: Any = None

    def start(self, run: RunInfo) -> None:
        settings = self._wandb.Settings()
        self._run = self._wandb.init(
            id=_identity(run.out),
            resume="allow",
            dir=str(run.out),
            project=settings.project or "fastvid",
            name=settings.run_name or run.out.name,
            config=dict(run.config),
        )
        # wandb's own step must not decrease, but samples do when a resumed run repeats work: so use them as the x axis.
        self._run.define_metric("samples")
        self._run.define_metric("*", step_metric="samples")

    def write(self, kind: str, row: Mapping[str, Any]) -> None:
        if "samples" in row:
            self._run.log({"samples": row["samples"], **_numbers(kind, row)})

    def finish(self, summary: Mapping[str, Any] | None) -> None:
        if summary is not None:
            self._run.summary.update({name: summary[name] for name in summary if name != "lineage"})
        self._run.finish(exit_code=1 if summary is None else 0)


def _identity(out: Path) -> str:
    """Return the ID of the wandb run of a folder; drawn at random and stored there at the first start."""
    path = out / RUN_FILE
    try:
        return str(json.loads(path.read_text())["id"])
    except (OSError, ValueError, KeyError):
        identity = secrets.token_hex(8)
        LocalStorage(out).write(RUN_FILE, f"{json_text({'id': identity})}\n".encode())
        return identity


def _imported(module: str, name: str) -> Any:
    """Import the library of a logger."""
    try:
        return importlib.import_module(module)
    except ImportError as error:
        raise MissingDependency(
            f"run.loggers has {name!r}, but {module} cannot be imported",
            hint=f"run `pip install 'fastvid-toolkit[{name}]'`, or remove it from run.loggers",
        ) from error


def _numbers(kind: str, row: Mapping[str, Any]) -> dict[str, int | float]:
    """Return the numbers of a row by ``KIND/NAME``, without ``samples`` itself; empty for a row without ``samples``."""
    return {
        f"{kind}/{name}": value
        for name, value in row.items()
        if "samples" in row and name != "samples" and isinstance(value, (int, float)) and not isinstance(value, bool)
    }
