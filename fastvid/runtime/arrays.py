"""Type names for NumPy arrays by dtype; the docstrings of functions state the shapes."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

BoolArray = npt.NDArray[np.bool_]
UInt8Array = npt.NDArray[np.uint8]
UInt32Array = npt.NDArray[np.uint32]
UInt64Array = npt.NDArray[np.uint64]
IntArray = npt.NDArray[np.int64]
Float32Array = npt.NDArray[np.float32]
FloatArray = npt.NDArray[np.float64]
AnyArray = npt.NDArray[np.generic]
RecordArray = npt.NDArray[np.void]
