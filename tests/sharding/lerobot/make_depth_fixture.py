"""Makes the LeRobot dataset with depth of the tests, and what LeRobot's own loader delivers of it; see make_fixture.py.

python tests/sharding/lerobot/make_depth_fixture.py tests/sharding/lerobot/depth
"""

import hashlib
import json
import shutil
import sys
from pathlib import Path

import numpy as np
from lerobot.configs.video import DepthEncoderConfig, RGBEncoderConfig
from lerobot.datasets.lerobot_dataset import LeRobotDataset

LENGTHS = (6, 9)
SIZE = (48, 64)
DELTAS = {"observation.images.top": [0.0], "observation.images.depth": [-0.2, 0.0]}


def depth(episode, frame):
    """Millimetres: a slope with steps, nearer with every frame."""
    rows, columns = np.mgrid[: SIZE[0], : SIZE[1]]
    rng = np.random.default_rng([episode, frame])
    return (400 + 20 * rows + 7 * columns + 500 * (columns > 30) - 9 * frame + rng.integers(0, 3, SIZE)).astype(
        np.uint16
    )


def main(folder):
    shutil.rmtree(folder, ignore_errors=True)
    features = {
        "observation.images.top": {"dtype": "video", "shape": (*SIZE, 3), "names": ["height", "width", "channels"]},
        "observation.images.depth": {
            "dtype": "video",
            "shape": (*SIZE, 1),
            "names": ["height", "width", "channels"],
            "info": {"is_depth_map": True},
        },
        "action": {"dtype": "float32", "shape": (2,), "names": None},
    }
    made = LeRobotDataset.create(
        "me/depth",
        10,
        features,
        root=folder / "v3",
        rgb_encoder=RGBEncoderConfig(),
        depth_encoder=DepthEncoderConfig(depth_min=0.2, depth_max=5.0),
    )
    for episode, length in enumerate(LENGTHS):
        for frame in range(length):
            rng = np.random.default_rng([7, episode, frame])
            made.add_frame(
                {
                    "observation.images.top": rng.integers(0, 256, (*SIZE, 3), dtype=np.uint8),
                    "observation.images.depth": depth(episode, frame)[..., None],
                    "action": rng.normal(size=2).astype(np.float32),
                    "task": "look",
                }
            )
        made.save_episode()
    made.finalize()
    items = {}
    for unit in ("mm", "m"):
        oracle = LeRobotDataset(
            "me/depth", root=folder / "v3", delta_timestamps=DELTAS, return_uint8=True, depth_output_unit=unit
        )
        items[unit] = []
        for index in range(len(oracle)):
            value = oracle[index]["observation.images.depth"]
            digests = [hashlib.sha256(one.numpy().tobytes()).hexdigest()[:16] for one in value]
            items[unit].append(
                {
                    "shape": list(value.shape),
                    "dtype": str(value.dtype),
                    "frames": digests,
                    "first": value[0, 0, 0, :4].tolist(),
                }
            )
    (folder / "items.json").write_text(json.dumps({"deltas": DELTAS, "items": items}) + "\n")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
