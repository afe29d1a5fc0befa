"""The PyAV back-end fulfils the contract."""

from __future__ import annotations

from fastvid.format.schema import Matrix
from tests.conformance.suite import DetectsOrder, Tolerance, WritesPlanes


class TestPyAv(WritesPlanes, DetectsOrder):
    name = "pyav"
    encodings = ("compact", "intra", "vp9", "mjpeg", "mjpeg-limited", "hevc", "av1", "pyramid")
    cropped = Tolerance(mean=1.4, most=3)
    resized = Tolerance(mean=1.5, most=24)
    matrices = tuple(matrix for matrix in Matrix if matrix is not Matrix.RGB)
