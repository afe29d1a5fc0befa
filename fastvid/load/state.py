"""A loader's state: five values from which any loader of the same data can resume.

It contains neither the world size nor the batch size. The fingerprint consists of named parts in readable text, so that
an error can say which part of a state does not match the loader.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

from fastvid.errors import StateError
from fastvid.format.dataset import Dataset
from fastvid.load.clips.clip import ClipRules
from fastvid.load.order.draws import DRAWS_VERSION
from fastvid.load.order.mixture import Mixture, parts_of

STATE_VERSION: Final = 1

_KEYS: Final = ("version", "fingerprint", "seed", "epoch", "position")


def fingerprint(dataset: Dataset | Mixture, rules: ClipRules, *, order: str, streams: str = "rgb") -> dict[str, str]:
    """Return everything that determines the clips besides seed, epoch and position, as text by part."""
    sets = parts_of(dataset)
    parts = {
        "dataset": " + ".join(part.dataset_id for part in sets),
        "generation": " + ".join(str(part.generation.number) for part in sets),
        "split": " + ".join(repr(part.split) for part in sets),
        "filter": " + ".join(f"{part.where!r} {part.selection}".strip() for part in sets),
        "order": order,
        "sampler": rules.sampler_text,
        "augmentation": f"{DRAWS_VERSION} {rules.spatial_text}",
    }
    # Omitted for "rgb" alone, so that states saved before other streams existed still load.
    return parts if streams == "rgb" else parts | {"streams": streams}


def check_state(state: Mapping[str, Any], own: Mapping[str, str], num_samples: int) -> tuple[int, int, int]:
    """Return the seed, epoch and position of a state.

    `num_samples`: samples per epoch.
    """
    if not isinstance(state, Mapping):
        raise StateError(f"not a loader state: {state!r}", hint="pass a ClipLoader's state_dict()")
    missing = [key for key in _KEYS if key not in state]
    if missing:
        raise StateError(f"not a loader state: it lacks {', '.join(missing)}", hint="pass a ClipLoader's state_dict()")
    if state["version"] != STATE_VERSION:
        raise StateError(f"loader state has version {state['version']!r}, expected {STATE_VERSION}")
    theirs = state["fingerprint"]
    if not isinstance(theirs, Mapping):
        raise StateError(f"fingerprint of the state is a {type(theirs).__name__}, expected a mapping of its parts")
    for part in [*own, *(part for part in theirs if part not in own)]:
        if theirs.get(part) != own.get(part):
            raise StateError(
                f"state was saved with another {part}: {theirs.get(part)}, this loader has {own.get(part)}",
                hint="create the loader with the same arguments and data, or start at the beginning of an epoch",
            )
    values = (state["seed"], state["epoch"], state["position"])
    for name, value, limit in zip(
        ("seed", "epoch", "position"), values, (2**64 - 1, 2**64 - 1, num_samples), strict=True
    ):
        if not isinstance(value, int) or isinstance(value, bool) or not 0 <= value <= limit:
            raise StateError(f"{name} of the state is {value!r}, expected an integer from 0 to {limit}")
    return values
