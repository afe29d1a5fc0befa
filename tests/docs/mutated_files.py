"""Write numbers into docs/guarantees.md: ``python -m tests.docs.mutated_files`` after the soak tests.

`tests.sharding.job.test_mutated_files_soak` measures them.
"""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path

ROOT = Path(__file__).parents[2]
PAGE = ROOT / "docs" / "guarantees.md"
RECORD = ROOT / "bench" / "results" / "mutated_files.json"
START, END = "### What is checked by codec\n\n", "\nNot noticed:"
NAMES = {
    "h264": "H.264", "hevc": "HEVC", "vp9": "VP9", "vp8": "VP8", "av1": "AV1", "mpeg4": "MPEG-4", "wmv2": "WMV 8",
    "mpeg2video": "MPEG-2", "mpeg1video": "MPEG-1", "mjpeg": "MJPEG", "theora": "Theora",
}  # fmt: skip


def section() -> str:
    """Return the section of the page."""
    record = json.loads(RECORD.read_text())
    sums = sum((Counter(counts) for profiles in record["outcomes"].values() for counts in profiles.values()), Counter())
    lines = [
        f"{record['files']:,} files of these codecs, in all containers that have them, were truncated, flipped or",
        "spliced at random and packed by `compact` and by `copy` (`make soak`).",
        f"Jobs that hung: {record['hangs']}; that ended early: {record['job_ends']}.",
        f"All {sums['compared']:,} packed samples were compared with ffmpeg's decode of the damaged file. Samples that",
        f"show other pictures or another order, or do not decode (*wrong* below): {sums['other']}.",
        f"In {sums['unsettled']} more (*undefined* below), ffmpeg itself decodes other pixels in each run: a decoder",
        "that loses a slice without an error shows what its memory contained, mostly an earlier frame. If such a",
        "source is packed again, its sample can differ.",
        "Many decoders report no error for damage. Then pictures are packed that the intact file does not have:",
        "",
        "| codec | damaged files | packed by `compact` | with damaged pictures | undefined | wrong "
        "| packed by `copy` | with damaged pictures | undefined | wrong |",
        "|" + "---|" * 10,
    ]
    for codec, name in NAMES.items():
        profiles = record["outcomes"][codec]
        cells = [profiles["compact"]["files"]]
        for profile in ("compact", "copy"):
            cells += [profiles[profile][count] for count in ("packed", "damaged", "unsettled", "other")]
        lines.append(f"| {name} | {' | '.join(map(str, cells))} |")
    lines += [
        "",
        "All other files were rejected with a reason. A lost or truncated packet is noticed if the container counts",
        "packets, stores a duration, or has fragments after the break; a stream that merely ends early is packed.",
    ]
    return "\n".join(lines) + "\n"


def written(page: str) -> str:
    """Return the page with the current section."""
    before, _, rest = page.partition(START)
    return before + START + section() + END + rest.partition(END)[2]


if __name__ == "__main__":
    PAGE.write_text(written(PAGE.read_text()))
