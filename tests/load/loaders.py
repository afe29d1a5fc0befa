"""Make loaders from flat options, so that a test can vary any of them by name."""

from dataclasses import fields
from weakref import WeakSet

from fastvid.load.loader import ClipLoader
from fastvid.load.options import Output, Skip, Workers

OPEN: WeakSet[ClipLoader] = WeakSet()
"""Loaders made here, which are closed after each test."""

_GROUPS = {"output": Output, "workers": Workers}
_NAMES = {field.name: group for group, kind in _GROUPS.items() for field in fields(kind)}


def flat(options):
    """Return the arguments of `ClipLoader` for flat options: fields of `Output` and `Workers` by name, ``workers`` as
    the kind of the workers, ``on_error="skip"`` with ``max_skip_rate``."""
    made, grouped = {}, {"output": {}, "workers": {}}
    options = dict(options)
    rate = options.pop("max_skip_rate", Skip().max_rate)
    if options.get("on_error") == "skip":
        options["on_error"] = Skip(rate)
    for name, value in options.items():
        if name == "workers" and isinstance(value, str):
            grouped["workers"]["kind"] = value
        elif name in _NAMES:
            grouped[_NAMES[name]][name] = value
        else:
            made[name] = value
    return made | {group: _GROUPS[group](**chosen) for group, chosen in grouped.items() if chosen}


def clip_loader(dataset, **options) -> ClipLoader:
    """Return a loader of one rank, unless asked otherwise; see `flat`."""
    loader = ClipLoader(dataset, **flat({"rank": 0, "world_size": 1} | options))
    OPEN.add(loader)
    return loader
