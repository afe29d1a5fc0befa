"""The hub of a sweep: stores the newest state (token) of every model, assigns units to stages, handles dead stages.

A stage is a process that trains, a unit one visit of a model to a partition of the dataset. A token has the bytes of a
`fastvid.train.records.checkpoint`; the newest of every model is in memory and, to resume a sweep, in the run's folder.
"""

from __future__ import annotations

import dataclasses
import logging
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import KW_ONLY, dataclass, field
from pathlib import Path
from typing import Any, Final

from fastvid.errors import StateError, WorkerError
from fastvid.train.records.checkpoint import Checkpoints, decode
from fastvid.train.strategies.link import Link, Listener, token_of_job
from fastvid.train.strategies.relay.scheduler import Ownership, Scheduler, Unit

log = logging.getLogger(__name__)

_PAUSE_S: Final = 0.02  # between two checks whether the sweep is finished
_PATIENCE_S: Final = 2.0  # wait for each stage's thread after a failed sweep: the stage may be dead
_ATTEMPTS: Final = 3
"""Number of stages that may die while they train the same unit before its model is given up. The cause may be the
model, for example if it does not fit into memory."""


class TokenStore:
    """Tokens by model. Files are replaced atomically, so tokens stay intact if the hub is killed."""

    def __init__(self, num_models: int, folder: str) -> None:
        if former := sorted(Path(folder).glob("model-*.token")):
            raise StateError(
                "the tokens of this sweep were written by an earlier version",
                file=former[0],
                hint="finish the sweep with that version, or use another run.out",
            )
        self._files = [Checkpoints(f"{folder}/model-{model:04d}", keep=1) for model in range(num_models)]
        for files in self._files:
            files.prepare()
        newest = [files.newest() for files in self._files]
        self._tokens = [None if found is None else found.data for found in newest]

    def get(self, model: int) -> bytes | None:
        """Return the token of a model; None if it was never trained."""
        return self._tokens[model]

    def put(self, model: int, token: bytes, visits: int) -> None:
        """Replace the token of a model; `visits`: number of visits that the model has made."""
        self._files[model].write(token, visits)
        self._tokens[model] = token

    def history(self) -> tuple[list[list[int]], list[list[float]]]:
        """Return the visited partitions and the scores of every model, for `Scheduler.restore`."""
        states = [{"visits": [], "scores": []} if token is None else decode(token, "token") for token in self._tokens]
        return [list(state["visits"]) for state in states], [list(state["scores"]) for state in states]


@dataclass
class SweepRecord:
    """The events of a sweep."""

    # One entry per finished visit, in the order of their ends: the fields of the unit, ``stage``, ``start`` and
    # ``end`` in seconds since the hub started, and the values reported by the stage.
    visits: list[dict[str, Any]] = field(default_factory=list)
    lost: list[dict[str, Any]] = field(default_factory=list)  # units whose stage died: their fields, ``stage``
    token_bytes: int = 0  # bytes of tokens sent and received by the hub
    dataset_bytes: int = 0  # bytes of partitions that the stages loaded


@dataclass(eq=False)
class Hub:
    """Coordinates the stages of a sweep.

    `timeout_s`: seconds of silence after which a stage is considered dead; also the time to wait while there is no
    stage at all, and that partitions wait for a new stage at the start. `adopt_s`: seconds that the partitions of a
    dead stage wait for a new stage before an existing one takes them. `on_visit`: called with the record of each
    finished visit. `plan`: what stages need to know about the sweep. `port`: port to listen on; 0 for any free one.
    """

    scheduler: Scheduler
    token_store: TokenStore
    _: KW_ONLY
    timeout_s: float
    adopt_s: float
    on_visit: Callable[[dict[str, Any]], None]
    plan: Mapping[str, Any]
    host: str
    port: int

    def __post_init__(self) -> None:
        self.record = SweepRecord()
        self._ownership = Ownership(self.scheduler.num_partitions, start_s=self.timeout_s, adopt_s=self.adopt_s)
        self._changed = threading.Condition()
        self._losses: dict[Unit, int] = {}
        self._began = time.monotonic()
        self._alone_since: float | None = self._began
        self._broken: BaseException | None = None
        self._listener = Listener(self._session, self.timeout_s, token=token_of_job(), host=self.host, port=self.port)
        self.address = self._listener.address

    def run(self) -> SweepRecord:
        """Serve until the sweep is finished. Stages may join and leave at any time."""
        self._listener.start()
        try:
            while not self._over():
                time.sleep(_PAUSE_S)
        finally:
            self._listener.close()
        self._listener.join(self.timeout_s if self._broken is None else _PATIENCE_S)
        if self._broken is not None:
            raise self._broken
        return self.record

    def stop(self, error: BaseException) -> None:
        """Stop the sweep and make `run` raise the error."""
        with self._changed:
            self._broken = self._broken or error
            self._changed.notify_all()

    def _over(self) -> bool:
        with self._changed:
            if self._ownership.adopt(time.monotonic() - self._began):
                self._changed.notify_all()
            if self._ownership.stages:
                self._alone_since = None
            elif self._alone_since is None:
                self._alone_since = time.monotonic()
            elif not self.scheduler.finished and time.monotonic() - self._alone_since > self.timeout_s:
                raise WorkerError(
                    f"no stage (worker process) has been connected for {self.timeout_s:g} s",
                    hint="repeat the command to start stages: the sweep resumes from the stored models",
                )
            return self.scheduler.finished or self._broken is not None

    def _session(self, link: Link) -> None:
        """Serve one stage, in its own thread."""
        try:
            link.send("plan", self.plan)
            with self._changed:
                self._ownership.join(link.number)
                self._changed.notify_all()
            try:
                self._serve(link)
            finally:
                with self._changed:
                    self._ownership.leave(link.number, time.monotonic() - self._began)
                    self._changed.notify_all()
        except WorkerError as error:
            if not self._over():
                log.warning("stage lost: %s", error)
        except BaseException as error:
            # Makes `run` raise the error in the main thread.
            self.stop(error)
            raise

    def _serve(self, link: Link) -> None:
        known: tuple[int, ...] = ()

        def found() -> tuple[tuple[int, ...], Unit | None] | None:
            """Return the stage's partitions, and its next unit or None if the partitions are new to it or the sweep
            has ended; None while there is nothing to do."""
            owned = self._ownership.of(link.number)
            unit = self.scheduler.take(owned) if owned == known and self._broken is None else None
            return (owned, unit) if unit is not None or owned != known or self._ended() else None

        while True:
            owned, unit = link.wait(self._changed, found)
            if unit is not None:
                self._visit(link, unit)
            elif self._ended():
                link.send("end")
                return
            else:
                link.send("own", {"partitions": owned})
                loaded = link.receive()["bytes_moved"]
                with self._changed:
                    self.record.dataset_bytes += loaded
                known = owned

    def _ended(self) -> bool:
        return self.scheduler.finished or self._broken is not None

    def _visit(self, link: Link, unit: Unit) -> None:
        start = time.monotonic() - self._began
        try:
            sent = self.token_store.get(unit.model) or b""
            link.send("unit", dataclasses.asdict(unit), sent)
            answer = link.receive()
            token = b"" if answer.payload is None else answer.payload.numpy().tobytes()
            if answer.kind == "done":
                # Recorded before it is stored: after a kill in between, the visit is repeated and recorded twice.
                with self._changed:
                    row = {**dataclasses.asdict(unit), "stage": link.number, "start": start}
                    self.record.visits.append({**row, "end": time.monotonic() - self._began, **answer.values})
                    self.on_visit(self.record.visits[-1])
                # Stored before the model's next unit can be assigned.
                self.token_store.put(unit.model, token, len(self.scheduler.models[unit.model].visits) + 1)
        except WorkerError:
            self._lost(unit, link.number)
            raise
        with self._changed:
            self.record.token_bytes += len(sent) + len(token)
            if answer.kind == "failed":
                self.scheduler.fail(unit, str(answer["reason"]))
            else:
                score = answer.values.get("score")
                self.scheduler.done(
                    unit, seconds=float(answer["seconds"]), score=float("nan") if score is None else score
                )
            self._changed.notify_all()

    def _lost(self, unit: Unit, seat: int) -> None:
        with self._changed:
            self.record.lost.append({**dataclasses.asdict(unit), "stage": seat})
            self._losses[unit] = self._losses.get(unit, 0) + 1
            if self._losses[unit] >= _ATTEMPTS:
                self.scheduler.fail(unit, f"{_ATTEMPTS} stages died in epoch {unit.epoch}, partition {unit.partition}")
            else:
                self.scheduler.lost(unit)
            self._changed.notify_all()
