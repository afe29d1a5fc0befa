"""The DALI back-end on a GPU fulfils the contract."""

from __future__ import annotations

from fastvid.decode.request import DeviceRgb
from fastvid.format.schema import Matrix
from tests.conformance.suite import Conformance, Tolerance


class TestDaliGpu(Conformance):
    name = "dali-gpu"
    encodings = ("compact", "intra", "vp9", "hevc", "pyramid", "mjpeg")
    kinds = (DeviceRgb,)
    size = (144, 160)  # the least that NVDEC decodes of HEVC
    # Those of the same graph on a CPU; a GPU's are not measured.
    cropped = Tolerance(mean=2.2, most=16)
    resized = Tolerance(mean=1.6, most=24)
    matrices = (Matrix.SMPTE170M, Matrix.BT470BG, Matrix.UNKNOWN)
