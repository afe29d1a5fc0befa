"""The measured parts of the documentation, each a function that makes a text of one result file."""

from __future__ import annotations

import json
import math
import re
import statistics
import textwrap
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from bench.decode import goals
from bench.strategies import contest

RESULTS = Path(__file__).parents[2] / "bench" / "results"
CODECS = {
    "h264": "H.264", "hevc": "HEVC", "vp9": "VP9", "vp8": "VP8", "av1": "AV1", "mpeg4": "MPEG-4", "wmv2": "WMV 8",
    "mpeg2video": "MPEG-2", "mpeg1video": "MPEG-1", "mjpeg": "MJPEG", "theora": "Theora",
}  # fmt: skip


def result(name: str) -> dict[str, Any]:
    """Return a result file."""
    record: dict[str, Any] = json.loads((RESULTS / f"{name}.json").read_text())
    return record


def paragraph(text: str) -> str:
    """Return a sentence or more in lines of the width of the pages."""
    return textwrap.fill(text, 120, break_long_words=False, break_on_hyphens=False)


def table(heads: Sequence[str], rows: Iterable[Sequence[object]]) -> str:
    """Return a Markdown table."""
    lines = [heads, ["---"] * len(heads), *rows]
    return (
        "\n".join(f"| {' | '.join(map(str, line))} |" for line in lines)
        .replace("| --- ", "|---")
        .replace("--- |", "---|")
    )


def spans(text: str) -> str:
    """Return a text whose ranges of numbers are written shorter: 1.2 to 1.5 as 1.2-1.5, with an en dash."""
    return re.sub(r"(?<=\d) to (?=\d)", "\u2013", text)


def clock(seconds: float) -> str:
    """Return minutes and seconds."""
    return f"{round(seconds) // 60} min {round(seconds) % 60} s"


def readme() -> str:
    """Return the README's table: decoding, with ratios to the best rival of the same run, and videos as they are."""
    record, network = result("decode"), result("reads")
    machine, by = record["machine"], record["by"]
    others = [row for path in sorted(RESULTS.glob("decode_*.json")) for row in result(path.stem).get("rows", ())]
    local = [row for row in others if row.get("encoding_of_kind") == "as it is"]
    unit = "CPU ms a clip" if by == "cpu" else "clips/s"
    heads = (
        "encoding, clips",
        "packets decoded",
        f"fastvid RGB, {unit}",
        f"best rival, {unit}",
        "ratio",
        "YUV for a GPU",
    )
    rows = [_decoding(row, by) for row in (*record["rows"], *local)]
    rows += [_over_network(kind, ways, network["latency_ms"]) for kind, ways in network["kinds"].items()]
    versions = ", ".join(f"{name} {version}" for name, version in sorted(machine["packages"].items()))
    by_cpu = f" CPU time, at a load of {machine['load_average']:.1f} when the run began;" if by == "cpu" else ""
    clips = record["rows"][0]["clips"]
    about = paragraph(
        f"{record['workers']} of {machine['cores']} cores of {machine['cpu']};{by_cpu} {clips} clips of real videos"
        " with a short side of 256 pixels, every contender with its best settings, rivals that keep their decoders open"
        f" among them, medians of alternating rounds ({versions})."
    )
    return f"{table(heads, rows)}\n\n{about}\nMeasure your machine and your videos with `python -m bench decode`."


def _decoding(row: Mapping[str, Any], by: str) -> tuple[str, ...]:
    """Return the line of a row of a decode benchmark."""
    (ours,) = (
        one
        for one in row["contenders"]
        if one["name"] == "fastvid" and (one["settings"]["product"], one["settings"]["source"]) == ("rgb", "memory")
    )
    best = goals.best_rival(row, by)
    assert best is not None
    rgb, planes = (best["fastvid_is_faster_by"][f"{product} from memory"] for product in ("rgb", "planes"))
    name = f"{row['kind']} as it is" if "kind" in row else f"`{row.get('encoding', row['profile'])['name']}`"
    packets = row["packets_a_clip"]
    return (
        f"{name}, {row['sampling']}",
        f"{packets['planned']:.0f} of {packets['from_keys']:.0f}",
        _speed(ours, by),
        f"{best['name']} {_speed(best, by)}",
        f"**{rgb[by]:.1f}x** ({rgb[f'{by}_min']:.1f} to {rgb[f'{by}_max']:.1f})",
        f"{planes[by]:.1f}x",
    )


def _speed(entry: Mapping[str, Any], by: str) -> str:
    return f"{entry['cpu_ms']:.1f}" if by == "cpu" else f"{entry['rate']:.0f}"


def _over_network(kind: str, ways: Mapping[str, Any], latency_ms: float) -> tuple[str, ...]:
    """Return the line of videos that nobody encoded for access, read in place over a network by windows."""
    rivals = {name: way for name, way in ways.items() if not name.startswith("fastvid")}
    best, ours = min(rivals, key=lambda name: float(rivals[name]["cpu_ms"])), ways["fastvid"]
    return (
        f"{kind} as it is, {latency_ms:.0f} ms away, {ours['bytes'] / rivals[best]['bytes']:.0%} of the bytes",
        "",
        f"{ours['cpu_ms']:.0f}",
        f"{best} {rivals[best]['cpu_ms']:.0f}",
        f"**{rivals[best]['cpu_ms'] / ours['cpu_ms']:.1f}x**",
        "",
    )


def resume() -> str:
    """Return what each loader delivers after a kill, when its state is resumed as saved and by others."""
    failures: dict[str, str] = {}  # of loaders that do not resume in the same world

    def counts(found: dict[str, Any]) -> str:
        return "".join(f"{sign}{found[name]}" for sign, name in (("\u2212", "lost"), ("+", "doubled")) if found[name])

    def cell(row: dict[str, Any], *cases: str) -> str:
        words = []
        for case in cases:
            found, kind = row["cases"][case], "world" if "rank" in case else "workers" if "worker" in case else None
            if "refused" in found:
                word = "fails" if kind is None else "refused"
                if kind is None:
                    failures[row["package"]] = f"`{found['refused']}`"
            else:
                word = "exact" if found["exact"] and found["next"]["exact"] else counts(found) or "reordered"
            words.append(word + ("" if kind is None or kind in row["offers"] else "*"))
        return "; ".join(dict.fromkeys(words))

    rows = []
    for row in result("resume")["rows"]:
        whole = counts(row["uninterrupted"])
        title = f"{row['title']} {row['version'].partition('+')[0]}" + (f" (uninterrupted {whole})" if whole else "")
        cases = (("same", "second epoch"), ("1 rank", "4 ranks"), ("no workers", "4 workers"))
        rows.append((title, *(cell(row, *pair) for pair in cases)))
    heads = ("loader", "as saved; second epoch", "1 rank; 4 ranks", "0 workers; 4 workers")
    texts = "; ".join(f"{text} ({package})" for package, text in failures.items())
    return f"{table(heads, rows)}\n\n{paragraph(f'Fails: {texts}.')}"


def summit() -> str:
    """Return perfect scaling, the model's prediction and the paper's measurement of training on Summit."""
    record = result("summit")
    (one,) = (
        row for row in record["rows"] if (row["gpus"], row["strategy"], row["algorithm"]) == (6, "ddp", "auto")
    )  # fmt: skip
    times, efficiency = record["references"]
    found, share = times["predicted"], efficiency["predicted"]
    return paragraph(
        f"On {times['gpus']:,} GPUs it predicts {clock(found['p50'])} (5 to 95 %: {clock(found['p05'])} to "
        f"{clock(found['p95'])}) and an efficiency of {100 * share['p50']:.1f} % against one node of 6; Lin et al. "
        f"measured {clock(times['reference'])} and {100 * efficiency['reference']:.1f} %; perfect scaling would take "
        f"{clock(one['train_seconds']['p50'] * 6 / times['gpus'])}. The one fitted input is the step on 6 GPUs."
    )


def floor() -> str:
    """Return what libavcodec alone costs beside fastvid and the best rival, per clip."""
    rows = []
    record = result("decode")
    for row in record["rows"]:
        cost = {
            (one["name"], one["settings"].get("product", ""), one["settings"].get("source", "")): one["cpu_ms"]
            for one in row["contenders"]
        }
        best = goals.best_rival(row, record.get("by", "wall"))
        assert best is not None
        alone = next(one["cpu_ms"] for one in row["contenders"] if one["name"] == "libavcodec alone")
        rgb, planes = (cost["fastvid", product, "memory"] for product in ("rgb", "planes"))
        name = row.get("encoding", row["profile"])["name"]
        rows.append(
            (
                f"`{name}`, {row['sampling']}", f"{alone:.2f}", f"{planes:.2f}", f"{rgb:.2f}",
                f"{best['name']} {best['cpu_ms']:.2f}", f"{best['cpu_ms'] / alone:.2f}x",
                f"{best['cpu_ms'] / rgb:.2f}x",
            )
        )  # fmt: skip
    heads = (
        "clip", "libavcodec alone, ms", "fastvid, planes, ms", "fastvid, RGB, ms", "best rival, ms",
        "most that any decoder could gain", "fastvid gains",
    )  # fmt: skip
    return table(heads, rows)


def tiles() -> str:
    """Return what clips of tiles cost beside other all-intra encodings, and which share of pictures they decode."""
    record = result("tiles")
    costs = [{one["label"]: one for one in row["contenders"]} for row in record["rows"]]
    lines = []
    for label in (label for label in costs[0] if "rgb of" in label and "whole" not in label):
        name = label.partition("rgb of ")[2].partition(",")[0]
        facts = record["encodings"][name]
        cells = [f"{row[label]['cpu_ms']:.2f} ({row[label]['tiles_are_faster_by']['cpu']:.2f}x)" for row in costs]
        quality = "/".join(f"{value:.3f}" for value in facts["ssim"])
        what = label.replace("rgb of ", "").replace(name, f"`{name} --crf {facts['crf']}`")
        lines.append((what, f"{facts['bytes_a_frame']:,}", quality, *cells))
    heads = (
        "8 frames to RGB",
        "bytes a frame",
        "SSIM of Y, U, V",
        *(f"{row['crop']}, CPU ms" for row in record["rows"]),
    )
    shares: dict[str, list[str]] = {}
    for one in record["shares"]:
        shares.setdefault(one["crop"], []).append(f"{one['decoded']:.0%} of {one['width']}x{one['height']}")
    text = "; ".join(f"{crop} {', '.join(sizes)}" for crop, sizes in shares.items())
    lost = {name: cost["on_originals_percent"] for name, cost in result("quality")["costs"].items() if name != "coarse"}
    points = "; ".join(f"`{name}` {cost['mean']:.1f}±{cost['standard_error']:.1f}" for name, cost in lost.items())
    text = f"Decoded share of a picture: {text}. Points of accuracy lost in training: {points}."
    names = {"RandomResizedCrop": "resized", "RandomCrop": "random"}
    goals = {crop: result(f"load_tiles_{name}")["rows"][0]["goals"][0] for crop, name in names.items()}
    speeds = (f"{crop} {one['found']:.2f} (goal {one['wanted']})" for crop, one in goals.items())
    text += f" Whole loaders, {goals['RandomCrop']['what']}: {', '.join(speeds)}."
    return f"{table(heads, lines)}\n\n{paragraph(text)}"


def rivals() -> str:
    """Return how many times faster fastvid decodes to RGB than each rival at its best, by clips, and the goals."""
    rows = result("decode")["rows"]
    lines: dict[str, list[str]] = {}
    for row in rows:
        best: dict[str, dict[str, float]] = {}
        for one in row["contenders"]:
            times = one.get("fastvid_is_faster_by", {}).get("rgb from memory")
            name = one["name"].removesuffix(" kept open")
            if times and one["name"] != "spdl-yuv" and times["cpu"] < best.get(name, times | {"cpu": math.inf})["cpu"]:
                best[name] = times
        for name, times in best.items():
            cell = f"{times['cpu']:.2f} ({times['cpu_min']:.2f} to {times['cpu_max']:.2f})"
            lines.setdefault(name, []).append(cell)
        goal = f"{row['goal']['wanted']}, {'met' if row['goal']['met'] else '**missed**'}"
        lines.setdefault("goal against the best", []).append(goal)
    goals = lines.pop("goal against the best")
    heads = ("rival", *(f"`{row['dataset']}`, {row['sampling']}" for row in rows))
    return spans(table(heads, [*((name, *cells) for name, cells in lines.items()), ("goal against the best", *goals)]))


def footage() -> str:
    """Return how clips of other footage compare with the best rival: the medians, by kind of footage."""
    found: dict[str, list[dict[str, Any]]] = {}
    for path in sorted(RESULTS.glob("decode_*.json")):
        record = result(path.stem)
        for row in record["rows"] if record["schema"] == result("decode")["schema"] else ():
            goal = row.get("goal")
            if goal is not None and ("kind" in row or row["together"] > 1):
                together = f", {row['together']} clips of each video" if row["together"] > 1 else ""
                found.setdefault(f"{row['dataset']}{together}", []).append(goal)
    parts = []
    for name, verdicts in found.items():
        low, high = (f"{pick(goal['found'] for goal in verdicts):.2f}" for pick in (min, max))
        parts.append(f"{name} {low}" if low == high else f"{name} {low} to {high}")
    behind = [name for name, verdicts in found.items() if not all(goal["met"] for goal in verdicts)]
    ahead = f"behind on {', '.join(behind)}" if behind else "ahead of every rival"
    return paragraph(f"There fastvid is {ahead}, by these factors of CPU time: {'; '.join(parts)}.")


def loaders() -> str:
    """Return whole loaders of uint8 batches beside ``ClipLoader``, by profile, and their goals."""
    rows = [row for path in sorted(RESULTS.glob("load_uint8_*.json")) for row in result(path.stem)["rows"]]
    profiles = {row["profile"]: {one["pipeline"]: one for one in row["page-cached"]} for row in rows}
    lines = []
    for name in [name for name in next(iter(profiles.values())) if not re.search("epochs|processes", name)]:
        cells: list[str] = []
        for entries in profiles.values():
            one = entries[name]
            times = one.get("fastvid_is_faster_by") or one.get("fastvid_reaches")
            spread = f"{times['wall']:.2f} ({times['wall_min']:.2f} to {times['wall_max']:.2f})" if times else ""
            cells += [f"{one['clips_a_second']:.0f}", spread]
        lines.append((name, *cells))
    heads = [head for profile in profiles for head in (f"`{profile}`, clips/s", "times slower than fastvid")]
    goals = [goal for row in rows for goal in row["goals"]]
    missed = (
        f"{goal['found']:.2f} {goal['what']} for `{row['profile']}` (goal {goal['wanted']})"
        for row in rows
        for goal in row["goals"]
        if not goal["met"] and goal["what"].startswith("times ")
    )
    told = "; ".join(missed) or "none"
    text = f"Goals met: {sum(goal['met'] for goal in goals)} of {len(goals)}. Missed against rivals: {told}."
    return f"{spans(table(('loader', *heads), lines))}\n\n{paragraph(text)}"


def far_storage() -> str:
    """Return the speed of ``ClipLoader`` over a web server that delays each response, of that from the disk."""
    rows = []
    for http in (
        row["http"] | {"profile": row["profile"]} for ms in (20, 100) for row in result(f"load_http_{ms}")["rows"]
    ):
        ratio, clip = http["http_over_local"], http["a_clip"]
        rows.append(
            (
                f"{http['latency_ms']:.0f} ms", f"`{http['profile']}`", f"{http['http']['clips_a_second']:.0f}",
                f"{ratio['wall']:.2f} ({ratio['wall_min']:.2f} to {ratio['wall_max']:.2f})",
                f"{clip['requests']:.1f}", f"{clip['bytes'] / 1e3:.0f}",
            )
        )  # fmt: skip
    heads = ("each response late by", "shards", "clips/s", "of local", "requests a clip", "kB a clip")
    return spans(table(heads, rows))


def release() -> str:
    """Return size, import time and licences of a bare install."""
    record = result("release")
    bare, size = (sum(record[name].values()) / 1e6 for name in ("bytes_bare", "bytes_installed"))
    # The program says "GNU General Public License as published by ...; either version 3 of the License, or ..."
    ffmpeg = re.sub(
        r"GNU General Public License.*either version (\d).*", r"the GPL, version \1 or later", record["ffmpeg_licence"]
    )
    assert any("NVIDIA" in licence for licence in record["licences_of_extras"].values())
    kinds = {str(licence).split()[0].split("-")[0] for name, licence in record["licences"].items() if name != "numpy"}
    return paragraph(
        "Installed without extras and without torch, fastvid and the packages that it needs take "
        f"{bare:.0f} MB, and with `prepare`, which encodes and filters, {size:.0f} MB. "
        f"`import fastvid` takes {1000 * record['import_s']['median']:.0f} ms. Licences stated: "
        f"{', '.join(sorted(kinds))}, and numpy's set of such; DALI brings libraries under NVIDIA's own. The "
        f"ffmpeg program in `imageio-ffmpeg`, which fastvid runs, is under {ffmpeg}; FFmpeg's libraries in "
        f"`av` are under the {record['av_ffmpeg_licence']}."
    )


def indexing() -> str:
    """Return the sentence on indexing over a network."""
    record = result("index")
    none, sample = record["none"], record["sample"]
    files, seconds = record["files"]["none"], record["video_seconds"]
    return paragraph(
        f"Over a network `none` costs least: {files:,} videos of {min(seconds)} to {max(seconds)} seconds, behind "
        f"{record['latency_ms']:.0f} ms and {record['megabits'] / 1000:.0f} Gbit/s, were indexed in "
        f"{files * statistics.median(none['seconds_a_file']):.0f} s on {record['machine']['cores']} cores, with "
        f"{none['requests_a_file']:.0f} requests and {none['bytes_a_file'] / 1000:.0f} kB a file; downloading took "
        f"{record['times_faster']['none']['median']:.1f} times as long, and `sample` "
        f"{statistics.median(sample['seconds_a_file']):.2f} s a file (`python -m bench index`)."
    )


def which_averaging() -> str:
    """Return how many times sooner than ddp K-step averaging reaches a loss, on several networks."""
    record = result("averaging")
    record["rows"] = [row for row in record["rows"] if row["network"] != "1 Gbit/s" and row["reached"]]
    text = (
        f"Each at its best of the same {len(record['tuning']['ddp'])} rates and schedules, chosen on another seed; "
        f"{record['seeds']} seeds, mean and 95 % interval; {record['clip_ms']:g} ms of computation a clip."
    )
    return f"{paragraph(text)}\n\n{spans(contest.over_networks(record))}"


def which_clients() -> str:
    """Return after how many more clips than one rank, and how much sooner, four clients reach a loss."""
    record = result("clients")
    one, *fours = record["rows"]
    clips, sooner = zip(*((contest.times(one, row, "clips"), contest.times(row, one)) for row in fours), strict=True)
    return paragraph(
        f"Where a step of one rank takes {record['step_ms']:g} ms, four clients took {clips[0]} times its clips to a "
        f"loss of {record['goal']['value']:g}, {sooner[0]} times sooner; with one of them "
        f"{record['slower']:g} times slower, {clips[1]} and {sooner[1]} times ({record['seeds']} seeds, mean and 95 % "
        f"interval). `ddp` takes one rank's clips: without a network, four ranks are 4 times sooner, and with a slow "
        f"one {4 / record['slower']:g} times."
    )


def damaged_files() -> str:
    """Return what happened to damaged files of each codec; `tests.sharding.job.test_mutated_files_soak` measures it."""
    record = result("mutated_files")
    sums = sum((Counter(counts) for profiles in record["outcomes"].values() for counts in profiles.values()), Counter())
    compact = {name: record["outcomes"][codec]["compact"] for codec, name in CODECS.items()}
    packed = ", ".join(f"{name} {one['damaged']} of {one['packed']}" for name, one in compact.items())
    return paragraph(
        f"{record['files']:,} files were truncated, flipped or spliced at random and packed by `compact` and `copy`. "
        f"Jobs that hung: {record['hangs']}; that ended early: {record['job_ends']}. Of {sums['compared']:,} packed "
        f"samples, {sums['other']} show other pictures than ffmpeg's decode of the damaged file, or another order; in "
        f"{sums['unsettled']} more, ffmpeg decodes other pixels in each run. Many decoders report no error for damage. "
        f"Then pictures are packed that the intact file does not have, by `compact` in so many samples: {packed}."
    )
