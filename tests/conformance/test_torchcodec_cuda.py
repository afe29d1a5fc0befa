"""The torchcodec back-end on a GPU fulfils the contract."""

from __future__ import annotations

from fastvid.decode.request import DeviceRgb
from fastvid.format.schema import Matrix
from tests.conformance.suite import Conformance, Tolerance


class TestTorchcodecCuda(Conformance):
    name = "torchcodec-cuda"
    encodings = ("compact", "intra", "vp9", "hevc", "pyramid")
    kinds = (DeviceRgb,)
    size = (144, 160)  # the least that NVDEC decodes of HEVC
    # Its converter interpolates chroma as DALI's does; its difference is not measured.
    cropped = Tolerance(mean=2.2, most=16)
    resized = Tolerance(mean=1.6, most=24)
    matrices = (Matrix.SMPTE170M, Matrix.BT470BG, Matrix.UNKNOWN)
