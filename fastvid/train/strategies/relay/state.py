"""Tokens: the state of a model that moves between stages, as bytes of a `fastvid.train.records.checkpoint`.

The store keeps the newest token of every model in memory and, to resume a sweep, in the run's folder.
"""

from __future__ import annotations

from pathlib import Path

from fastvid.errors import StateError
from fastvid.train.records.checkpoint import Checkpoints, decode


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
            files.sweep()
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
