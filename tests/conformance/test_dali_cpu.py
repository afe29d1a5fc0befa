"""The DALI back-end on the CPU fulfils the contract."""

from __future__ import annotations

from fastvid.decode.request import Rgb
from fastvid.format.schema import Matrix
from tests.conformance.suite import Conformance, Tolerance


class TestDaliCpu(Conformance):
    name = "dali-cpu"
    encodings = ("vp9", "vp9-intra", "mjpeg", "mjpeg-limited")
    kinds = (Rgb,)
    cropped = Tolerance(mean=2.2, most=16)
    resized = Tolerance(mean=1.6, most=24)
    matrices = (Matrix.SMPTE170M, Matrix.BT470BG, Matrix.UNKNOWN)
