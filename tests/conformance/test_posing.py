"""The suite knows outputs on a device, and refuses eight decoders that are wrong without an error."""

from __future__ import annotations

import pytest

from fastvid.decode.request import DevicePlanes, DeviceRgb
from fastvid.format.schema import Matrix
from tests.conformance.posing import SPOILED, posing
from tests.conformance.suite import Conformance as Contract
from tests.conformance.suite import DetectsOrder, Tolerance, WritesPlanes


class TestDeviceRgb(DetectsOrder):
    name = "posing as a writer of RGB"
    encodings = ("compact",)
    kinds = (DeviceRgb,)
    cropped = Tolerance(mean=1.4, most=3)
    resized = Tolerance(mean=1.5, most=24)
    matrices = tuple(matrix for matrix in Matrix if matrix is not Matrix.RGB)

    @classmethod
    def backend(cls):
        return posing(DeviceRgb)


class TestDevicePlanes(WritesPlanes, DetectsOrder):
    name = "posing as a writer of NV12"
    encodings = ("compact",)
    kinds = (DevicePlanes,)
    cropped = Tolerance(mean=0, most=0)
    resized = Tolerance(mean=0, most=0)
    matrices = tuple(matrix for matrix in Matrix if matrix is not Matrix.RGB)

    @classmethod
    def backend(cls):
        return posing(DevicePlanes)


@pytest.mark.parametrize("kind", [DeviceRgb, DevicePlanes])
@pytest.mark.parametrize("spoiled", SPOILED)
def test_spoiled_decoder_does_not_conform(kind, spoiled, videos):
    class Suite(Contract):
        encodings, cropped = ("compact",), Tolerance(mean=1.4, most=3)

        @classmethod
        def backend(cls):
            return posing(kind, spoiled)

    decoder = Suite.backend().open()
    with pytest.raises(AssertionError):
        Suite().test_every_frame_is_written_and_nearest_to_the_requested_one(decoder, videos)
