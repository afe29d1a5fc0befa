"""A rank of `test_loader_video`: ``python -m tests.load.video_ranks DATASET RESULT``.

In each world that includes this rank, it stops after a batch, resumes, and runs a second epoch.
"""

import json
import os
import sys
from pathlib import Path

from tests.load.test_loader_video import WORLDS, make, rows


def main() -> None:
    options = {"rank": None, "world_size": None, "global_batch_size": 5}
    found = {}
    for world in WORLDS:
        if int(os.environ["RANK"]) >= world:
            continue
        os.environ["WORLD_SIZE"] = str(world)
        loader = make(sys.argv[1], **options)
        batches, states = [], []
        for number, batch in enumerate(loader):
            batches.append(rows(batch))
            states.append(loader.state_dict())
            if number == 0:
                break
        resumed = make(sys.argv[1], **options)
        resumed.load_state_dict(states[0])
        batches += [rows(batch) for batch in resumed] + [rows(batch) for batch in resumed]
        found[world] = {"batches": batches, "state": resumed.state_dict()}
    Path(sys.argv[2]).write_text(json.dumps(found))


if __name__ == "__main__":
    main()
