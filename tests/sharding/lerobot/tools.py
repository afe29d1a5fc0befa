"""Copies of the LeRobot dataset of the tests: with parts changed, or written as version 2.1 was."""

import hashlib
import json
import shutil
from itertools import pairwise
from pathlib import Path

import av
import pyarrow.parquet as pq

import fastvid

FIXTURE = Path(__file__).parent / "fixture"
V3 = FIXTURE / "v3"
ORACLE = json.loads((FIXTURE / "items.json").read_text())
CAMERAS = ("observation.images.top", "observation.images.wrist")
LENGTHS = (7, 1, 12, 9, 20, 5)
STATS = "meta/episodes_stats.jsonl"


def copied(folder):
    shutil.copytree(V3, folder)
    return folder


def as_version_2(folder):
    """Write the dataset as version 2.1 stores it: a video, a table and a line of JSON for each episode."""
    info = json.loads((V3 / "meta/info.json").read_text()) | {
        "codebase_version": "v2.1",
        "data_path": "data/chunk-{episode_chunk:03d}/episode_{episode_index:06d}.parquet",
        "video_path": "videos/chunk-{episode_chunk:03d}/{video_key}/episode_{episode_index:06d}.mp4",
        "chunks_size": 4,
    }
    (folder / "meta").mkdir(parents=True)
    (folder / "meta/info.json").write_text(json.dumps(info))
    table, tasks = pq.read_table(V3 / "data/chunk-000/file-000.parquet"), ("lift the cube", "push it away")
    (folder / "meta/tasks.jsonl").write_text(
        "".join(json.dumps({"task_index": number, "task": task}) + "\n" for number, task in enumerate(tasks))
    )
    lines, starts = [], [0]
    for number, length in enumerate(LENGTHS):
        file = folder / info["data_path"].format(episode_chunk=number // 4, episode_index=number)
        file.parent.mkdir(parents=True, exist_ok=True)
        pq.write_table(table.slice(starts[-1], length), file)
        starts.append(starts[-1] + length)
        lines.append(json.dumps({"episode_index": number, "tasks": [tasks[number % 2]], "length": length}) + "\n")
    (folder / "meta/episodes.jsonl").write_text("".join(lines))
    rows = pq.read_table(V3 / "meta/episodes/chunk-000/file-000.parquet").to_pylist()
    stats = [{name[13:]: value for name, value in row.items() if name.startswith("stats/action/")} for row in rows]
    (folder / STATS).write_text("".join(json.dumps({"stats": {"action": one}}) + "\n" for one in stats))
    for camera in CAMERAS:
        for number, (start, stop) in enumerate(pairwise(starts)):
            names = {"episode_chunk": number // 4, "episode_index": number, "video_key": camera}
            file = folder / info["video_path"].format(**names)
            file.parent.mkdir(parents=True, exist_ok=True)
            _cut(V3 / f"videos/{camera}/chunk-000/file-000.mp4", file, start, stop)
    return folder


def _cut(source, target, start, stop):
    with av.open(str(source)) as found, av.open(str(target), "w") as made:
        stream = found.streams.video[0]
        packets = sorted((packet for packet in found.demux(stream) if packet.size), key=lambda packet: packet.pts)
        chosen = packets[start:stop]
        assert chosen[0].is_keyframe
        copy, first = made.add_stream_from_template(stream, opaque=True), chosen[0].pts
        for packet in sorted(chosen, key=lambda packet: packet.dts):
            packet.pts, packet.dts, packet.stream = packet.pts - first, packet.dts - first, copy
            made.mux(packet)


def loader(dataset, **options):
    """Load every frame of a dataset with what the oracle's items have."""
    import torch

    deltas = ORACLE["deltas"]
    signals = {name: fastvid.Deltas(offsets) for name, offsets in deltas.items() if name not in CAMERAS}
    return fastvid.ClipLoader(
        fastvid.EveryFrame(dataset),
        frames=fastvid.Deltas(deltas[CAMERAS[0]], tolerance=1e-4),
        spatial=fastvid.Native(),
        signals=signals,
        **{
            "global_batch_size": 1,
            "shuffle": False,
            "decoder": "pyav",
            "output": fastvid.Output(dtype=torch.uint8, layout="BTCHW"),
            **options,
        },
    )


def differences(batches, *, pictures=True):
    """Return (item, name) of everything in which items differ from those of LeRobot's own loader."""
    import torch

    wrong, count = [], 0
    for number, batch in enumerate(batches):
        item, count = ORACLE["items"][number], count + 1
        for name in ORACLE["deltas"]:
            if name not in CAMERAS:
                right = torch.equal(batch[name][0], torch.tensor(item[name]))
            elif pictures:
                right = [digest(frame) for frame in batch[name][0]] == item[name]
            else:
                right = painted(batch[name][0]) == numbers(item, name)
            pads = batch[f"{name}_is_pad"][0].tolist() == item[f"{name}_is_pad"]
            wrong += [(number, name)] if not (right and pads) else []
        wrong += [(number, "key")] if list(batch.key) != [f"episode_{item['episode_index']:06d}"] else []
    assert count == len(ORACLE["items"])
    return wrong


def digest(frame):
    return hashlib.sha256(frame.contiguous().numpy().tobytes()).hexdigest()[:16]


def painted(frames):
    """Return the numbers painted in frames [T, 3, H, W]: six squares of 8 x 8 in the corner, a bit each."""
    bits = frames[:, :, :8, :48].float().mean(dim=1).reshape(-1, 8, 6, 8).mean(dim=(1, 3)) > 127
    return [sum(int(bit) << place for place, bit in enumerate(row)) for row in bits.tolist()]


def numbers(item, camera):
    """Return the numbers of the frames of an item: those asked for, held inside the episode."""
    length, fps = LENGTHS[item["episode_index"]], 10
    asked = [item["frame_index"] + round(offset * fps) for offset in ORACLE["deltas"][camera]]
    return [min(max(frame, 0), length - 1) for frame in asked]
