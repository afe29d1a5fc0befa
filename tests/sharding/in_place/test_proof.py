"""What `index` finds out about a file with each proof: what it packs can be read, what cannot be read it refuses."""

import pytest

import fastvid
from fastvid.errors import JobError, SourceError
from fastvid.format.packets import packet_offsets
from fastvid.media import checks
from fastvid.media.ffmpeg import Limits
from fastvid.media.file_tables import FileReader
from fastvid.media.index_video import Proof, index_in_place
from fastvid.sharding.in_place import index_videos
from fastvid.sharding.verify.verify import verify_dataset
from fastvid.storage import LocalStorage
from tests.media.test_containers import trimmed
from tests.sharding.in_place import tools
from tests.sharding.shardtools import ffmpeg, make

X264 = ("-c:v", "libx264", "-pix_fmt", "yuv420p", "-preset", "veryfast", "-g", "20", "-bf", "2", "-sc_threshold", "0")
X265 = ("-c:v", "libx265", "-pix_fmt", "yuv420p", "-x265-params", "log-level=none:keyint=20:bframes=2:open-gop=0")
PROOFS = ("none", "sample", "all")


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    """Files of 60 frames, all but `trimmed` and `one` by 25 a second."""
    folder = tmp_path_factory.mktemp("made")
    ordered = ("-c:v", "libx264", "-pix_fmt", "yuv420p", "-bf", "0", "-g", "20")
    make(folder / "plain.mp4", *X264, frames=120)
    (folder / "trimmed.mp4").write_bytes(trimmed((folder / "plain.mp4").read_bytes(), 40, 80))
    make(folder / "ordered.mp4", *ordered, frames=60)
    make(folder / "same-times.mkv", *ordered, "-bsf:v", "setts=ts=floor(N/2)*80", frames=60)
    make(folder / "one.mp4", *X264, frames=1, rate="1/60")
    for name, options in (("h264", X264), ("hevc", X265)):
        make(folder / f"raw.{name}", *options, frames=60)
        for suffix in ("mp4", "mov"):
            # No times: the muxer counts packets in the order in which they are decoded.
            ffmpeg("-r", "25", "-i", str(folder / f"raw.{name}"), "-c", "copy", str(folder / f"{name}.{suffix}"))
    ffmpeg("-fflags", "+genpts", "-r", "25", "-i", str(folder / "raw.h264"), "-c", "copy", str(folder / "ticks.avi"))
    return folder


def index(path, out, proof):
    return index_videos([str(path)], out, proof=proof, workers=1)


@pytest.mark.parametrize("proof", PROOFS)
@pytest.mark.parametrize(
    ("name", "frames", "rate"),
    [
        ("ordered.mp4", 60, 25),
        ("trimmed.mp4", 80, 25),
        ("one.mp4", 1, 1 / 60),
        ("ticks.avi", 60, 25),
        ("same-times.mkv", 60, 25),
        ("h264.mp4", None, 25),
        ("hevc.mov", None, 25),
    ],
)
def test_what_is_packed_is_what_ffmpeg_shows_by_every_proof(name, frames, rate, proof, made, tmp_path):
    out = tmp_path / "set"
    if proof != "all" and (frames is None or name == "same-times.mkv"):
        # Its times contradict the order of its pictures, which only decoding all of it tells.
        with pytest.raises(JobError, match="no-index"):
            index(made / name, out, proof)
        return
    assert index(made / name, out, proof).packed == 1
    dataset = fastvid.open(out)
    assert frames is None or dataset[0].num_frames == frames
    assert float(dataset[0].info.fps) == pytest.approx(rate, rel=0.002 if frames else 0.05)
    assert tools.wrong_frames(dataset, 0, made / name) == []
    assert verify_dataset(str(out), workers=1).problems == []


class Remote(LocalStorage):
    """A folder whose files are read like those of a store: in large ranges, and no more than needed."""

    concurrency = 8


@pytest.mark.parametrize("storage", [LocalStorage, Remote])
@pytest.mark.parametrize("name", ["h264.mp4", "h264.mov", "hevc.mp4", "hevc.mov"])
def test_times_that_contradict_the_pictures_are_refused_without_proof(name, storage, made, monkeypatch):
    monkeypatch.setattr("fastvid.media.index_video.SMALL_FILE", 0)
    place = storage(str(made))
    with pytest.raises(SourceError, match="contradict the order of its pictures") as caught:
        index_in_place(FileReader(place, name, place.version(name)), Limits(), Proof.NONE)
    assert caught.value.reason == "no-index"


def test_sample_notices_a_decoder_that_what_it_decoded_before_changes(made, monkeypatch):
    file = FileReader(place := LocalStorage(str(made)), "plain.mp4", place.version("plain.mp4"))
    frames = checks.chosen_frames(index_in_place(file, Limits(), Proof.SAMPLE).records)
    assert len(frames) > 1

    class Kept(checks.PyAvDecoder):
        def __init__(self):
            super().__init__()
            self.clips = []

        def give(self, clip, write):
            self.clips.append(clip)
            super().give(self.clips[0], write)  # the first clip again

    monkeypatch.setattr(checks, "PyAvDecoder", Kept)
    with pytest.raises(SourceError, match="differs from the one a player shows"):
        index_in_place(file, Limits(), Proof.SAMPLE)


def test_sample_reads_frames_around_a_key_packet_that_edits_do_not_hide(made):
    for skip, keep in ((40, 80), (75, 30), (0, 50), (118, 2)):
        data = trimmed((made / "plain.mp4").read_bytes(), skip, keep)
        (made / "edited.mp4").write_bytes(data)
        place = LocalStorage(str(made))
        found = index_in_place(FileReader(place, "edited.mp4", place.version("edited.mp4")), Limits(), Proof.SAMPLE)
        assert found.info.num_frames == keep
        assert len(packet_offsets(found.records)) == 120
        assert checks.chosen_frames(found.records)
