"""The newest token of every model, in memory and in the run's folder, where a later run finds them."""

from __future__ import annotations

from typing import Any

from fastvid.errors import StateError
from fastvid.runtime import faults
from fastvid.storage import open_storage
from fastvid.train.strategies.relay import packed_state as tokens


class Shelf:
    """Tokens by model. Each file is replaced atomically, so a hub that is killed leaves whole tokens.

    Args:
        num_models: M.
        folder: Where they are kept; None keeps them in memory alone.
    """

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
        """A model's token; None when it was never trained."""
        return self._tokens[model]

    def put(self, model: int, token: bytes) -> None:
        """Replaces a model's token."""
        if self._storage is not None:
            self._storage.write(_name(model), token)
        faults.reach("shelf")
        self._tokens[model] = token

    def history(self) -> tuple[list[list[int]], list[list[float]]]:
        """Visits and scores of every model, for `fastvid.train.strategies.relay.scheduler.Scheduler.restore`.

        Raises:
            FormatError: A token is damaged.
            StateError: It is of something else.
        """
        visits: list[list[int]] = []
        scores: list[list[float]] = []
        for model, data in enumerate(self._tokens):
            tree: dict[str, Any] = {"model": model, "visits": [], "scores": []} if data is None else tokens.unpack(data)
            if tree.get("model") != model:
                raise StateError(f"token of model {tree.get('model')} lies in the place of model {model}")
            visits.append([int(partition) for partition in tree["visits"]])
            scores.append([float(score) for score in tree["scores"]])
        return visits, scores


def _name(model: int) -> str:
    return f"model-{model:04d}.token"
