"""Pictures that a container cuts, turns, mirrors or stretches, and decoders that keep nothing of one for another."""

from __future__ import annotations

from dataclasses import replace
from fractions import Fraction

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fastvid.decode import pyav
from fastvid.decode.pyav import PyAvDecoder
from fastvid.decode.request import Box, ClipRequest, EncodedClip, Planes, Rgb
from fastvid.format.bitstream import parameter_sets
from fastvid.format.presentation import Coded
from fastvid.format.schema import Codec, StreamFlag
from tests.conformance import outputs
from tests.conformance.outputs import arrays
from tests.makers import opened

FRAMES = np.array([3, 40, 3], np.int64)


def shown_size(coded):
    return coded.crop[3:1:-1] if coded.turn % 2 else coded.crop[2:]


def decoded(clip, kind):
    return arrays(outputs.decoded(PyAvDecoder(), clip, kind))


def upright(data, coded):
    return np.rot90(data[..., ::-1] if coded.mirror else data, -coded.turn, (-2, -1))


even = st.integers(0, 20).map(lambda half: 2 * half)
orientations = st.tuples(st.integers(0, 3), st.booleans())


@settings(deadline=None, max_examples=60)
@given(orientations, even, even, st.booleans(), st.sampled_from([Rgb, Planes]), st.data())
def test_turned_pictures_are_those_of_a_player(videos, orientation, top, left, flip, kind, data):
    """Decoding a box of the shown pictures is decoding its part of the coded ones, then turning that."""
    video = videos.textured("intra")
    whole = video.full
    coded = Coded(whole.width, whole.height, (top, left, whole.height - top - 4, whole.width - left - 2), *orientation)
    height, width = shown_size(coded)
    info = replace(video.info, width=width, height=height, coded=coded)
    y, x = data.draw(st.integers(0, height // 2 - 8)) * 2, data.draw(st.integers(0, width // 2 - 8)) * 2
    box = Box(y, x, 16, 12)
    size = data.draw(st.sampled_from([(16, 12), (32, 10)])) if kind is Rgb else (16, 12)
    clip = video.clip(FRAMES, box=box, size=size, flip=flip, info=info)
    got = decoded(clip, kind)
    cut = Box(*coded.cut((height, width), (y, x, 16, 12)))
    plain = video.clip(FRAMES, box=cut, size=size[::-1] if coded.turn % 2 else size)
    for mine, theirs in zip(got, decoded(plain, kind), strict=True):
        expected = upright(theirs, coded)
        np.testing.assert_array_equal(mine, expected[..., ::-1] if flip and kind is Rgb else expected)
    everything = decoded(video.clip(FRAMES), Planes)[0][:, top:-4, left:-2]
    if kind is Planes:
        np.testing.assert_array_equal(got[0], upright(everything, coded)[:, y : y + 16, x : x + 12])


@pytest.mark.parametrize("turn", range(4))
def test_pixels_that_are_not_square_are_stretched(videos, turn):
    video = videos.textured("intra")
    whole = video.full
    coded = Coded(whole.width, whole.height, (0, 0, whole.height, whole.width), turn)
    height, width = whole.height, 2 * whole.width
    height, width = (width, height) if turn % 2 else (height, width)
    info = replace(video.info, width=width, height=height, coded=coded)
    clip = video.clip(FRAMES, box=Box(0, 0, height, width), size=(height, width), info=info)
    luma = decoded(clip, Planes)[0].astype(int)
    plain = decoded(video.clip(FRAMES), Planes)[0]
    wide = np.rot90(np.repeat(plain, 2, axis=2), -turn, (-2, -1)).astype(int)
    assert np.abs(luma - wide).mean() < 4  # of levels; turned the wrong way it is over 30
    rgb = decoded(clip, Rgb)[0]
    assert rgb.shape == (3, len(FRAMES), height, width)


def packed(info, packets, shows, frames):
    """Return a clip of packets in memory."""
    starts = np.cumsum([0, *map(len, packets)])[:-1]
    data = memoryview(b"".join(packets) + bytes(64))
    keys = np.zeros(len(packets), np.bool_)
    keys[0] = True
    sides = (info.height, info.width)
    request = ClipRequest(0, np.asarray(frames, np.int64), Box(0, 0, *sides), sides)
    sizes = np.array([len(packet) for packet in packets])
    return EncodedClip(request, info, data, starts, sizes, np.asarray(shows, np.int64), keys)


def with_sets(codec, extradata, packet):
    """Return a packet that begins with the parameter sets of a configuration record."""
    return b"".join(len(unit).to_bytes(4, "big") + unit for unit in parameter_sets(codec, extradata)) + packet


@pytest.fixture(scope="module")
def two_streams(tmp_path_factory):
    """Return the packets and configuration of two encodings of one size that differ in a picture parameter set."""
    from tests.sharding.shardtools import ffmpeg

    found = []
    for offset in (0, 10):
        path = tmp_path_factory.mktemp("sets") / "a.mp4"
        options = f"keyint=8:bframes=0:chroma-qp-offset={offset}:scenecut=0"
        ffmpeg("-f", "lavfi", "-i", "testsrc2=size=96x64:rate=25", "-frames:v", "8", "-pix_fmt", "yuv420p",
               "-c:v", "libx264", "-crf", "30", "-x264-params", options, str(path))  # fmt: skip
        with opened(str(path)) as container:
            stream = container.streams.video[0]
            packets = [bytes(packet) for packet in container.demux(stream) if packet.size]
            found.append((packets, bytes(stream.codec_context.extradata)))
    assert found[0][1] != found[1][1]
    return found


@pytest.mark.parametrize("protected", [True, False])
def test_a_decoder_does_not_remember_parameter_sets(two_streams, videos, monkeypatch, protected):
    """A stream that changes its parameter sets on the way, then another of the same configuration."""
    (packets, extradata), (changed, others) = two_streams
    info = replace(videos.textured("intra").info, width=96, height=64, num_frames=8, fps=Fraction(25))
    info = replace(info, codec=Codec.H264, extradata=extradata, flags=StreamFlag.NONE)
    first = packed(info, [with_sets(Codec.H264, others, changed[0]), *changed[1:]], range(8), range(8))
    second = packed(info, packets, range(8), range(8))
    if not protected:
        monkeypatch.setattr(pyav, "_is_changed", lambda info, clip: False)
    decoder, outputs = PyAvDecoder(), []
    for clip, by in ((second, PyAvDecoder()), (first, decoder), (second, decoder)):
        output = Rgb(np.zeros((3, 8, 64, 96), np.uint8))
        assert by.decode([clip], [output]) == [None]
        outputs.append(output.data)
    assert np.array_equal(outputs[0], outputs[2]) == protected


def test_a_decoder_keeps_no_sequence_header_of_av1(tmp_path, videos, monkeypatch):
    """Streams with another header in their packets than in their files, as SVT-AV1 writes them, share a context."""
    from tests.sharding.shardtools import ffmpeg

    plain = replace(videos.textured("av1").info, width=96, height=64, num_frames=8, fps=Fraction(25))
    clips = []
    for filtered in "10":
        path = tmp_path / f"{filtered}.mp4"
        options = f"-c:v libaom-av1 -usage realtime -cpu-used 8 -crf 50 -enable-cdef {filtered}"
        ffmpeg("-f", "lavfi", "-i", "testsrc2=size=96x64:rate=25", "-frames:v", "8", "-pix_fmt", "yuv420p",
               *options.split(), str(path))  # fmt: skip
        with opened(str(path)) as container:
            clips.append([bytes(packet) for packet in container.demux(video=0) if packet.size])
    header = slice(0, 2 + clips[1][0][1])  # an OBU of fewer than 128 bytes: its type, its length, its payload
    assert clips[0][0][header] != clips[1][0][header]
    clips.append([clips[1][0][header.stop :], *clips[1][1:]])
    shared, alone, contexts = PyAvDecoder(), list[np.ndarray](), list[object]()
    make = pyav.open_context
    monkeypatch.setattr(pyav, "open_context", lambda *stream: contexts.append(stream) or make(*stream))
    for number in (0, 1, 0, 2, 1):
        clip, outputs = packed(plain, clips[number], range(8), range(8)), []
        errors = []
        for decoder in (PyAvDecoder(), shared):
            outputs.append(Rgb(np.zeros((3, 8, 64, 96), np.uint8)))
            errors += decoder.decode([clip], [outputs[-1]])
        assert [error is None for error in errors] == [number < 2] * 2, "without its header, a stream is no other's"
        np.testing.assert_array_equal(*(output.data for output in outputs))
        alone.append(outputs[0].data)
    assert not np.array_equal(alone[0], alone[1])
    assert len(contexts) == 5 + 2  # one of each decoder of its own; the shared one needed another after the error
