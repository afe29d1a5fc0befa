"""Tasks: what a model learns. Each built-in one is referenced by an import string."""

from __future__ import annotations

from typing import Final

BUILT_IN: Final = {
    "classification": "fastvid.train.tasks.classification:Classification",
    "multi_label": "fastvid.train.tasks.multi_label:MultiLabel",
    "regression": "fastvid.train.tasks.regression:Regression",
}
"""Import strings (``module:class``) of the tasks that come with fastvid, by their name in ``task=``."""
