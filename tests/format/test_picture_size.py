"""declared_size compared with the sizes that ffmpeg encoded."""

import pytest

from fastvid.errors import FormatError
from fastvid.format.headers import declared_size
from fastvid.format.schema import Codec
from tests.makers import packets_of


@pytest.mark.parametrize("size", [(96, 160), (64, 176), (256, 336)])
@pytest.mark.parametrize("encoding", ["vp9", "vp9-intra", "mjpeg"])
def test_declared_size_matches_the_encoded_size(videos, encoding, size):
    video = videos.textured(encoding, size=size, frames=20)
    found = [declared_size(video.info.codec, packet) for packet in packets_of(video)]
    expected = size[::-1]
    if encoding == "vp9":
        # Inter pictures inherit the size of their reference.
        assert found == [expected if key else None for key in (video.records["flags"] & 1).tolist()]
    else:
        assert found == [expected] * 20


def test_declared_size_raises_when_headers_are_malformed(videos):
    vp9, jpeg = (packets_of(videos.textured(name, frames=20))[0] for name in ("vp9", "mjpeg"))
    for codec, packet in (
        (Codec.VP9, b"\0" * 20),
        (Codec.VP9, bytes(vp9[:1]) + b"\0" + bytes(vp9[2:])),
        (Codec.VP9, bytes([0x92]) + bytes(vp9[1:])),  # profile 1
        (Codec.MJPEG, bytes(jpeg[:12])),
        (Codec.MJPEG, b"\xff\xd8\xff\xda" + bytes(20)),
        (Codec.MJPEG, b""),
    ):
        with pytest.raises(FormatError):
            declared_size(codec, memoryview(packet))
