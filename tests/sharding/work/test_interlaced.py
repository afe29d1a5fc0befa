"""Interlaced H.264 of camcorders and broadcasters: every frame is packed once, deinterlaced."""

import io

import av
import numpy as np
import pytest

from fastvid.errors import SourceError
from fastvid.media.ffmpeg import Limits
from fastvid.media.prove import index_video
from fastvid.media.reasons import Reason
from fastvid.sharding.encode.profiles import PROFILES
from tests.fields import paff
from tests.makers import paint
from tests.sharding.encode.test_parts import pack
from tests.sharding.encode.test_transcode import numbers
from tests.sharding.shardtools import ffmpeg, look

FRAMES = 26
CONTAINERS = {"ts": (), "mts": ("-f", "mpegts", "-mpegts_m2ts_mode", "1"), "mp4": ()}
INTERLACED = ("-c:v", "libx264", "-crf", "12", "-flags", "+ildct+ilme", "-x264-params", "tff=1")


@pytest.fixture(scope="module")
def pictures():
    return np.clip(paint(FRAMES, (96, 160))[0], 16, 235)


@pytest.fixture(scope="module")
def field_coded(pictures, tmp_path_factory):
    """Return files whose packets are fields, by container."""
    folder = tmp_path_factory.mktemp("paff")
    raw = folder / "paff.h264"
    raw.write_bytes(b"".join(paff(pictures)))
    for suffix, options in CONTAINERS.items():
        ffmpeg("-fflags", "+genpts", "-i", str(raw), "-c", "copy", *options, str(folder / f"paff.{suffix}"))
    return {suffix: folder / f"paff.{suffix}" for suffix in ("h264", *CONTAINERS)}


def mixed(videos, tmp_path, suffix, *filters):
    path = tmp_path / f"a.{suffix}"
    source = str(videos.painted("intra").path)
    filters = ("-vf", ",".join(filters)) if filters else ()
    ffmpeg("-i", source, *filters, *INTERLACED, *CONTAINERS[suffix], str(path))
    return path


def shown(data):
    """Return the luma of every frame of an MP4, uint8 [N, H, W]."""
    with av.open(io.BytesIO(data)) as container:
        return np.stack([frame.to_ndarray()[: frame.height] for frame in container.decode(video=0)])


@pytest.mark.parametrize("suffix", ["h264", *CONTAINERS])
def test_field_coded_video_is_packed_frame_by_frame(suffix, field_coded):
    path = field_coded[suffix]
    with av.open(str(path)) as container:
        assert sum(bool(packet.size) for packet in container.demux(video=0)) == 2 * FRAMES  # a packet is a field
    whole, clip = pack(path), pack(path, 0.4, 0.8)
    assert numbers(whole.samples[0].streams["rgb"]) == list(range(FRAMES))
    assert numbers(clip.samples[0].streams["rgb"]) == list(range(10, 20))
    assert whole.samples[0].meta["fps"] == "25"
    assert "deinterlaced" in whole.warnings


@pytest.mark.parametrize("suffix", ["h264", *CONTAINERS])
def test_fields_are_neither_copied_nor_indexed_in_place(suffix, field_coded, videos, tmp_path):
    """Packets cannot be deinterlaced, and woven fields are not what a player shows."""
    paths = [field_coded[suffix], *([mixed(videos, tmp_path, suffix)] if suffix in CONTAINERS else [])]
    for path in paths:
        copied = pack(path, profile=PROFILES["copy"])
        assert copied.reason is Reason.NO_INDEX
        assert "interlaced" in copied.message
        with pytest.raises(SourceError, match=r"interlaced|not contiguous"):
            index_video(path.read_bytes(), Limits())


def test_lost_fields_are_noticed(field_coded, pictures, tmp_path):
    fields = paff(pictures)
    path = tmp_path / "lost.h264"
    path.write_bytes(b"".join(fields[:20] + fields[22:]))
    assert look(path).timing.shown == FRAMES - 1
    path.write_bytes(b"".join([*fields[:21], fields[21][:200], *fields[22:]]))
    assert pack(path).reason is Reason.DAMAGED


@pytest.mark.parametrize("suffix", sorted(CONTAINERS))
def test_interlaced_macroblocks_are_packed(suffix, videos, tmp_path):
    encoded = pack(mixed(videos, tmp_path, suffix))
    assert "deinterlaced" in encoded.warnings
    assert numbers(encoded.samples[0].streams["rgb"]) == list(range(70))


@pytest.mark.parametrize("suffix", sorted(CONTAINERS))
def test_telecine_keeps_every_frame_and_its_order(suffix, videos, tmp_path):
    # 3:2 pulldown: of five frames two mix fields of neighbours. The first frame is a whole one.
    path = mixed(videos, tmp_path, suffix, "telecine=first_field=top:pattern=23")
    encoded = pack(path)
    assert "deinterlaced" in encoded.warnings
    found = numbers(encoded.samples[0].streams["rgb"])
    assert len(found) == look(path).timing.shown
    assert found == sorted(found)
    assert {found[0], found[-1]} <= {0, 69}


def test_deinterlaced_motion_has_no_comb(videos, tmp_path):
    """Lines of the two fields differ where things move; after deinterlacing they hardly do."""
    path, pattern = tmp_path / "a.ts", "testsrc2=size=320x192:rate=50"
    ffmpeg("-f", "lavfi", "-i", pattern, "-frames:v", "60", "-vf", "tinterlace=interleave_top", *INTERLACED, str(path))

    def comb(frames):
        lines = frames.astype(np.int64)
        return float(np.abs(2 * lines[:, 1:-1] - lines[:, :-2] - lines[:, 2:]).mean())

    (made,) = pack(path, profile=PROFILES["compact"].changed(short_side=192)).samples
    assert comb(shown(made.streams["rgb"])) < 0.6 * comb(shown(path.read_bytes()))
