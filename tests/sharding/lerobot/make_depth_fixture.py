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
    noise = np.random.default_rng([episode, frame]).integers(0, 3, SIZE)
    return (400 + 20 * rows + 7 * columns + 500 * (columns > 30) - 9 * frame + noise).astype(np.uint16)


def main(folder):
    shutil.rmtree(folder, ignore_errors=True)
    top, camera = DELTAS
    names = ["height", "width", "channels"]
    features = {
        top: {"dtype": "video", "shape": (*SIZE, 3), "names": names},
        camera: {"dtype": "video", "shape": (*SIZE, 1), "names": names, "info": {"is_depth_map": True}},
        "action": {"dtype": "float32", "shape": (2,), "names": None},
    }
    scale = DepthEncoderConfig(depth_min=0.2, depth_max=5.0)
    encoders = {"rgb_encoder": RGBEncoderConfig(), "depth_encoder": scale}
    made = LeRobotDataset.create("me/depth", 10, features, root=folder / "v3", **encoders)
    for episode, length in enumerate(LENGTHS):
        for frame in range(length):
            rng = np.random.default_rng([7, episode, frame])
            pictures = {top: rng.integers(0, 256, (*SIZE, 3), dtype=np.uint8), camera: depth(episode, frame)[..., None]}
            made.add_frame(pictures | {"action": rng.normal(size=2).astype(np.float32), "task": "look"})
        made.save_episode()
    made.finalize()
    items = {}
    for unit in ("mm", "m"):
        options = {"delta_timestamps": DELTAS, "return_uint8": True, "depth_output_unit": unit}
        oracle = LeRobotDataset("me/depth", root=folder / "v3", **options)
        items[unit] = []
        for value in (oracle[index][camera] for index in range(len(oracle))):
            digests = [hashlib.sha256(one.numpy().tobytes()).hexdigest()[:16] for one in value]
            told = {"shape": list(value.shape), "dtype": str(value.dtype), "frames": digests}
            items[unit].append(told | {"first": value[0, 0, 0, :4].tolist()})
    (folder / "items.json").write_text(json.dumps({"deltas": DELTAS, "items": items}) + "\n")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
