"""What changes in the members of samples that one dataset takes from another: keys, names of sources, labels."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from fastvid.format.tar import to_json

Members = tuple[str, Mapping[str, bytes]]
"""Key of a sample, and its members by suffix."""


@dataclass(frozen=True, slots=True)
class Renaming:
    """What changes in the members of a dataset's samples."""

    prefix: str = ""
    labels: Mapping[int, int] = field(default_factory=dict)

    def __bool__(self) -> bool:
        return bool(self.prefix or self.labels)

    def apply(self, key: str, members: Mapping[str, bytes]) -> Members:
        """Return key and members of a sample as the new dataset has them."""
        made = dict(members)
        if "json" in made:
            record = json.loads(made["json"])
            for fields in (record, record.get("annotations")):
                if isinstance(fields, dict):
                    self._change(fields)
            made["json"] = to_json(record)
        if made.get("cls", b"").isdigit():
            number = int(made["cls"])
            made["cls"] = str(self.labels.get(number, number)).encode()
        return f"{self.prefix}{key}", made

    def rename(self, key: str) -> tuple[str, Callable[[Mapping[str, Any]], Mapping[str, Any]]]:
        """Return the key of a sample as the new dataset has it, and how its facts change."""

        def change(facts: Mapping[str, Any]) -> Mapping[str, Any]:
            fields = dict(facts)
            self._change(fields)
            return fields

        return f"{self.prefix}{key}", change

    def _change(self, fields: dict[str, Any]) -> None:
        for name in ("key", "source_id", "parent"):
            if isinstance(fields.get(name), str):
                fields[name] = f"{self.prefix}{fields[name]}"
        if type(fields.get("label")) is int:
            fields["label"] = self.labels.get(fields["label"], fields["label"])
