"""Makes the LeRobot datasets of the tests, and what LeRobot's own loader delivers of them.

Not a test. Run by an interpreter that has lerobot 0.6.1 (Python 3.12, torch 2.11.0, torchvision 0.26.0):

    python tests/sharding/lerobot/make_fixture.py tests/sharding/lerobot/fixture

Frames are noise with the number of the frame painted in the corner, so that any two differ. What LeRobot delivers is
stored as digests of the frames that torchcodec decodes, and the values of the signals.
"""

import hashlib
import json
import shutil
import sys
from pathlib import Path

import numpy as np
from lerobot.configs.video import RGBEncoderConfig
from lerobot.datasets.lerobot_dataset import LeRobotDataset

FPS = 10
LENGTHS = (7, 1, 12, 9, 20, 5)
CAMERAS = {"observation.images.top": (64, 96), "observation.images.wrist": (80, 64)}
DELTAS = {
    "observation.images.top": [-0.2, 0.0],
    "observation.images.wrist": [-0.2, 0.0],
    "observation.state": [-0.1, 0.0],
    "action": [0.0, 0.1, 0.5],
}


def picture(camera, episode, frame, size):
    rng = np.random.default_rng([camera, episode, frame // 4])
    small = rng.integers(0, 256, (size[0] // 8, size[1] // 8, 3), dtype=np.uint8)
    whole = np.kron(small, np.ones((8, 8, 1), np.uint8))
    for bit in range(6):
        whole[:8, 8 * bit : 8 * bit + 8] = 255 * (frame >> bit & 1)
    return whole


def main(folder):
    shutil.rmtree(folder, ignore_errors=True)
    features = {
        name: {"dtype": "video", "shape": (*size, 3), "names": ["height", "width", "channels"]}
        for name, size in CAMERAS.items()
    }
    features |= {
        "observation.state": {"dtype": "float32", "shape": (3,), "names": ["x", "y", "z"]},
        "action": {"dtype": "float32", "shape": (2,), "names": ["left", "right"]},
        "next.reward": {"dtype": "float32", "shape": (1,), "names": None},
        "next.done": {"dtype": "bool", "shape": (1,), "names": None},
    }
    made = LeRobotDataset.create(
        "me/made", FPS, features, root=folder / "v3", rgb_encoder=RGBEncoderConfig(), video_files_size_in_mb=1
    )
    for episode, length in enumerate(LENGTHS):
        for frame in range(length):
            rng = np.random.default_rng([9, episode, frame])
            made.add_frame(
                {name: picture(number, episode, frame, size) for number, (name, size) in enumerate(CAMERAS.items())}
                | {
                    "observation.state": rng.normal(size=3).astype(np.float32),
                    "action": rng.normal(size=2).astype(np.float32),
                    "next.reward": np.array([frame / 10], np.float32),
                    "next.done": np.array([frame + 1 == length]),
                    "task": ("lift the cube", "push it away")[episode % 2],
                }
            )
        made.save_episode()
    made.finalize()
    options = {"delta_timestamps": DELTAS, "return_uint8": True, "video_backend": "torchcodec"}
    oracle = LeRobotDataset("me/made", root=folder / "v3", **options)
    items = []
    for index in range(len(oracle)):
        item, found = oracle[index], {}
        for name, value in item.items():
            found[name] = value.tolist() if hasattr(value, "tolist") and name not in CAMERAS else value
            if name in CAMERAS:
                found[name] = [hashlib.sha256(one.numpy().tobytes()).hexdigest()[:16] for one in value]
        items.append(found)
    (folder / "items.json").write_text(json.dumps({"deltas": DELTAS, "items": items}) + "\n")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
