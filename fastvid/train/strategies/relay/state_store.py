"""Stores the newest token of every model, in memory and in the run's folder, for a resume."""

from __future__ import annotations

from typing import Any

from fastvid.errors import StateError
from fastvid.runtime import faults
from fastvid.storage import open_storage
from fastvid.train.strategies.relay import packed_state as tokens


class TokenStore:
    """Tokens by model. Files are replaced atomically, so tokens stay intact if the hub is killed."""

    def __init__(self, num_models: int, folder: str | None = None) -> None:
        self._storage = None if folder is None else open_storage(folder)
        self._tokens: list[bytes | None] = [None] * num_models
        if self._storage is not None:
            self._storage.sweep()
            present = set(self._storage.list("model-"))
            for model in range(num_models):
                if _name(model) in present:
                    self._tokens[model] = self._storage.read(_name(model))

    def get(self, model: int) -> bytes | None:
        """Return the token of a model; None if it was never trained."""
        return self._tokens[model]

    def put(self, model: int, token: bytes) -> None:
        """Replace the token of a model."""
        if self._storage is not None:
            self._storage.write(_name(model), token)
        faults.reach("token_store")
        self._tokens[model] = token

    def history(self) -> tuple[list[list[int]], list[list[float]]]:
        """Return visits and scores of every model, for `Scheduler.restore`."""
        visits: list[list[int]] = []
        scores: list[list[float]] = []
        for model, data in enumerate(self._tokens):
            tree: dict[str, Any] = {"model": model, "visits": [], "scores": []} if data is None else tokens.unpack(data)
            if tree.get("model") != model:
                raise StateError(f"token file of model {model} contains model {tree.get('model')}")
            visits.append([int(partition) for partition in tree["visits"]])
            scores.append([float(score) for score in tree["scores"]])
        return visits, scores


def _name(model: int) -> str:
    return f"model-{model:04d}.token"
