"""The measured parts of the documentation, each a function that makes a text of one result file."""

from __future__ import annotations

import json
import statistics
import textwrap
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

from bench.decode import goals
from bench.load import goals as load_goals
from bench.strategies import tables

RESULTS = Path(__file__).parents[2] / "bench" / "results"


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


def clock(seconds: float) -> str:
    """Return minutes and seconds."""
    return f"{round(seconds) // 60} min {round(seconds) % 60} s"


def loops() -> str:
    """Return the table of the same job in several libraries."""
    heads = ("program", "lines", "clips/s", "of `ClipLoader`", "same clips again", "with another number of workers")
    rows = []
    for row in result("loops")["rows"]:
        low, high = row["of_clip_loader_range"]
        ratio = "1.00" if low == high else f"{row['of_clip_loader']:.2f} ({low:.2f} to {high:.2f})"
        same, elastic = ("yes" if row[key] else "no" for key in ("repeats", "elastic"))
        rows.append((row["program"], row["lines"], f"{row['clips_per_s']:.0f}", ratio, same, elastic))
    return table(heads, rows)


def summit() -> str:
    """Return perfect scaling, the model's prediction and the paper's measurement of training on Summit."""
    record = result("summit")
    rows = {
        row["gpus"]: row for row in record["rows"] if (row["strategy"], row["algorithm"]) == ("ddp", "auto")
    }  # fmt: skip
    times, efficiency = record["references"]
    gpus, measured, share = times["gpus"], times["reference"], efficiency["reference"]
    one = rows[6]["train_seconds"]["p50"]
    perfect = one * 6 / gpus
    found, found_share = times["predicted"], efficiency["predicted"]
    explained = (found["p50"] - perfect) / (measured - perfect)
    lines = table(
        ("", f"time on {gpus:,} GPUs", "efficiency against one node of 6"),
        (
            ("perfect scaling", clock(perfect), "100 %"),
            (
                "model, median (5 to 95 %)",
                f"{clock(found['p50'])} ({clock(found['p05'])} to {clock(found['p95'])})",
                f"{found_share['p50']:.1%} ({found_share['p05']:.0%} to {found_share['p95']:.0%})".replace("%", " %"),
            ),
            ("Lin et al., measured", clock(measured), f"{100 * share:.1f} %"),
        ),
    )
    text = (
        f"The one fitted input is the step on 6 GPUs ({rows[6]['step_seconds']['p50']:.3f} s, from the paper's time "
        f"for one node). Of the {measured - perfect:.0f} s that the measurement takes longer than perfect scaling, the "
        f"median of the model explains {found['p50'] - perfect:.0f} s, {100 * explained:.0f} %. The measurement is "
        "inside the interval only because of the interval's end at the bandwidth of the file system."
    )
    return f"{lines}\n\n{paragraph(text)}"


def adamw() -> str:
    """Return loss and bytes of K-step averaging with AdamW, beside averaged gradients."""
    record = result("moments")
    rows = {row["contender"]: row for row in record["rows"]}
    names = ["ddp adamw", *(name for name in rows if name.startswith("kavg adamw"))]

    def interval(values: Sequence[float]) -> str:
        return f"{statistics.mean(values):.3f} ({min(values):.3f} to {max(values):.3f})"

    lines = [
        (
            f"`{name.removeprefix('kavg adamw ')}`" if name.startswith("kavg") else "gradients averaged in every step",
            interval(rows[name]["train_losses"]), f"{100 * rows[name]['accuracy']:.1f} %",
            rows[name]["all_reduces"], f"{rows[name]['all_reduced_mb']:.1f}",
        )
        for name in names
    ]  # fmt: skip
    text = (
        f"{record['ranks']} ranks, {record['steps']} steps with AdamW at rate {record['adam_lr']:g}, a net of "
        f"{rows['ddp adamw']['parameters']:,} parameters that learns a random teacher's classes with 10 % wrong "
        f"labels, {record['seeds']} seeds (`python -m bench moments`):"
    )
    heads = ("kavg", "training loss, mean (lowest to highest)", "held-out accuracy", "messages", "MB a rank")
    return f"{paragraph(text)}\n\n{table(heads, lines)}"


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


def rivals() -> str:
    """Return every rival decoder beside fastvid, with the memory of what it keeps open, and the goals."""
    record = result("decode")
    rows = []
    for row in record["rows"]:
        for one in row["contenders"]:
            if "fastvid_is_faster_by" in one:
                times = one["fastvid_is_faster_by"]["rgb from memory"]
                spread = f"{times['cpu']:.2f}x ({times['cpu_min']:.2f} to {times['cpu_max']:.2f})"
                kept = f"{max(0.0, one['megabytes_kept']) / row['videos']:.1f}"
                rows.append(
                    (f"`{row['dataset']}`, {row['sampling']}", one["name"], f"{one['cpu_ms']:.1f}", spread, kept)
                )
    heads = ("clips", "rival", "CPU ms a clip", "fastvid RGB is faster by", "MB a video kept")
    verdicts = "\n".join(f"- {line}" for line in goals.lines(record["rows"]))
    return f"{table(heads, rows)}\n\n{verdicts}"


def footage() -> str:
    """Return how clips of other footage compare with the best rival."""
    rows, schema = [], result("decode")["schema"]
    for path in sorted(RESULTS.glob("decode_*.json")):
        record = result(path.stem)
        if record["schema"] != schema:
            continue
        for row in record["rows"]:
            goal = row.get("goal")
            if goal is not None and ("kind" in row or row["together"] > 1):
                low, high = goal["range"]
                together = f", {row['together']} clips of each video" if row["together"] > 1 else ""
                planned, keys = (row["packets_a_clip"][name] for name in ("planned", "from_keys"))
                rows.append((
                    f"{row['dataset']}, {row['sampling']}{together}", f"{planned:.0f} of {keys:.0f}",
                    goal["rival"].split(",")[0], f"{goal['found']:.2f}x ({low:.2f} to {high:.2f})",
                    "met" if goal["met"] else "**missed**",
                ))  # fmt: skip
    return table(("clips", "packets", "best rival", "fastvid RGB is faster by, CPU time", "ahead"), rows)


def loaders() -> str:
    """Return whole loaders of uint8 batches beside ``ClipLoader``, and their goals."""
    record = result("load_uint8")
    rows, verdicts = [], []
    for row in record["rows"]:
        for one in row["page-cached"]:
            times = one.get("fastvid_is_faster_by") or one.get("long_over_short") or one.get("fastvid_reaches")
            spread = f"{times['wall']:.2f}x ({times['wall_min']:.2f} to {times['wall_max']:.2f})" if times else ""
            rate, cpu = f"{one['clips_a_second']:.0f}", f"{one['cpu_ms_a_clip']:.1f}"
            rows.append((f"`{row['profile']}`", one["pipeline"], rate, cpu, spread))
        verdicts += [f"- `{row['profile']}`: {load_goals.sentence(goal)}" for goal in row["goals"]]
    heads = ("shards", "loader", "clips/s", "CPU ms a clip", "fastvid is faster by")
    return f"{table(heads, rows)}\n\n" + "\n".join(verdicts)


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
                f"{clip['requests']:.1f}", f"{clip['bytes'] / 1e3:.0f}", f"{http['a_whole_file']['bytes'] / 1e3:.0f}",
            )
        )  # fmt: skip
    heads = ("each response late by", "shards", "clips/s", "of local", "requests a clip", "kB", "kB of a whole file")
    return table(heads, rows)


def release() -> str:
    """Return size, import time and licences of a bare install."""
    record = result("release")
    size = sum(record["bytes_installed"].values()) / 1e6
    text = (
        f"The wheel of {record['version']} has {record['wheel_bytes'] / 1e6:.1f} MB. Installed without extras, with "
        f"what it needs, it takes {size:.0f} MB; `import fastvid` takes {1000 * record['import_s']['median']:.0f} ms, "
        "because names are imported on first use."
    )
    rows = [
        (f"`{name}`", f"{record['bytes_installed'][name] / 1e6:.0f}", licence)
        for name, licence in sorted(record["licences"].items())
    ]
    inside = (
        f"The ffmpeg program in `imageio-ffmpeg` says: {record['ffmpeg_licence']}. FFmpeg's libraries in `av` say: "
        f"{record['av_ffmpeg_licence']}. fastvid runs the one as a program and uses the other through `av`."
    )
    return f"{paragraph(text)}\n\n{table(('package', 'MB', 'licence, as it states it'), rows)}\n\n{paragraph(inside)}"


def ten_million_rows() -> str:
    """Return the sentence on opening ten million rows."""
    record = result("annotations")
    plain = record["plain"]
    return paragraph(
        f"Opening {record['rows'] // 10**6} million rows (`python -m bench annotations`) takes "
        f"{plain['first_open_s']:.0f} s in the first process of a node and {plain['later_open_s']:.1f} s in later "
        f"ones; {plain['node_processes']} processes together take {plain['node_pss_mb'] / 1000:.1f} GB, instead of "
        f"{plain['memory_pss_mb'] / 1000:.1f} GB each."
    )


def indexing() -> str:
    """Return the sentence on indexing over a network."""
    record = result("index")
    none, sample = record["none"], record["sample"]
    files, seconds = record["files"]["none"], record["video_seconds"]
    return paragraph(
        f"Over a network `none` costs least: {files:,} videos of {min(seconds)} to {max(seconds)} seconds, behind "
        f"{record['latency_ms']:.0f} ms and {record['megabits'] / 1000:.0f} Gbit/s, were indexed in "
        f"{files * statistics.median(none['seconds_a_file']):.0f} s on {record['machine']['cores']} cores, which took "
        f"{record['times_faster']['none']['median']:.1f} times as long to download, with "
        f"{none['requests_a_file']:.0f} requests and {none['bytes_a_file'] / 1000:.0f} kB a file; `sample` took "
        f"{statistics.median(sample['seconds_a_file']):.2f} s a file (`python -m bench index`)."
    )


def which_averaging() -> str:
    """Return the contest of rounds on several networks."""
    return _with_conditions(result("averaging"), tables.over_networks, tables.contest_table)


def which_motion() -> str:
    """Return the contest on the motion dataset over slow wires."""
    return _with_conditions(result("motion_wire"), tables.over_networks, tables.contest_table)


def which_wire() -> str:
    """Return counted time beside time over a real network."""
    return tables.wire_table(result("averaging"))


def which_one_rank() -> str:
    """Return what several ranks need beside one."""
    return tables.than_one_rank(result("averaging"))


def which_clients() -> str:
    """Return the contest of asynchronous clients."""
    return _with_conditions(result("clients"), tables.clients_table)


def which_migration() -> str:
    """Return the sweeps whose models or data move."""
    record = result("migration")
    return f"{paragraph(tables.migration_conditions(record))}\n\n{tables.migration_table(record)}"


def model_speed() -> str:
    """Return the speed of TSM and I3D."""
    text, _, lines = tables.speed_table(result("model_speed")).partition("\n\n")
    return f"{paragraph(text)}\n\n{lines}"


def _with_conditions(record: dict[str, Any], *made: Callable[[dict[str, Any]], str]) -> str:
    return "\n\n".join([paragraph(tables.conditions(record)), *(make(record) for make in made)])
