"""Writes metrics for TensorBoard."""

from __future__ import annotations

import importlib
from collections.abc import Mapping
from typing import Any

from fastvid.errors import MissingDependency
from fastvid.train.records.observers import Logger, RunInfo


class TensorBoard(Logger):
    """Writes rows as TensorBoard scalars to tensorboard/ in the run's folder, with the samples seen as the step."""

    def __init__(self) -> None:
        try:
            self._make: Any = importlib.import_module("torch.utils.tensorboard").SummaryWriter
        except ImportError as error:
            raise MissingDependency(
                "run.loggers has 'tensorboard', but TensorBoard cannot be imported",
                hint="run `pip install 'fastvid-toolkit[tensorboard]'`, or remove it from run.loggers",
            ) from error
        self._writer: Any = None

    def start(self, run: RunInfo) -> None:
        self._writer = self._make(str(run.out / "tensorboard"), flush_secs=10)

    def write(self, kind: str, row: Mapping[str, Any]) -> None:
        """Write the numbers of a row; a row without ``samples`` is ignored."""
        samples = row.get("samples")
        if samples is None:
            return
        for name, value in row.items():
            if name != "samples" and isinstance(value, (int, float)) and not isinstance(value, bool):
                self._writer.add_scalar(f"{kind}/{name}", value, samples)

    def finish(self, summary: Mapping[str, Any] | None) -> None:  # noqa: ARG002
        """Flush and close."""
        self._writer.close()
