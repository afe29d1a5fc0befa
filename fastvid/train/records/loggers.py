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
"""File in the run's folder with the identity of its wandb run, which a resumed run continues."""


class Wandb(Logger):
    """Logs the configuration, the rows of metrics and the summary to a run of wandb.

    wandb's own variables say where: WANDB_PROJECT (by default "fastvid"), WANDB_ENTITY, WANDB_MODE and others. Each
    number is ``KIND/NAME`` over ``samples``. A resumed run continues the same wandb run.
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
        # Not wandb's step, which must not decrease, as it does when a resumed run repeats work.
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
    """Return the identity of the wandb run of a folder, made at the first start."""
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
    """Return the numbers of a row as ``KIND/NAME``, but for their place; empty for a row without ``samples``."""
    return {
        f"{kind}/{name}": value
        for name, value in row.items()
        if "samples" in row and name != "samples" and isinstance(value, (int, float)) and not isinstance(value, bool)
    }
