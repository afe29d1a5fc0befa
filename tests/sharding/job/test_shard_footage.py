"""Real files with every kind of problem, and the right verdict for each."""

from __future__ import annotations

import csv

import pytest

from fastvid.media.reasons import Reason
from fastvid.sharding.job.job import run_job
from tests.sharding.shardtools import ledger

# Short files. The whole footage is in test_corpus_soak.py.
GOOD = {
    "clean/ROCm__vision__hmdb51_Turnk_r_Pippi_Michel_cartwheel_f_cm_np2_le_med_6.avi": 83,  # metadata cut mid-character
    "clean/open-mmlab__mmaction2__part_0.mp4": 33,  # 32 frames and one hole
    "clean/intel-iot-devkit__sample-videos__brother.mkv": 66,  # 65 frames and one hole, full range
    "odd/Eyevinn__mp4ff__4pics.264": 4,  # raw stream without timestamps
    "odd/Zulko__moviepy__-video-with-dash-.mp4": 5,  # 1x1 pixel, 4:4:4, a dash in front
    "odd/Zulko__moviepy__fire2.mp4": 25,  # upside down, variable rate
    "odd/dmlc__decord__unordered.mov": 4,  # stored out of order
    "odd/google__ExoPlayer__dolbyVision-hdr.MOV": 4,  # HDR, turned, edit list
    "odd/google__ExoPlayer__portrait_4k60.mp4": 18,  # large, turned
    "odd/iejMac__clip-video-encode__vid1.mp4": 56,  # edit list: starts between key frames
    "odd/mathiasbynens__small__webm.webm": 1,  # one frame of 8x8
    "odd/meta-pytorch__torchcodec__testsrc2_odd_height_and_width_444_10bit.mp4": 25,
    "odd/mozilla__mp4parse-rust__video_colr_nclx_hdr10_full_range.mp4": 3,  # HDR, full range, 2x2
    "odd/mozilla__mp4parse-rust__video_rotation_90.mp4": 1,
    "odd/openpreserve__format-corpus__jpeg2000.mov": 25,  # RGB with alpha
    "odd/openpreserve__format-corpus__xdcam-ex-1080i50.mov": 25,  # interlaced
    "odd/rails__rails__rotated_video.mp4": 44,
    "odd/sindresorhus__file-type__fixture.asf": 153,  # no rate at all
    "odd/sindresorhus__file-type__fixture.mpg": 19,  # program stream without a clock
}
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


@pytest.fixture(scope="module")
def rows(footage, tmp_path_factory):
    """Ledger of the chosen files, by name below the footage."""
    out = tmp_path_factory.mktemp("footage") / "out"
    files = [str(footage / name) for name in (*GOOD, *BAD)]
    run_job(files, str(out), workers=2, samples_per_shard=10)
    return {row["source_id"]: row for row in ledger(out)}


def test_every_file_has_one_row(rows):
    assert set(rows) == set(GOOD) | set(BAD)


@pytest.mark.parametrize("name", sorted(GOOD))
def test_unusual_but_valid_files_are_packed(name, rows):
    assert (rows[name]["status"], rows[name]["message"]) == ("packed", None)
    assert abs(rows[name]["num_frames"] - GOOD[name]) <= (1 if "timing-variable" in rows[name]["warnings"] else 0)


@pytest.mark.parametrize("name", sorted(BAD))
def test_bad_files_are_rejected_with_the_right_reason(name, rows):
    assert (rows[name]["status"], rows[name]["reason"]) == ("rejected", BAD[name])
    assert rows[name]["message"]


def test_the_manifest_counts_the_same_frames(rows, footage):
    with (footage / "manifest.csv").open(encoding="utf-8") as file:
        counted = {f"{row['folder']}/{row['file']}": row["frames"] for row in csv.DictReader(file)}
    for name in GOOD:
        if not {"timing-gaps", "timing-variable"} & set(rows[name]["warnings"]):
            assert rows[name]["num_frames"] == int(counted[name]), name
