"""The same table of clips in seconds gives the same frames in place, copied and encoded."""

import pytest

import fastvid
from fastvid.sharding.encode.profiles import PROFILES
from fastvid.sharding.in_place import index_videos
from fastvid.sharding.job.job import run_job
from tests.makers import encode, paint, read_numbers

FRAMES, LENGTH = 136, 17
X264 = "-c:v libx264 -preset veryfast -g 12 -bf 2 -crf 18"
# Containers, encoders and clocks: every frame at n / rate, and one whose rate falls from 30 to 10 a second.
FILES = {
    "a2997.mp4": (30000 / 1001, f"-vf settb=1/30000,setpts=N*1001 -enc_time_base 1/30000 {X264}"),
    "a30.mov": (30, f"-vf settb=1/30,setpts=N -enc_time_base 1/30 {X264} -video_track_timescale 600"),
    "a2997.mkv": (30000 / 1001, f"-vf settb=1/30000,setpts=N*1001 -enc_time_base 1/30000 {X264}"),
    "a25.mp4": (25, X264),
    "a10.webm": (10, "-vf settb=1/10,setpts=N,fps=10 -c:v libvpx-vp9 -b:v 400k -g 12 -cpu-used 8"),
    "fast-slow.mkv": (None, f"-vf settb=1/30,setpts=if(lt(N\\,68)\\,N\\,68+3*(N-68)) -enc_time_base 1/30 {X264}"),
}


def shown_at(name, number):
    rate = FILES[name][0]
    return number / rate if rate else (number + 2 * max(0, number - 68)) / 30


@pytest.fixture(scope="module", params=[2, 3, 6])
def made(request, tmp_path_factory):
    """Datasets of each kind of adjacent clips of 17 frames, whose seconds were rounded."""
    folder = tmp_path_factory.mktemp(f"digits{request.param}")
    (folder / "in").mkdir()
    for name, (_, options) in FILES.items():
        encode(folder / "in" / name, paint(FRAMES, (96, 160)), [*options.split(), "-fps_mode", "passthrough"])
    rows = [
        f"{name},{shown_at(name, first):.{request.param}f},{shown_at(name, first + LENGTH):.{request.param}f},{first}"
        for name in FILES
        for first in range(0, FRAMES, LENGTH)
    ]
    (folder / "clips.csv").write_text("\n".join(["path,start,end,first", *rows]))
    given = {"annotations": f"csv:{folder / 'clips.csv'}", "workers": 1}
    reports = {
        "index": index_videos([str(folder / "in")], folder / "index", **given),
        "copy": run_job(str(folder / "in"), str(folder / "copy"), profile="copy", **given),
        "intra": run_job(
            str(folder / "in"), str(folder / "intra"), profile=PROFILES["intra"].changed(short_side=96), **given
        ),
    }
    assert {name: (report.packed, report.rejected) for name, report in reports.items()} == dict.fromkeys(
        reports, (len(rows), {})
    )
    return folder


@pytest.mark.parametrize("kind", ["index", "copy", "intra"])
def test_a_clip_in_seconds_has_the_nearest_frames_whatever_is_made_of_it(made, kind):
    dataset = fastvid.open(made / kind)
    columns = (dataset.column(name).to_pylist() for name in ("source_id", "first", "start_seconds"))
    for video, source, first, start in zip(dataset, *columns, strict=True):
        name, first = source.split("#")[0], int(first)
        if name.startswith("fast") and kind == "intra":
            continue  # encoded at a constant rate, with other frames
        assert video.num_frames == LENGTH, (name, first)
        found = read_numbers(video.frames(range(LENGTH)).data[..., 0])
        assert found == list(range(first, first + LENGTH)), (name, first)
        assert start == pytest.approx(shown_at(name, first), abs=0.002)


def test_a_clip_in_place_has_the_rate_and_the_end_of_its_own_frames(made):
    dataset = fastvid.open(made / "index")
    for video, source, first, end in zip(
        dataset, *(dataset.column(name).to_pylist() for name in ("source_id", "first", "end_seconds")), strict=True
    ):
        name, last = source.split("#")[0], int(first) + LENGTH
        assert end == pytest.approx(shown_at(name, last), abs=0.07 if last == FRAMES else 0.002)
        rate = FILES[name][0] or (30 if last <= 68 else 10)
        assert float(video.info.fps) == pytest.approx(rate, rel=0.15 if last == FRAMES and not FILES[name][0] else 2e-3)
