"""Training runs whose ranks are killed at random moments: ``python -m tests.load.rank_kills FOLDER RUNS SEED``.

FOLDER/set is a dataset of at least 45 batches. A run uses the real trainer and loader on real files, in one forked
process per rank. It is killed twice and resumes with another world size; checkpoints are written in the middle and at
the end of each epoch, at least 20 steps apart. Every rank records each row that it gets. Prints one JSON object.
"""

import contextlib
import itertools
import json
import mmap
import os
import random
import signal
import struct
import sys
import time
import traceback
import zlib
from dataclasses import dataclass
from pathlib import Path

import torch

from bench.common.ports import reserved_port
from bench.elastic.paced_model import net
from fastvid.format.dataset import Dataset
from fastvid.load.clips.crops import CenterCrop, HorizontalFlip, RandomCrop
from fastvid.load.clips.sampling import Segments
from fastvid.train.config.config import Config, DataConfig, ModelConfig, OptimConfig, RunConfig
from fastvid.train.loop.loop import Trainer
from fastvid.train.loop.strategy import build_strategy
from fastvid.train.parts.optim import Schedule, make_optimizer
from fastvid.train.parts.replica import Loader, Replica
from fastvid.train.ranks import join
from fastvid.train.records.checkpoint import Checkpoints, decode
from fastvid.train.run.assemble import read_state
from tests.load.loaders import clip_loader

BATCH = 8
STEPS = 45  # per epoch
EPOCHS = 2
GAP = 20  # minimum number of steps between checkpoints
WORLDS = (1, 2, 3, 4)
KILLS = 2
TIMEOUT_S = 20.0

ROW = struct.Struct("<qqqI")
"""Epoch, position, sample, checksum of frame numbers and pixels."""


class RecordingLoader(Loader):
    """Records each batch before it yields it.

    Args:
        clips: The loader.
        notes: File descriptor of the record.
        given: Counter of batches, by which the parent chooses the moment to kill.
        ahead: Samples by which its state exceeds the delivered ones, like a loader that counts prefetched samples. Used
            as a control: the comparison must detect it.
    """

    def __init__(self, clips, notes, given, ahead):
        super().__init__(clips)
        self.notes, self.given, self.ahead = notes, given, ahead

    def __iter__(self):
        for batch in super().__iter__():
            rows = []
            columns = (batch.position.tolist(), batch.sample.tolist(), batch.frame_index, batch.video)
            for position, sample, frames, video in zip(*columns, strict=True):
                content = zlib.crc32(video.numpy().tobytes(), zlib.crc32(frames.numpy().tobytes()))
                rows.append(ROW.pack(batch.epoch, position, sample, content))
            os.write(self.notes, b"".join(rows))
            self.given[0] += 1
            yield batch

    def state_dict(self):
        state = self.clips.state_dict()
        return state | {"position": min(state["position"] + self.ahead, STEPS * BATCH)}


class StepwiseTrainer(Trainer):
    """Writes a checkpoint after a given step of each epoch, in addition to the end of the epoch, not by time."""

    after = 0

    def _requests(self):
        return torch.tensor([0, int((self._steps + 1) % STEPS == self.after)])


@dataclass
class Life:
    """The record of one world from its start until it was killed or finished."""

    world: int
    start: int  # samples of the checkpoint that it resumed from
    rows: list[tuple[int, int, int, int]]
    killed: list[int]
    steps: int


class Shared:
    """Number of batches delivered by each rank, in memory shared by parent and children."""

    def __init__(self, world):
        self.memory = memoryview(mmap.mmap(-1, 8 * world)).cast("q")

    def steps(self):
        return max(self.memory)


def configure(folder, name):
    crops = (RandomCrop(32), HorizontalFlip(0.5))
    return Config(
        data=DataConfig(
            path=str(folder / "set"), frames=Segments(3), eval_frames=Segments(3), spatial=crops,
            eval_spatial=(CenterCrop(32),), global_batch_size=BATCH,
        ),
        model=ModelConfig(name="bench.elastic.paced_model:net", num_classes=2),
        optim=OptimConfig(base_lr=0.05, base_batch_size=BATCH, warmup_epochs=0.5, decay="cosine", clip_norm=1.0),
        run=RunConfig(out=str(folder / name), epochs=EPOCHS, log_every_steps=1000, timeout_s=TIMEOUT_S),
    )  # fmt: skip


def train(config, notes, given, *, after, ahead):
    """Train one rank from the newest checkpoint to the end."""
    torch.set_num_threads(1)
    with join(TIMEOUT_S) as member, contextlib.ExitStack() as opened:
        data = config.data
        clips = clip_loader(
            Dataset(data.path),
            frames=data.frames,
            spatial=data.spatial,
            global_batch_size=BATCH,
            decoder="pyav",
            num_threads=1,
            rank=member.world.rank,
            world_size=member.world.size,
        )
        opened.callback(clips.close)
        assert len(clips) == STEPS
        torch.manual_seed(0)
        model = net(num_classes=2, num_frames=3)
        schedule = Schedule(config.optim, epochs=EPOCHS, samples_per_epoch=STEPS * BATCH, global_batch_size=BATCH)
        trainer = StepwiseTrainer(
            config,
            member,
            Replica(model, make_optimizer(model, config.optim), schedule),
            RecordingLoader(clips, notes, given, ahead),
            build_strategy("ddp", member, {}),
            checkpoints=Checkpoints(str(Path(config.run.out) / "checkpoints"), keep=100),
        )
        trainer.after = after
        _, state = read_state(trainer.checkpoints, member)
        if state is not None:
            trainer.load_state_dict(state)
        os.write(notes, ROW.pack(-1, trainer.replica.samples, 0, 0))
        assert trainer.fit()


def fork(world, config, life, options, port):
    """Fork the ranks of a world."""
    shared = Shared(world)
    ranks = []
    for rank in range(world):
        child = os.fork()
        if child:
            ranks.append(child)
            continue
        code = 1
        try:
            out = Path(config.run.out)
            log = os.open(out / "log.txt", os.O_CREAT | os.O_APPEND | os.O_WRONLY)
            os.dup2(log, 1)
            os.dup2(log, 2)
            os.environ |= {"RANK": str(rank), "WORLD_SIZE": str(world), "MASTER_ADDR": "127.0.0.1"}
            os.environ["MASTER_PORT"] = str(port)
            notes = os.open(notes_of(config, life, rank), os.O_CREAT | os.O_WRONLY)
            train(config, notes, shared.memory[rank : rank + 1], **options)
            code = 0
        except BaseException:  # noqa: BLE001 - told by the exit code, and in the log
            traceback.print_exc()
            sys.stderr.flush()
        finally:
            os._exit(code)
    return ranks, shared


def live(config, life, world, moment, options, port):
    """Run one world to the end, or until some ranks are killed.

    Args:
        config: The run.
        life: Index of this world in the run.
        world: World size.
        moment: None, or (steps to wait for, seconds after them, ranks to kill).
        options: Options of `train`.
        port: Port of the rendezvous.
    """
    ranks, shared = fork(world, config, life, options, port)
    codes = {}
    if moment is not None:
        steps, seconds, victims = moment
        while shared.steps() < steps and len(codes) < world:
            reap(ranks, codes)
            time.sleep(0.001)
        time.sleep(seconds)
        for victim in victims:
            if ranks[victim] not in codes:
                os.kill(ranks[victim], signal.SIGKILL)
        # Kill surviving ranks that do not exit soon after losing their peer, as torchrun's agent does.
        deadline = time.monotonic() + 2
        while len(codes) < world and time.monotonic() < deadline:
            reap(ranks, codes)
            time.sleep(0.001)
        for rank in ranks:
            if rank not in codes:
                os.kill(rank, signal.SIGKILL)
    while len(codes) < world:
        reap(ranks, codes)
        time.sleep(0.001)
    killed = [rank for rank in (moment[2] if moment else []) if codes[ranks[rank]] == -signal.SIGKILL]
    if not killed:
        assert not any(codes.values()), f"{codes}, see {config.run.out}/log.txt"
    noted = [row for rank in range(world) for row in read(notes_of(config, life, rank))]
    starts = {position for epoch, position, *_ in noted if epoch < 0}
    assert len(starts) <= 1, starts
    rows = [row for row in noted if row[0] >= 0]
    return Life(world, starts.pop() if starts else -1, rows, killed, shared.steps())


def reap(ranks, codes):
    """Record the exit codes of children that have exited."""
    for rank in ranks:
        if rank not in codes:
            ended, status = os.waitpid(rank, os.WNOHANG)
            if ended:
                codes[rank] = os.waitstatus_to_exitcode(status)


def notes_of(config, life, rank):
    return Path(config.run.out) / f"rows-{life}-{rank}"


def read(path):
    """Return the rows that a rank recorded; empty if it was killed before the first."""
    data = path.read_bytes() if path.exists() else b""
    return list(ROW.iter_unpack(data[: len(data) // ROW.size * ROW.size]))


def weights_have_seen(lives):
    """Return the rows in the final weights: of each world those before the checkpoint from which the next resumed."""
    started = [life for life in lives if life.start >= 0]
    stops = [life.start for life in started[1:]] + [STEPS * BATCH * EPOCHS]
    rows = []
    for life, stop in zip(started, stops, strict=True):
        rows += [row for row in life.rows if row[0] * STEPS * BATCH + row[1] < stop]
    return sorted(rows)


def whole(folder, name, worlds, moments, *, after, ahead=0):
    """Execute a run through all worlds; return its result (None if it ended before a kill) and the worlds' records."""
    config = configure(folder, name)
    Path(config.run.out).mkdir()
    options = {"after": after, "ahead": ahead}
    lives = []
    for number, (world, moment) in enumerate(zip(worlds, [*moments, None], strict=True)):
        with reserved_port() as port:
            lives.append(live(config, number, world, moment, options, port))
        if moment is not None and not lives[-1].killed:
            return None, lives  # the run ended before the kill
    found = Checkpoints(str(Path(config.run.out) / "checkpoints")).newest()
    state = decode(found.data, found.name)
    names = Checkpoints(str(Path(config.run.out) / "checkpoints")).names()
    return {
        "rows": weights_have_seen(lives),
        "lineage": state["lineage"],
        "weights": state["replica"]["model"],
        "checkpoints": [int(one.split("-")[1]) // BATCH for one in names],
    }, lives


def draw(draws):
    """Draw world sizes, each unlike the previous, and kill moments: usually a random step, sometimes startup."""
    worlds = [draws.choice(WORLDS)]
    while len(worlds) <= KILLS:
        worlds.append(draws.choice([world for world in WORLDS if world != worlds[-1]]))
    moments = []
    for world in worlds[:-1]:
        starting = draws.random() < 0.1
        steps = 0 if starting else draws.randint(1, STEPS * EPOCHS // KILLS)
        seconds = draws.uniform(0, 0.5 if starting else 0.02)
        moments.append((steps, seconds, sorted(draws.sample(range(world), draws.randint(1, world)))))
    return worlds, moments


def main():
    folder, runs, seed = Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3])
    draws = random.Random(seed)
    truth, _ = whole(folder, "undisturbed", [1], [], after=draws.randint(GAP, STEPS - GAP))
    record = {"seed": seed, "steps": STEPS * EPOCHS, "rows": len(truth["rows"]), "runs": [], "tries": 0}
    ids = [row[:3] for row in truth["rows"]]
    while len(record["runs"]) < runs:
        record["tries"] += 1
        assert record["tries"] <= 2 * runs, "runs are over before they can be killed"
        after, (worlds, moments) = draws.randint(GAP, STEPS - GAP), draw(draws)
        found, lives = whole(folder, f"run{record['tries']}", worlds, moments, after=after)
        if found is None:
            continue
        pairs = zip(truth["weights"].values(), found["weights"].values(), strict=True)
        steps = [0, *found["checkpoints"]]
        record["runs"].append(
            {
                "worlds": worlds,
                "killed": [
                    {"ranks": life.killed, "after_steps": life.steps, "went_on_from_step": max(0, again.start) // BATCH}
                    for life, again in itertools.pairwise(lives)
                ],
                "steps_between_checkpoints": min(b - a for a, b in itertools.pairwise(steps)),
                "same_ids": [row[:3] for row in found["rows"]] == ids,
                "same_clips": found["rows"] == truth["rows"],
                "same_lineage": found["lineage"] == truth["lineage"],
                "weights_differ_by": max(float((one - other).abs().max()) for one, other in pairs),
            }
        )
    # The control: after a kill within an epoch, a loader that counts prefetched samples loses rows.
    harmed, _ = whole(folder, "harmed", [2, 3], [(GAP + 15, 0.0, [0])], after=GAP, ahead=2 * BATCH)
    record["control_differs"] = harmed is not None and harmed["rows"] != truth["rows"]
    print(json.dumps(record))


if __name__ == "__main__":
    main()
