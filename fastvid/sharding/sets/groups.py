"""Divide groups of samples by shares: no group is divided, classes keep their proportions, the order does not matter.

Groups are visited stratum by stratum, inside a stratum in the order of a keyed hash of their names, and each goes to
the side that lacks most of what its share of the samples so far would be. Therefore, with k sides and a largest group
of G samples, every stratum has in every side its share of samples to within (k - 1) * G, and so has the whole: each
running count is between -(1 - 1/k) * G and (k - 1) * (1 - 1/k) * G below its share, and a stratum is the difference of
two of them.
"""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import pyarrow as pa

from fastvid.errors import UsageError


@dataclass(frozen=True, slots=True)
class Group:
    """Samples that stay together."""

    name: str
    size: int  # number of its samples
    stratum: str = ""  # what its samples have in common with other groups, such as their class


def group_names(table: pa.Table, by: str) -> list[str]:
    """Return the name of each sample's group."""
    names = table.column_names
    if by not in names and by != "parent":
        raise UsageError(f"dataset has no column {by!r} to group by", hint=f"use one of {', '.join(names)}")
    own = table["source_id" if by == "parent" else "key"].to_pylist()
    if by not in names:
        return [str(name) for name in own]
    # The kinds of names differ by a letter, so that a value cannot be taken for a key.
    mark = "" if by in ("parent", "key") else "="
    return [
        str(name) if value is None else f"{mark}{value}" for value, name in zip(table[by].to_pylist(), own, strict=True)
    ]


def make_groups(names: Sequence[str], strata: Sequence[Any]) -> list[Group]:
    """Return the groups of samples, given the group and the stratum of each sample.

    The stratum of a group is the most frequent one of its samples.
    """
    found: dict[str, Counter[str]] = {}
    for name, stratum in zip(names, strata, strict=True):
        found.setdefault(name, Counter())[repr(stratum)] += 1
    return [
        Group(name, counts.total(), min(counts, key=lambda stratum: (-counts[stratum], stratum)))
        for name, counts in found.items()
    ]


def divide(
    groups: Sequence[Group], shares: Sequence[float], *, seed: int = 0, placed: Mapping[str, int] | None = None
) -> dict[str, int]:
    """Return the side of each group, by name.

    `shares`: share of the samples of each side; their sum is one.
    """
    placed = placed or {}
    sides: dict[str, int] = {}
    total, counts = 0, [0] * len(shares)
    for group in sorted(groups, key=lambda group: (group.stratum, group.name not in placed, _rank(group.name, seed))):
        total += group.size
        side = placed.get(group.name)
        if side is None:
            side = max(range(len(shares)), key=lambda at: (shares[at] * total - counts[at], -at))
        counts[side] += group.size
        sides[group.name] = side
    return sides


def _rank(name: str, seed: int) -> tuple[bytes, str]:
    data = f"fastvid-groups-1:{seed}:{name}".encode("utf-8", "surrogateescape")
    return hashlib.blake2b(data, digest_size=8).digest(), name
