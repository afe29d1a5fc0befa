"""What ``python -m bench lerobot`` runs with LeRobot, in an interpreter of its own that has neither fastvid nor bench.

    python bench/load/lerobot_programs.py make ROOT FOOTAGE EPISODES FRAMES CAMERAS
    python bench/load/lerobot_programs.py rate ROOT BACKEND WORKERS BATCH SECONDS
    python bench/load/lerobot_programs.py items ROOT BACKEND INDEX,INDEX,...
    python bench/load/lerobot_programs.py version ROOT

Each prints one line of JSON last.
"""

import hashlib
import importlib.metadata
import itertools
import json
import os
import sys
import time
from pathlib import Path

FPS = 10
SIZE = (240, 320)  # height, width
SQUARE = 16  # pixels of a painted bit
BITS = 16
OFFSETS = [-0.1, 0.0]


def cameras(number):
    return [f"observation.images.cam{camera}" for camera in range(number)]


def make(root, footage, episodes, frames, number):
    """Write a dataset of real footage, in which each frame shows its number of all, 16 squares from the left."""
    import av
    import numpy as np
    from lerobot.datasets.lerobot_dataset import LeRobotDataset

    names, (height, width) = cameras(number), SIZE
    picture = {"dtype": "video", "shape": (height, width, 3), "names": ["height", "width", "channels"]}
    state = {"dtype": "float32", "shape": (7,), "names": None}
    features = dict.fromkeys(names, picture) | {"observation.state": state, "action": state}
    made = LeRobotDataset.create("bench/robot", FPS, features, root=Path(root))

    def endless(first):
        files = sorted(path for path in Path(footage).rglob("*") if path.suffix in (".mp4", ".webm", ".mkv"))
        for path in itertools.cycle(files[first::number] or files):
            try:
                with av.open(str(path)) as opened:
                    for frame in opened.decode(video=0):
                        yield frame.reformat(width, height, "rgb24").to_ndarray()
            except av.FFmpegError:
                continue

    sources, rng, count = [endless(camera) for camera in range(number)], np.random.default_rng(0), 0
    for episode in range(episodes):
        for _ in range(frames):
            row = {"observation.state": rng.normal(size=7).astype(np.float32), "task": f"task {episode % 5}"}
            row["action"] = rng.normal(size=7).astype(np.float32)
            for name, source in zip(names, sources, strict=True):
                row[name] = next(source).copy()
                for bit in range(BITS):
                    row[name][:SQUARE, SQUARE * bit : SQUARE * (bit + 1)] = 255 * (count >> bit & 1)
            made.add_frame(row)
            count += 1
        made.save_episode()
    made.finalize()
    return {"frames": count}


def opened(root, backend):
    from lerobot.datasets.lerobot_dataset import LeRobotDataset

    root = Path(root)
    names = [name for name in json.loads((root / "meta/info.json").read_text())["features"] if "images" in name]
    deltas = dict.fromkeys(names, OFFSETS) | {"action": [0.0, 0.1, 0.2]}
    return names, LeRobotDataset(
        "bench/robot", root=root, delta_timestamps=deltas, return_uint8=True, video_backend=backend
    )


def rate(root, backend, workers, batch, seconds):
    """Return items a second of a DataLoader in random order, and the seconds until its first batch."""
    import torch

    begun = time.perf_counter()
    _, dataset = opened(root, backend)
    generator = torch.Generator().manual_seed(os.getpid())
    loader = torch.utils.data.DataLoader(
        dataset, batch_size=batch, shuffle=True, num_workers=workers, generator=generator, drop_last=True
    )
    batches = iter(loader)
    next(batches)
    first = time.perf_counter() - begun
    for _ in range(2 * workers):  # what the workers had read ahead
        next(batches)
    begun, count = time.perf_counter(), 0
    while time.perf_counter() - begun < seconds:
        if (_ := next(batches, None)) is None:
            batches = iter(loader)
            continue
        count += batch
    return {"rate": count / (time.perf_counter() - begun), "first_batch": first}


def items(root, backend, indices):
    """Return a digest and the painted number of each frame of some items; null for an item that is an error."""
    names, dataset = opened(root, backend)
    found = []
    for index in indices:
        try:
            item = dataset[index]
        except Exception as error:  # noqa: BLE001
            found.append({"error": repr(error)[:200]})
            continue
        found.append({name: [described(frame) for frame in item[name]] for name in names})
    return {"items": found}


def described(frame):
    """Return the digest of a frame [3, H, W], and the number that it shows."""
    squares = frame[:, :SQUARE, : SQUARE * BITS].float().mean(dim=(0, 1)).reshape(BITS, SQUARE).mean(dim=1) > 127
    number = sum(int(bit) << place for place, bit in enumerate(squares.tolist()))
    return [hashlib.sha256(frame.contiguous().numpy().tobytes()).hexdigest()[:16], number]


def main(words):
    command, root, *rest = words
    if command == "make":
        return make(root, rest[0], *map(int, rest[1:]))
    if command == "version":
        return {"version": importlib.metadata.version("lerobot")}
    if command == "rate":
        return rate(root, rest[0], int(rest[1]), int(rest[2]), float(rest[3]))
    return items(root, rest[0], [int(index) for index in rest[1].split(",")])


if __name__ == "__main__":
    print(json.dumps(main(sys.argv[1:])))
