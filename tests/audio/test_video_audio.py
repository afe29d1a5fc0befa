"""`Video.audio`: exact windows at any rate, silence outside the track, and errors for damaged bytes."""

import zlib
from fractions import Fraction

import av
import numpy as np
import pytest

from fastvid.cli.main import main
from fastvid.decode.sound import AudioClip
from fastvid.errors import ChecksumError, DecodeError, FormatError, UsageError
from fastvid.format.schema import AUDIO_BLOCK, PKT_HEADER_DTYPE, STREAM_DTYPE
from fastvid.format.shard import Shard, index_shard
from fastvid.format.tar import BlockReader
from fastvid.sharding.job.index import rebuild
from fastvid.videos.dataset import open as open_dataset
from fastvid.videos.video import Video
from tests.audio.footage import (
    CLICKS,
    FPS,
    FRAMES,
    TRACKS,
    click_track,
    clicks_off,
    mean_click_off,
    shard,
    write_tracks,
    write_video,
)
from tests.makers import read_numbers
from tests.videos.test_find_and_get import numbers

RATES = (8_000, 16_000, 22_050, 48_000)


def member(dataset, key):
    """Return the offset and size of a sample's M4A in the tar."""
    video = dataset[key]
    record = video._shard.audio(video._row)._read
    return record.start, record.size


def damage(store, offset, change):
    data = bytearray(store.read("data-000000.tar"))
    data[offset : offset + len(change)] = change
    store.write("data-000000.tar", bytes(data))


@pytest.mark.parametrize("key", TRACKS)
def test_windows_equal_the_whole_track_and_clicks_are_at_their_sample(clicks, key):
    video, draws = clicks[key], np.random.default_rng(1)
    for rate in RATES:
        whole = video.audio(rate=rate)
        assert whole.mask.all()
        assert whole.data.shape == (2, FRAMES * rate // FPS)
        assert clicks_off(whole, 0) == 0
        for _ in range(25):
            start, stop = sorted(draws.choice(FRAMES + 1, 2, replace=False).tolist())
            clip = video.audio(Fraction(start, FPS), Fraction(stop, FPS), rate)
            assert clip.data.tobytes() == whole.data[:, start * rate // FPS : stop * rate // FPS].tobytes()
            assert clicks_off(clip, start) == 0
    assert read_numbers(video.frames(CLICKS).data[..., 0]) == CLICKS.tolist()


def test_sample_numbers_are_rounded_times(clicks):
    video = clicks["alac-44100"]
    whole = video.audio()
    assert (whole.rate, whole.start_seconds) == (44_100, 0.0)
    part = video.audio(1.23456, 2.34567)
    first, stop = round(1.23456 * 44_100), round(2.34567 * 44_100)
    assert part.data.tobytes() == whole.data[:, first:stop].tobytes()
    assert part.start_seconds == first / 44_100
    # Halves are rounded up: windows that meet share no sample and miss none.
    meeting = Fraction(3, 2 * 16_000)
    counts = [video.audio(0, meeting, 16_000).data.shape[1], video.audio(meeting, 1, 16_000).data.shape[1]]
    assert counts == [2, 15_998]


def test_mono_is_the_mean_of_the_channels(clicks):
    video = clicks["aac-48000"]
    stereo, mono = video.audio(1, 2), video.audio(1, 2, mono=True)
    assert mono.data.shape == (1, 48_000)
    assert np.array_equal(mono.data[0], (stereo.data[0] + stereo.data[1]) / 2)


def test_outside_the_track_it_is_silent_and_masked(clicks):
    whole = clicks["aac-44100"].audio(-1, 8, 16_000)
    heard = slice(16_000, 16_000 + FRAMES * 16_000 // FPS)
    assert whole.mask[heard].all()
    assert np.count_nonzero(whole.mask) == heard.stop - heard.start
    assert not whole.data[:, : heard.start - 16].any()
    assert clicks["aac-44100"].audio(7, 8).mask.sum() == 0
    mute = clicks["mute"].audio(rate=16_000)
    assert mute.data.shape == (1, FRAMES * 16_000 // FPS)
    assert not mute.data.any()
    assert not mute.mask.any()
    assert clicks["mute"].audio(0, 1).rate == 48_000


def test_wrong_windows_and_rates_are_refused(clicks):
    with pytest.raises(UsageError, match=r"from 2\.0 to 1\.0 s ends before"):
        clicks["mute"].audio(2, 1)
    with pytest.raises(UsageError, match="rate is 0"):
        clicks["mute"].audio(rate=0)


@pytest.mark.parametrize("choice", ["copy", "aac"])
def test_parts_of_a_long_video_keep_each_click_at_its_sample(parts, tmp_path, choice):
    if choice == "aac":
        parts = shard(write_tracks(tmp_path / "sources"), tmp_path / "out", choice, max_seconds=1.7)
    assert len(parts) > len(TRACKS)
    for key, (_, rate) in TRACKS.items():
        first = 0
        for number in range(99):
            if f"{key}/{number:04d}" not in parts:
                break
            video = parts[f"{key}/{number:04d}"]
            heard = video.audio(rate=rate)
            # The first copied packet of AAC lacks the one before it, and ALAC's packets have 4,096 samples.
            off = clicks_off(heard, first, 0.12) if choice == "copy" else mean_click_off(heard, first)
            assert off == 0, (key, number)
            first += len(video)
        assert first == FRAMES


@pytest.mark.parametrize("where", ["tables", "packets"])
def test_damaged_audio_is_an_error_that_names_the_sample(clicks, copied, where):
    offset, size = member(clicks, "aac-44100")
    data = copied.read("data-000000.tar")
    place = offset + 60 if where == "tables" else offset + size - 3000
    damage(copied, place, bytes(byte ^ 0x55 for byte in data[place : place + 8]))
    video = open_dataset(copied.url)["aac-44100"]
    with pytest.raises(ChecksumError, match="audio has checksum") as caught:
        video.audio()
    assert caught.value.where["key"] == "aac-44100"
    assert len(video.frames([0]).data)  # the video is whole
    # Positive control: with the checksums of the damaged bytes, the damage is not noticed here.
    reader = video._shard.audio(video._row)
    damaged = copied.read("data-000000.tar")[offset : offset + size]
    crcs = [zlib.crc32(damaged[at : at + AUDIO_BLOCK]) for at in range(0, size, AUDIO_BLOCK)]
    assert bytes(BlockReader(reader._read, crcs).bytes(0, size)) == damaged


def test_audio_of_another_sample_is_an_error(clicks, copied):
    offset, size = member(clicks, "alac-44100")
    other, _ = member(clicks, "alac-48000")
    data = copied.read("data-000000.tar")
    damage(copied, offset, data[other : other + size])
    with pytest.raises(ChecksumError):
        open_dataset(copied.url)["alac-44100"].audio(1, 2)


def test_packets_that_do_not_decode_are_a_decode_error(clicks, copied):
    offset, size = member(clicks, "aac-44100")
    damage(copied, offset + size - 6000, bytes(range(256)) * 8)
    index_shard(copied, "data-000000")  # now the checksums fit
    row = clicks["aac-44100"]._row
    annotations = (clicks.annotations, int(clicks.rows[clicks.find("aac-44100")]))
    video = Video.of(
        Shard(copied, "data-000000"), row, annotations, label=-1, class_name=None, stream=clicks.streams[0]
    )
    with pytest.raises(DecodeError) as caught:
        video.audio()
    assert caught.value.where["key"] == "aac-44100"
    assert video.audio(0, 1).mask.all()


def test_sidecars_without_audio_read_videos_and_ask_for_an_index(clicks, copied):
    name = "data-000000.pkt"
    data = bytearray(copied.read(name))
    header = np.frombuffer(data, PKT_HEADER_DTYPE, count=1)
    body = PKT_HEADER_DTYPE.itemsize
    streams = int(header["num_samples"][0] * header["num_streams"][0]) * STREAM_DTYPE.itemsize
    stop = body + streams + int(header["extradata_bytes"][0])
    packets = stop + int(header["audio_bytes"][0])
    header["audio_bytes"] = 0
    header["index_crc32"] = zlib.crc32(data[: body - 4] + data[body:stop])
    copied.write(name, bytes(data[:stop] + data[packets:]))
    old = open_dataset(copied.url)["aac-44100"]
    assert len(old.frames([0]).data) == 1
    with pytest.raises(FormatError, match="does not list the shard's audio") as caught:
        old.audio()
    assert "fastvid index" in caught.value.hint
    rebuild(copied.url)
    assert clicks_off(open_dataset(copied.url)["aac-44100"].audio(rate=16_000), 0) == 0


def test_a_gap_in_the_track_is_silent_and_later_clicks_keep_their_sample(tmp_path):
    (tmp_path / "sources").mkdir()
    # Between the times 2.0 and 3.0 the source has no packets.
    gap = ["-af", "aselect=not(between(t\\,2\\,3))", "-c:a", "aac", "-b:a", "256k", "-aac_pns", "0"]
    write_video(tmp_path / "sources" / "gap.mov", click_track(48_000), 48_000, *gap)
    video = shard(tmp_path / "sources", tmp_path / "out", "copy")["gap"]
    whole = video.audio()
    assert not whole.data[:, round(2.1 * 48_000) : round(2.9 * 48_000)].any()
    late = video.audio(Fraction(80, FPS), Fraction(FRAMES, FPS))
    assert clicks_off(late, 80) == 0
    assert late.data.tobytes() == whole.data[:, 80 * 48_000 // FPS :].tobytes()


def test_noise_that_the_decoder_makes_is_the_same_for_the_same_window(tmp_path):
    (tmp_path / "sources").mkdir()
    noise = np.random.default_rng(2).normal(0, 0.2, (FRAMES * 1_920, 2)).astype(np.float32)
    write_video(tmp_path / "sources" / "noise.mov", noise, 48_000, "-c:a", "aac", "-b:a", "64k")
    video = shard(tmp_path / "sources", tmp_path / "out", "copy")["noise"]
    first, whole, again = video.audio(2, 3), video.audio(), video.audio(2, 3)
    assert first.data.tobytes() == again.data.tobytes()
    # Positive control: the encoder asked for noise, so it depends on where the decoder began.
    assert (first.data != whole.data[:, 96_000:144_000]).any()


@pytest.mark.parametrize(
    ("key", "seconds", "first", "count"), [("aac-44100", "0.8:4", 20, 80), ("alac-48000", "0:6", 0, 150)]
)
def test_a_clip_written_by_get_has_the_sound_of_its_frames(clicks, key, seconds, first, count, tmp_path):
    target = tmp_path / "clip.mp4"
    assert main(["get", clicks.storage.url, key, "--seconds", seconds, "-o", str(target)]) == 0
    assert numbers(target.read_bytes()) == list(range(first, first + count))
    with av.open(str(target)) as container:
        rate = container.streams.audio[0].rate
        frames = list(container.decode(audio=0))
    # What a player shows begins at zero: the edit list hides the encoder's start.
    sound = np.concatenate([frame.to_ndarray() for frame in frames if frame.pts >= 0], axis=1)
    assert abs(sound.shape[1] - count * rate / FPS) <= 2048
    clip = AudioClip(sound, rate, 0.0, np.ones(sound.shape[1], bool))
    assert mean_click_off(clip, first) == 0


def test_a_clip_of_a_mute_sample_has_no_sound(clicks, tmp_path):
    assert main(["get", clicks.storage.url, "mute", "--seconds", "1:2", "-o", str(tmp_path / "clip.mp4")]) == 0
    with av.open(str(tmp_path / "clip.mp4")) as container:
        assert not container.streams.audio
