"""The traps of libavcodec and PyAV that the back-end avoids, each with a control that shows the harm without it."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

import fastvid
from fastvid.decode import pyav
from fastvid.decode.clips import read_clip
from fastvid.decode.pyav import PyAvDecoder
from fastvid.decode.request import Box, ClipRequest, Planes, Rgb
from fastvid.errors import DecodeError, UsageError
from fastvid.format.schema import INPUT_PADDING
from tests.conformance.outputs import decoded, empty, numbers, pictures, reference
from tests.makers import encode


@pytest.fixture
def decoder():
    decoder = PyAvDecoder()
    yield decoder
    decoder.close()


class KeepsContexts(PyAvDecoder):
    """Keeps a context after an error: drains and flushes it, which looks sufficient but is not."""

    def __init__(self):
        super().__init__()
        self.kept = {}

    def _open(self, info):
        key = (info.codec, info.extradata, info.width, info.height)
        if key in self.kept:
            self.kept[key].decode(None)
            self.kept[key].flush_buffers()
        else:
            self.kept[key] = super()._open(info)
        return self.kept[key]


def after_foreign_packets(decoder, videos) -> int:
    """Return how many of ten good clips are wrong after a clip with packets of another stream."""
    video, other = videos.textured("compact"), videos.textured("compact", size=(64, 176))
    clean = video.clip([11, 12, 30, 66])
    expected = pictures(decoded(decoder, clean, Planes))
    wrong = 0
    for seed in range(10):
        frames = np.sort(np.random.default_rng(seed).integers(0, 70, 4))
        foreign = other.clip(frames)
        mixed = replace(foreign, info=video.info, request=replace(clean.request, frames=frames))
        assert decoder.decode([mixed], [empty(mixed, Planes)]) != [None]
        out = empty(clean, Planes)
        errors = decoder.decode([clean], [out])
        wrong += errors != [None] or not (pictures(out) == expected).all()
    return wrong


def test_context_is_discarded_after_an_error(decoder, videos):
    assert after_foreign_packets(decoder, videos) == 0
    assert after_foreign_packets(KeepsContexts(), videos) > 0


class SharesContexts(PyAvDecoder):
    """Changes the extradata of one open context instead of keeping one context per extradata."""

    context = None

    def _open(self, info):
        if self.context is None:
            self.context = super()._open(info)
        self.context.extradata = info.extradata
        return self.context


def test_streams_with_different_extradata_use_separate_contexts(decoder, videos):
    clips = [videos.painted("pyramid").clip([3, 40]), videos.painted("compact").clip([3, 40])] * 2
    assert [numbers(decoder, clip, Planes) for clip in clips] == [[3, 40]] * 4
    sharing = SharesContexts()
    errors = [sharing.decode([clip], [empty(clip, Planes)])[0] for clip in clips]
    assert any(errors)


class GuessesReorderDepth(PyAvDecoder):
    """Opens contexts without strict=1."""

    def _open(self, info):
        context = super()._open(info)
        context.options = {}
        return context


def test_no_picture_is_dropped_when_reorder_depth_is_not_signalled(decoder, videos):
    video = videos.painted("pyramid")
    info = replace(video.info, extradata=without_vui(video.info.extradata))
    rng = np.random.default_rng(1)
    clips = [video.clip(np.sort(rng.integers(0, 70, 8)), info=info) for _ in range(20)]
    for clip in clips:
        assert numbers(decoder, clip, Planes) == clip.request.frames.tolist()
    guessing = GuessesReorderDepth()
    assert any(guessing.decode([clip], [empty(clip, Planes)])[0] for clip in clips)


def test_wrong_key_flag_raises(decoder, videos):
    # libavcodec "decodes" from a packet that is not a key packet: it conceals missing references.
    video = videos.painted("compact")
    starts = np.flatnonzero(video.records["frame"] > 40)[:3]
    for start in starts.tolist():
        packets = np.arange(start, start + 4)
        clip = video.clip([int(video.records["frame"][start])], packets=packets)
        (error,) = decoder.decode([replace(clip, keys=np.arange(4) == 0)], [empty(clip, Planes)])
        assert isinstance(error, DecodeError)


@pytest.mark.parametrize("padded", [16, 2])
def test_rgb_converter_writes_all_columns_of_any_width(decoder, videos, monkeypatch, padded):
    monkeypatch.setattr(pyav, "_ROW", padded)
    video = videos.textured("intra")
    clip = video.clip([0], box=Box(0, 0, 96, 102))
    wrong = np.abs(decoded(decoder, clip, Rgb).data.astype(int) - reference(video, clip)).max() > 3
    assert wrong == (padded == 2)


def test_clip_without_padding_is_rejected(videos):
    clip = videos.textured("intra").clip([0])
    end = int(clip.starts[-1] + clip.sizes[-1])
    with pytest.raises(UsageError, match="padding"):
        replace(clip, data=clip.data[: end + 8])


def test_what_follows_a_packet_of_mpeg4_does_not_change_its_frame(decoder, tmp_path):
    rng = np.random.default_rng(0)
    noise = [rng.integers(16, 236, (60, side, side), np.uint8) for side in (64, 32, 32)]
    encode(tmp_path / "a.mp4", noise, ["-c:v", "mpeg4", "-bf", "2", "-q:v", "8"])
    file = fastvid.Video(tmp_path / "a.mp4")
    box = Box(0, 0, 64, 64)
    clip = read_clip(ClipRequest(0, np.arange(60), box, (64, 64)), file.info, file.table, file._shard.reader(0))
    step = int(clip.sizes.max()) + INPUT_PADDING
    data = bytearray(b"\x01" * step * len(clip.sizes))  # as sound in AAC begins
    for number, (start, size) in enumerate(zip(clip.starts.tolist(), clip.sizes.tolist(), strict=True)):
        data[number * step : number * step + size] = clip.data[start : start + size]
    apart = replace(clip, data=memoryview(data), starts=np.arange(len(clip.sizes)) * step)
    expected = pictures(decoded(decoder, clip, Planes))
    assert (pictures(decoded(decoder, apart, Planes)) == expected).all()


def test_number_of_contexts_is_bounded(videos):
    decoder = PyAvDecoder(max_contexts=2)
    clips = [videos.painted(name).clip([3, 40]) for name in ("compact", "intra", "vp9", "mjpeg")] * 2
    for clip in clips:
        assert numbers(decoder, clip, Planes) == [3, 40]
        assert len(decoder._contexts) <= 2
    with pytest.raises(UsageError, match="max_contexts"):
        PyAvDecoder(max_contexts=0)


@pytest.mark.parametrize("encoding", ["h264-422", "h264-10bit"])
@pytest.mark.parametrize("kind", [Planes, Rgb])
def test_other_yuv_formats_are_converted_to_420(decoder, videos, encoding, kind):
    clip = videos.painted(encoding).clip([3, 40, 40, 7])
    assert numbers(decoder, clip, kind) == [3, 40, 40, 7]


def test_hidden_packets_are_decoded_but_not_shown(decoder, videos):
    # As with an edit list: packets that must be fed but whose pictures the sample does not show.
    video = videos.painted("compact")
    clip = video.clip([20, 23])
    shows = clip.shows.copy()
    for hidden in range(len(shows)):
        if shows[hidden] not in (20, 23):
            shows[hidden] = -1
    assert (shows < 0).sum() > 1
    assert numbers(decoder, replace(clip, shows=shows), Planes) == [20, 23]


def without_vui(avcc: bytes) -> bytes:
    """Return the avcC record without the SPS's video usability information, which contains the reorder depth."""
    length = int.from_bytes(avcc[6:8], "big")
    sps = avcc[8 : 8 + length].replace(b"\x00\x00\x03", b"\x00\x00")
    bits = "".join(f"{byte:08b}" for byte in sps)
    position = 32  # NAL header, profile, constraints, level

    def number() -> int:
        nonlocal position
        zeros = bits.index("1", position) - position
        position += 2 * zeros + 1
        return int(bits[position - zeros - 1 : position], 2) - 1

    number()  # seq_parameter_set_id
    if sps[1] == 100:
        number(), number(), number()  # chroma format, bit depths
        position += 2
    number()  # log2_max_frame_num
    if number() == 0:  # pic_order_cnt_type
        number()
    number()  # max_num_ref_frames
    position += 1
    number(), number()  # width, height
    position += 2  # frame_mbs_only, direct_8x8_inference
    position += 1
    if bits[position - 1] == "1":  # frame_cropping
        number(), number(), number(), number()
    assert bits[position] == "1"
    cut = bits[:position] + "0" + "1"
    cut += "0" * (-len(cut) % 8)
    short = bytes(int(cut[i : i + 8], 2) for i in range(0, len(cut), 8))
    assert b"\x00\x00" not in short
    return avcc[:6] + len(short).to_bytes(2, "big") + short + avcc[8 + length :]
