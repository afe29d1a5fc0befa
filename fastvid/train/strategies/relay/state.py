"""Tokens: the state of a model that moves between stages, as bytes of a `fastvid.train.records.checkpoint`.

The store keeps the newest token of every model in memory and, to resume a sweep, in the run's folder.
"""

from __future__ import annotations

from pathlib import Path

from fastvid.errors import StateError
from fastvid.train.records.checkpoint import Checkpoints, decode


class TokenStore:
    """Tokens by model. Files are replaced atomically, so tokens stay intact if the hub is killed."""

    def __init__(self, num_models: int, folder: str | None = None) -> None:
        if folder is not None and (former := sorted(Path(folder).glob("model-*.token"))):
            raise StateError(
                "the tokens of this sweep were written by an earlier version",
                file=former[0],
                hint="finish the sweep with that version, or use another run.out",
            )
        self._files = [
            None if folder is None else Checkpoints(f"{folder}/model-{model:04d}", keep=1)
            for model in range(num_models)
        ]
        self._tokens = [_newest(files) for files in self._files]

    def get(self, model: int) -> bytes | None:
        """Return the token of a model; None if it was never trained."""
        return self._tokens[model]

    def put(self, model: int, token: bytes, visits: int) -> None:
        """Replace the token of a model; `visits`: number of visits that the model has made."""
        if (files := self._files[model]) is not None:
            files.write(token, visits)
        self._tokens[model] = token

    def history(self) -> tuple[list[list[int]], list[list[float]]]:
        """Return the visited partitions and the scores of every model, for `Scheduler.restore`."""
        states = [{"visits": [], "scores": []} if token is None else decode(token, "token") for token in self._tokens]
        return [list(state["visits"]) for state in states], [list(state["scores"]) for state in states]


def _newest(files: Checkpoints | None) -> bytes | None:
    if files is None:
        return None
    files.sweep()
    found = files.newest()
    return None if found is None else found.data
