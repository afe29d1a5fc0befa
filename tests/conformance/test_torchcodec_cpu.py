"""The torchcodec back-end on the CPU fulfils the contract."""

from __future__ import annotations

from fastvid.decode.request import Rgb
from fastvid.format.schema import Matrix
from tests.conformance.suite import Conformance, Tolerance


class TestTorchcodecCpu(Conformance):
    name = "torchcodec-cpu"
    encodings = ("compact", "intra", "vp9", "hevc", "pyramid")
    kinds = (Rgb,)
    cropped = Tolerance(mean=1.4, most=3)
    resized = Tolerance(mean=1.6, most=24)
    matrices = (Matrix.SMPTE170M, Matrix.BT470BG, Matrix.UNKNOWN)
