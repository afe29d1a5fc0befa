"""Sound of videos and in batches: every click is where its frame is."""

import json
import math
import zlib
from fractions import Fraction

import av
import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import fastvid
from fastvid.cli.main import main
from fastvid.decode.sound import AudioClip
from fastvid.errors import ChecksumError, DecodeError, FormatError, StateError, UsageError
from fastvid.format.schema import PKT_HEADER_DTYPE, STREAM_DTYPE
from fastvid.format.shard import Shard
from fastvid.format.writing import index_shard
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
    write_video,
)
from tests.load.loaders import clip_loader
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
    part = video.audio(1.23456, 2.34567, np.int64(44_100))
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
    assert not whole.data[:, ~whole.mask].any()  # the filter of the resampler rings past both ends
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
    for moment in (math.nan, math.inf, "1"):
        with pytest.raises(UsageError, match="expected a finite number of seconds"):
            clicks["mute"].audio(0, moment)
    assert clicks["mute"].audio(0, np.float32(0.5)).data.shape[1] == 24_000


@pytest.mark.parametrize("choice", ["copy", "aac"])
def test_parts_of_a_long_video_keep_each_click_at_its_sample(parts, tracks, tmp_path, choice):
    if choice == "aac":
        parts = shard(tracks, tmp_path / "out", choice, max_seconds=1.7)
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
    # The encoder asked for noise, so it depends on where the decoder began.
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


RATE = 16_000


def loader(dataset, **options):
    made = {"frames": fastvid.Segments(4), "spatial": fastvid.CenterCrop(64), "audio": fastvid.Audio(RATE)}
    made |= {"global_batch_size": 21, "seed": 3, "rank": 0, "world_size": 1, "last": "mask", "decoder": "pyav"}
    return clip_loader(dataset, **(made | {"num_threads": 2} | options))


def rows(batches) -> dict[int, tuple]:
    """Return each row by its position: key, frames, sound and mask with their padding."""
    found = {}
    for batch in batches:
        assert batch.audio.dtype == torch.float32
        parts = (batch.position.tolist(), batch.key, batch.frame_index.tolist(), batch.audio, batch.audio_mask)
        for position, key, frames, audio, mask in zip(*parts, strict=True):
            if position >= 0:
                assert position not in found
                found[position] = (key, frames, tuple(audio.shape), audio.numpy().tobytes(), mask.numpy().tobytes())
    return found


def epoch(dataset, world=1, state=None, **options) -> dict[int, tuple]:
    """Return the rows of the rest of an epoch in a world."""
    found = {}
    for rank in range(world):
        one = loader(dataset, rank=rank, world_size=world, **options)
        if state is not None:
            one.load_state_dict(state)
        part = rows(one)
        one.close()
        assert not found.keys() & part.keys()
        found |= part
    return found


@pytest.fixture(scope="module")
def undisturbed(parts):
    return epoch(parts, clips_per_video=3)


def test_sound_is_that_of_the_seconds_of_the_frames(parts, undisturbed):
    assert len(undisturbed) == 3 * len(parts)
    lengths = set()
    for key, frames, shape, sound, mask in undisturbed.values():
        clip = parts[key].audio(Fraction(min(frames), FPS), Fraction(max(frames) + 1, FPS), RATE, mono=True)
        found, heard = np.frombuffer(sound, np.float32), np.frombuffer(mask, bool)
        count = clip.data.shape[1]
        lengths.add(count)
        assert shape == (1, len(found))
        assert found[:count].tobytes() == clip.data.tobytes()
        assert heard[:count].tobytes() == clip.mask.tobytes()
        assert not found[count:].any()
        assert not heard[count:].any()
        assert heard.any() == (key != "mute")
    assert len(lengths) > 10  # of clips of different length


@settings(max_examples=12, deadline=None)
@given(world=st.sampled_from([2, 3, 5, 7]), steps=st.integers(0, 2), before=st.sampled_from([1, 2, 3]))
def test_sound_is_the_same_for_any_world_resumed_anywhere(parts, undisturbed, world, steps, before):
    first = loader(parts, rank=0, world_size=before, clips_per_video=3)
    state = first.state_dict()
    for _, _batch in zip(range(steps), first, strict=False):
        state = first.state_dict()
    first.close()
    assert len(state) == 5
    rest = epoch(parts, world, json.loads(json.dumps(state)), clips_per_video=3)
    assert rest == {position: row for position, row in undisturbed.items() if position >= state["position"]}


@pytest.mark.parametrize(
    "options",
    [
        {"workers": "process"},
        {"workers": "process", "num_fetchers": 2},
        {"num_fetchers": 2},
        {"num_threads": 1, "prefetch": 1},
    ],
    ids=["processes", "fetched for processes", "fetched", "one thread"],
)
def test_sound_is_the_same_with_any_workers(parts, undisturbed, options):
    assert epoch(parts, clips_per_video=3, **options) == undisturbed


@pytest.mark.parametrize(
    "batches",
    [fastvid.Buckets([(2, 48, 64), (3, 64, 64)], 5), fastvid.Packed(2_000, (1, 8, 8), bins=2, window=8)],
    ids=["buckets", "packed"],
)
def test_sound_of_planned_batches_is_that_of_the_frames(parts, batches):
    options = {"batches": batches, "global_batch_size": None, "frames": fastvid.AtFps(2), "shuffle": True}
    options |= {"spatial": fastvid.CenterCrop(None) if isinstance(batches, fastvid.Buckets) else fastvid.Native(8)}
    whole = epoch(parts, **options)
    assert len(whole) == len(parts)
    for world, workers in ((2, "thread"), (1, "process")):
        found = epoch(parts, world, workers=workers, **options)
        for position, (key, frames, _, sound, mask) in found.items():
            shown = [frame for frame in frames if frame >= 0]
            clip = parts[key].audio(Fraction(min(shown), FPS), Fraction(max(shown) + 1, FPS), RATE, mono=True)
            count = clip.data.shape[1]
            assert sound[: 4 * count] == clip.data.tobytes()
            assert mask[:count] == clip.mask.tobytes()
            assert not any(sound[4 * count :])
            assert whole[position][3][: 4 * count] == sound[: 4 * count]


def test_sound_of_items_is_as_long_on_every_rank(clicks):
    items, options = fastvid.EveryFrame(clicks), {"frames": fastvid.Deltas([-0.1, 0.0, 0.2]), "global_batch_size": 5}
    whole = [next(iter(loader(items, **options)))]
    parts = [next(iter(loader(items, rank=rank, world_size=3, **options))) for rank in range(3)]
    assert {one.audio.shape[1:] for one in [*whole, *parts]} == {whole[0].audio.shape[1:]}
    together = {}
    for part in parts:
        together |= rows([part])
    assert together == rows(whole)


def test_stereo_and_mono_tracks_have_two_channels(clicks):
    (batch,) = loader(clicks, frames=fastvid.Dense(8, 1), audio=fastvid.Audio(48_000, mono=False), global_batch_size=5)
    assert batch.audio.shape == (5, 2, 8 * 48_000 // FPS)
    mute = batch.key.index("mute")
    assert batch.audio_mask.any(1).tolist() == [row != mute for row in range(5)]
    assert not batch.audio[mute].any()
    assert batch.valid.all()


def test_mixture_of_datasets_with_and_without_sound(clicks, parts):
    mute = parts.select([parts.find("mute")])
    mixture = fastvid.Mixture([clicks, mute])
    (batch,) = loader(mixture, global_batch_size=6)
    assert batch.audio_mask.any(1).tolist() == [key != "mute" for key in batch.key]


@pytest.mark.parametrize("workers", ["thread", "process"])
def test_damaged_sound_masks_its_row_or_is_an_error_that_names_it(clicks, copied, workers):
    offset, size = member(clicks, "alac-44100")
    damage(copied, offset + size // 2, bytes(200_000))
    options = {"frames": fastvid.Uniform(4), "global_batch_size": 5, "workers": workers}
    dataset = open_dataset(copied.url)
    one = loader(dataset, on_error="skip", max_skip_rate=1.0, **options)
    (batch,) = one
    bad = batch.key.index("alac-44100")
    assert batch.valid.tolist() == [row != bad for row in range(5)]
    assert not batch.audio[bad].any()
    assert not batch.audio_mask[bad].any()
    assert not batch.video[bad].any()
    assert one.stats.total.skips == {"ChecksumError": 1}
    one.close()
    strict = loader(dataset, **options)
    with pytest.raises(ChecksumError, match="audio has checksum") as caught:
        list(strict)
    assert caught.value.where["key"] == "alac-44100"
    strict.close()


def test_a_state_belongs_to_one_kind_of_sound(clicks):
    state = loader(clicks).state_dict()
    loader(clicks).load_state_dict(state)
    for audio in (None, fastvid.Audio(8_000), fastvid.Audio(RATE, mono=False)):
        with pytest.raises(StateError, match="another audio"):
            loader(clicks, audio=audio).load_state_dict(state)


def test_wrong_arguments_are_refused(clicks):
    with pytest.raises(UsageError, match="audio= was given with views="):
        loader(clicks, views=fastvid.Views(2), frames=fastvid.Segments(4, jitter=False))
    with pytest.raises(UsageError, match="rate is 0"):
        fastvid.Audio(0)
    with pytest.raises(UsageError, match="mono is 'yes'"):
        fastvid.Audio(RATE, mono="yes")
    (batch,) = loader(clicks, audio=None, global_batch_size=5)
    with pytest.raises(AttributeError, match=r"ask for it by audio=Audio\(16_000\)"):
        _ = batch.audio


def test_statistics_count_the_time_and_bytes_of_sound(clicks):
    with_sound, without = loader(clicks), loader(clicks, audio=None)
    for one in (with_sound, without):
        list(one)
    assert with_sound.stats.total.audio_seconds > 0
    assert without.stats.total.audio_seconds == 0
    assert with_sound.stats.total.bytes_read > without.stats.total.bytes_read
