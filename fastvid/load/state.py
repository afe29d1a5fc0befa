"""A loader's state: five values that bring any loader of the same data to the same place.

Neither the world size nor the batch size is among them. The fingerprint is kept in parts, as readable text, so that a
state of other data is refused by naming what differs.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

from fastvid.errors import StateError
from fastvid.format.dataset import Dataset
from fastvid.load.clips.augment import Spatial
from fastvid.load.clips.sampling import Sampler
from fastvid.load.order.mixture import Mixture
from fastvid.load.order.random_draws import DRAWS_VERSION

STATE_VERSION: Final = 1

_KEYS: Final = ("version", "fingerprint", "seed", "epoch", "position")


def fingerprint(
    dataset: Dataset | Mixture, sampler: Sampler, spatial: Spatial, *, order: str, streams: str = "rgb"
) -> dict[str, str]:
    """What decides the clips besides seed, epoch and position: by part, as text."""
    sets = dataset.datasets if isinstance(dataset, Mixture) else (dataset,)
    parts = {
        "dataset": " + ".join(part.dataset_id for part in sets),
        "generation": " + ".join(str(part.generation.number) for part in sets),
        "split": " + ".join(repr(part.split) for part in sets),
        "filter": " + ".join(repr(part.where) for part in sets),
        "order": order,
        "sampler": repr(sampler),
        "augmentation": f"{DRAWS_VERSION} {spatial}",
    }
    # Left out where there are only pictures, so that states from before there was anything else stay good.
    return parts if streams == "rgb" else parts | {"streams": streams}


def check_state(state: Mapping[str, Any], own: Mapping[str, str], num_samples: int) -> tuple[int, int, int]:
    """Seed, epoch and position of a state.

    Args:
        state: As `ClipLoader.state_dict` gave it, perhaps through JSON.
        own: This loader's fingerprint.
        num_samples: Samples of an epoch.

    Raises:
        StateError: The state is no loader state, is of a newer version, or belongs to other data; says which part.
    """
    missing = [key for key in _KEYS if key not in state]
    if missing:
        raise StateError(f"this is no loader state: it lacks {', '.join(missing)}")
    if state["version"] != STATE_VERSION:
        raise StateError(f"loader state has version {state['version']!r}, expected {STATE_VERSION}")
    theirs = state["fingerprint"]
    if not isinstance(theirs, Mapping):
        raise StateError(f"fingerprint of the state is a {type(theirs).__name__}, expected its parts")
    for part in [*own, *(part for part in theirs if part not in own)]:
        if theirs.get(part) != own.get(part):
            raise StateError(
                f"state was made with another {part}: {theirs.get(part)}, this loader has {own.get(part)}",
                hint="make the loader as it was when the state was saved, or start at the beginning of an epoch",
            )
    values = (state["seed"], state["epoch"], state["position"])
    for name, value, limit in zip(
        ("seed", "epoch", "position"), values, (2**64 - 1, 2**64 - 1, num_samples), strict=True
    ):
        if not isinstance(value, int) or isinstance(value, bool) or not 0 <= value <= limit:
            raise StateError(f"{name} of the state is {value!r}, expected an integer from 0 to {limit}")
    return values
