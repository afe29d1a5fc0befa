"""Lines of the log: one for each record, whatever names are in it."""

from __future__ import annotations

import copy
import logging
import os
import sys

from fastvid.errors import visible


class LineFormatter(logging.Formatter):
    """Formats records with the time; text in their arguments cannot control the terminal or forge a line."""

    def __init__(self) -> None:
        super().__init__("%(asctime)s %(levelname).1s %(message)s", "%H:%M:%S")

    def format(self, record: logging.LogRecord) -> str:
        """Return a record's line."""
        safe = copy.copy(record)
        if isinstance(record.args, tuple):
            safe.args = tuple(visible(value) if isinstance(value, str) else value for value in record.args)
        # The text of an argument that is an object, such as an exception, may have lines of its own.
        safe.msg, safe.args = "\n".join(map(visible, safe.getMessage().split("\n"))), None
        return super().format(safe)


def log_to_stderr() -> None:
    """Write the log to stderr at the level of the variable FASTVID_LOG."""
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(LineFormatter())
    logging.basicConfig(level=os.environ.get("FASTVID_LOG", "INFO").upper(), handlers=[handler])
