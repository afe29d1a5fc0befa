"""Select rows of a table by a condition in SQL, such as ``fps >= 24 and class = 'archery'``.

DuckDB parses and evaluates the condition, so its whole expression language works: ``LIKE``, ``IN``, ``BETWEEN``,
``IS NULL``, ``'x' IN labels`` for a list column, arithmetic, ``length(caption)``, regular expressions. A condition
reads the table alone: it sees no file, no network and no variable of the program.
"""

from __future__ import annotations

import re
from typing import Final

import numpy as np
import pyarrow as pa

from fastvid.errors import UsageError
from fastvid.runtime.arrays import IntArray
from fastvid.runtime.cores import available_cores

_ROW: Final = "__row"


def matching_rows(table: pa.Table, condition: str) -> IntArray:
    """Return the rows for which a condition is true, as SQL defines it: a comparison with NULL is not.

    Args:
        table: The columns that the condition may name.
        condition: What could follow WHERE in DuckDB's SQL.

    Returns:
        Row numbers, ascending, int64 [M].

    Raises:
        UsageError: If the text is not a condition, names an unknown column, or compares what cannot be compared.
    """
    import duckdb  # takes 50 ms to import, and few programs filter

    numbered = table.append_column(_ROW, pa.array(np.arange(table.num_rows, dtype=np.int64)))
    try:
        with duckdb.connect(
            ":memory:", config={"enable_external_access": "false", "threads": available_cores()}
        ) as engine:
            engine.execute("SET python_enable_replacements = false")
            engine.execute("SET lock_configuration = true")
            chosen = engine.from_arrow(numbered).filter(condition).project(_ROW).fetchnumpy()[_ROW]
    except duckdb.Error as error:
        raise _translated(error, condition, table) from error
    return np.sort(np.asarray(chosen, dtype=np.int64))


def _translated(error: Exception, condition: str, table: pa.Table) -> UsageError:
    reason = str(error).partition("\n")[0]
    hint = f"columns are {', '.join(sorted(table.column_names))}"
    unknown = re.search(r'Referenced column "([^"]*)" not found', reason)
    if unknown and f'"{unknown[1]}"' in condition:
        hint = f"write text in single quotes: '{unknown[1]}'; {hint}"
    return UsageError(f"cannot select by where={condition!r}: {reason}", hint=hint)
