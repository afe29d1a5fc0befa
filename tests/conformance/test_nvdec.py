"""The NVDEC back-end fulfils the contract: on a GPU, and its own part of the work on any machine."""

from __future__ import annotations

import pytest

from fastvid.decode.request import DevicePlanes
from fastvid.format.schema import Matrix
from tests.conformance.fake_nvc import nvc
from tests.conformance.suite import DetectsOrder, Tolerance, WritesPlanes

__all__ = ["nvc"]


class TestNvdec(WritesPlanes, DetectsOrder):
    name = "nvdec"
    encodings = ("compact", "intra", "vp9", "hevc", "av1", "pyramid")
    kinds = (DevicePlanes,)
    size = (144, 160)  # the least that NVDEC decodes of HEVC
    # The conversion is the reference's.
    cropped = Tolerance(mean=0, most=0)
    resized = Tolerance(mean=0, most=0)
    matrices = tuple(matrix for matrix in Matrix if matrix is not Matrix.RGB)


class TestNvdecOverPyAv(TestNvdec):
    """With PyAV in the place of the GPU."""

    encodings = ("compact", "hevc", "vp9")
    size = (96, 160)

    @pytest.fixture(autouse=True)
    def _fake(self, nvc):
        yield
        assert not nvc.cuda.races
