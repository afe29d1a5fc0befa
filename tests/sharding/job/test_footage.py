"""Real files with every kind of problem, and the right verdict for each.

A few always; ``make soak`` runs all with each profile.

`verdicts.csv` says of every file of ``clean`` and ``odd`` what is right: ``verdict`` for profiles that encode, how its
clock is read, the number of frames after holes are filled, and the verdict of ``copy``, which takes fewer codecs.
FASTVID_SOAK_DIR names a folder in which finished datasets are kept and taken up again.
"""

import csv
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from fastvid.media.reasons import Reason
from fastvid.sharding.encode.profiles import PROFILES
from fastvid.sharding.job.job import run_job
from fastvid.sharding.verify.verify import verify_dataset
from tests.sharding.shardtools import REPOSITORY, ledger

with (Path(__file__).parent / "verdicts.csv").open(encoding="utf-8", newline="") as table:
    RIGHT = {row["file"]: row for row in csv.DictReader(table)}
# Files without a picture, or truncated, damaged or not a video, may be refused by either check.
VERIFIED = 40
GOOD = (
    "clean/ROCm__vision__hmdb51_Turnk_r_Pippi_Michel_cartwheel_f_cm_np2_le_med_6.avi",  # metadata cut mid-character
    "clean/open-mmlab__mmaction2__part_0.mp4",  # 32 frames and one hole
    "clean/intel-iot-devkit__sample-videos__brother.mkv",  # 65 frames and one hole, full range
    "odd/Eyevinn__mp4ff__4pics.264",  # raw stream without timestamps
    "odd/Zulko__moviepy__-video-with-dash-.mp4",  # 1x1 pixel, 4:4:4, a dash in front
    "odd/Zulko__moviepy__fire2.mp4",  # upside down, variable rate
    "odd/dmlc__decord__unordered.mov",  # stored out of order
    "odd/google__ExoPlayer__dolbyVision-hdr.MOV",  # HDR, turned, edit list
    "odd/google__ExoPlayer__portrait_4k60.mp4",  # large, turned
    "odd/iejMac__clip-video-encode__vid1.mp4",  # edit list: starts between key frames
    "odd/mathiasbynens__small__webm.webm",  # one frame of 8x8
    "odd/meta-pytorch__torchcodec__testsrc2_odd_height_and_width_444_10bit.mp4",
    "odd/mozilla__mp4parse-rust__video_colr_nclx_hdr10_full_range.mp4",  # HDR, full range, 2x2
    "odd/mozilla__mp4parse-rust__video_rotation_90.mp4",
    "odd/openpreserve__format-corpus__jpeg2000.mov",  # RGB with alpha
    "odd/openpreserve__format-corpus__xdcam-ex-1080i50.mov",  # interlaced
    "odd/rails__rails__rotated_video.mp4",
    "odd/sindresorhus__file-type__fixture.asf",  # no rate at all
    "odd/sindresorhus__file-type__fixture.mpg",  # program stream without a clock
)
BAD = {
    "bad/Eyevinn__mp4ff__av1_init.mp4": Reason.NO_FRAMES,  # ffmpeg exits with 0
    "bad/Eyevinn__mp4ff__opus.mp4": Reason.NO_VIDEO_STREAM,
    "bad/Eyevinn__mp4ff__prog_8s_enc_dashinit.mp4": Reason.DAMAGED,  # encrypted: 240 frames of garbage, exit 0
    "bad/Zulko__moviepy__result.webm": Reason.EMPTY,
    "bad/dmlc__decord__corrupted.mp4": Reason.DAMAGED,  # one frame lost in the middle
    "bad/google__AFL__ffmpeg-h264-bad-read.mp4": Reason.NO_FRAMES,
    "bad/google__AFL__small_movie.mp4": Reason.DAMAGED,  # 11 of 12 frames, exit 0
    "bad/huggingface__lerobot__clip_h264.mp4": Reason.NOT_VIDEO,
    "bad/kinetiknz__nestegg__bug1592193.webm": Reason.TRUNCATED,
    "bad/kinetiknz__nestegg__dancer1.webm": Reason.TRUNCATED,
    "bad/mozilla__mp4parse-rust__chunk_out_of_range.mp4": Reason.BROKEN_CONTAINER,
    "bad/mozilla__mp4parse-rust__no_timescale.mp4": Reason.DAMAGED,
    "bad/webmproject__libwebm__blockgroup_block_ends_beyond_blockgroup.mkv": Reason.TRUNCATED,
    "bad/webmproject__libwebm__invalid_vp9_bitstream-bug_1416.webm": Reason.TOO_LARGE,
    "bad/webmproject__libwebm__matroska_doctype.mkv": Reason.NO_DECODER,
}
OPTIONS = ["--samples-per-shard", "24", *os.environ.get("FASTVID_SOAK_OPTIONS", "").split()]


@pytest.fixture(scope="module")
def known(footage):
    with (footage / "manifest.csv").open(encoding="utf-8", newline="") as file:
        return {f"{row['folder']}/{row['file']}": row for row in csv.DictReader(file)}


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    named = os.environ.get("FASTVID_SOAK_DIR")
    return Path(named) if named else tmp_path_factory.mktemp("corpus")


def test_unusual_files_are_packed_and_bad_ones_have_a_reason(footage, known, tmp_path):
    run_job([str(footage / name) for name in (*GOOD, *BAD)], tmp_path / "out", workers=2, samples_per_shard=10)
    rows = {row["source_id"]: row for row in ledger(tmp_path / "out")}
    assert not [problem for name, row in rows.items() if (problem := judge(name, row, known[name], "compact"))]
    assert {name: row["reason"] for name, row in rows.items()} == dict.fromkeys(GOOD) | BAD


@pytest.mark.soak
@pytest.mark.timeout(7200)
@pytest.mark.parametrize("profile", PROFILES)
def test_every_file_has_one_true_row(profile, footage, known, place):
    out = place / profile
    folders = [footage / name for name in ("clean", "odd", "bad")]
    done = subprocess.run(
        [sys.executable, "-m", "fastvid", "shard", *folders, "--out", out, "--profile", profile, *OPTIONS],
        env=os.environ | {"PYTHONPATH": str(REPOSITORY)},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 3, done.stderr
    listed = ledger(out)
    rows = {row["source_id"]: row for row in listed}
    assert len(rows) == len(listed)
    assert set(rows) == set(known)
    wrong = [problem for name, row in rows.items() if (problem := judge(name, row, known[name], profile))]
    assert not wrong
    report = verify_dataset(str(out), sample=VERIFIED, workers=1)
    assert report.ok, report.problems
    if "FASTVID_SOAK_DIR" not in os.environ:
        shutil.rmtree(out)


def judge(name: str, row: dict, manifest: dict, profile: str) -> str | None:
    """Return what is wrong with a ledger row; None if it is correct."""
    verdict = row["reason"] or "packed"
    if name.startswith("bad/"):
        return None if row["status"] == "rejected" and row["message"] else f"{name} is packed"
    right = RIGHT[name]["copy" if profile == "copy" else "verdict"]
    if verdict != right:
        return f"{name} is {verdict} ({row['message']}), right is {right}"
    if verdict != "packed":
        return None
    timing, frames = RIGHT[name]["timing"], int(manifest["frames"])
    if profile != "copy" and timing == "gaps":
        frames = int(RIGHT[name]["filled"])
    slack = 1 if profile != "copy" and timing == "variable" else 0
    if abs(row["num_frames"] - frames) > slack:
        return f"{name} has {row['num_frames']} frames, right are {frames}"
    return None
