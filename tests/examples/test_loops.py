"""The examples of plain loops: two processes train on each clip once, and a run stopped in an epoch continues."""

import json

import pytest

from tests import forks
from tests.datasets import REPOSITORY
from tests.examples import kit

RUN = """
import faulthandler, json, os, runpy, sys
faulthandler.dump_traceback_later(300, exit=True)
import torch.distributed as dist
example, url, out, steps, seen = sys.argv[1:]
destroy = dist.destroy_process_group
left = []
def destroy_and_look(group=None):
    destroy(group)
    names = [open(f"/proc/self/task/{thread}/comm").read() for thread in os.listdir("/proc/self/task")]
    left.append([name for name in names if "gloo" in name])
dist.destroy_process_group = destroy_and_look
main = runpy.run_path(example)["main"]
found = main(url, out, crop=32, steps=int(steps) or None)
open(f"{seen}-{os.environ['RANK']}", "w").write(json.dumps(found))
# A gloo thread that outlives its group can hang the loop's end, or abort the process as the interpreter exits.
assert left == [[]], left
"""


@pytest.mark.parametrize("name", ["ddp", "accelerate_loop"])
def test_two_processes_train_on_each_clip_once_and_a_stopped_run_continues(tmp_path, name):
    url = kit.dataset(tmp_path, 18)

    def run(world, out, steps=0):
        example, seen = REPOSITORY / "examples" / f"{name}.py", tmp_path / "seen"
        done = forks.ranks(world, "-c", RUN, example, url, tmp_path / out, steps, seen, ACCELERATE_USE_CPU="true")
        assert [rank.returncode for rank in done] == [0] * world, done
        ranks = [json.loads((tmp_path / f"seen-{rank}").read_text()) for rank in range(world)]
        return [
            tuple(sorted((step[0], position) for step in steps for position in step[1:]))
            for steps in zip(*ranks, strict=True)
        ]

    whole = run(2, "whole")
    assert whole == [tuple((epoch, 4 * step + row) for row in range(4)) for epoch in range(2) for step in range(4)]
    # Stopped by two processes in the first epoch, continued by one.
    assert run(2, "stopped", steps=3) + run(1, "stopped") == whole


@pytest.mark.parametrize("path", sorted((REPOSITORY / "examples").glob("*.py")), ids=lambda path: path.stem)
def test_an_example_fits_on_a_page(path):
    code, quoted = 0, False
    for line in path.read_text().splitlines():
        starts = line.count('"""') % 2
        blank = not line.strip() or line.lstrip().startswith("#")
        code += not (blank or quoted or starts)
        quoted ^= bool(starts)
    # The whole idea of fastvid takes more than a way to use it.
    assert code <= (500 if path.stem == "small" else 40)
