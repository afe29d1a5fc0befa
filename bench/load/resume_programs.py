"""Loaders of numbered samples for ``python -m bench resume``, in interpreters that may have neither fastvid nor bench.

    python bench/load/resume_programs.py make NAME FOLDER
    python bench/load/resume_programs.py serve NAME FOLDER

`serve` reads a rank's settings as JSON from each line, forks the rank, and prints its process id.

The docstring of a loader is its title, and the text that recommends to resume it in this way. A sample is a small
payload that says its number; fastvid's are frames of videos. The global batch is the same in every world. Where states
are per rank, a rank that did not exist when they were saved loads that of another.
"""

import itertools
import json
import os
import signal
import subprocess
import sys
import time
import traceback
from importlib import import_module
from importlib.metadata import version
from pathlib import Path

SAMPLES, SHARDS, BATCH, SEED = 1024, 16, 16, 7
EACH, STEPS = SAMPLES // SHARDS, SAMPLES // BATCH
BUFFER = 100  # samples of a shuffle buffer, as in Energon's documentation
LOADERS = {}


class Loader:
    """One rank's loader.

    `package`: whose version is recorded. `needs`: modules that are imported before ranks are forked. `offers`: of
    "world" and "workers", what may change between saving and resuming by the documentation. `step`: first to deliver.
    """

    package: str
    needs: list[str]
    offers: str

    def __init_subclass__(cls, name, package, needs="torch.utils.data", offers=""):
        LOADERS[name], cls.package, cls.needs, cls.offers = cls, package, needs.split(), offers

    def __init__(self, root, rank, world, workers):
        self.root, self.rank, self.world, self.workers = Path(root), rank, world, workers
        self.batch, self.step = BATCH // world, 0
        self.open()

    @staticmethod
    def make(root):
        """Write the samples."""

    def open(self):
        """Make what yields batches."""
        self.loader = None

    def batches(self, _epoch):
        """Yield the rest of an epoch as lists of numbers."""
        return map(numbers, self.loader)

    def save(self, folder):
        """Save this rank's state, if there is any."""
        if hasattr(self.loader, "state_dict"):
            import_module("torch").save(self.loader.state_dict(), folder / f"rank{self.rank}.pt")

    def load(self, folder, _epoch):
        """Continue from a state, if there is any."""
        if saved := len(list(folder.glob("rank*.pt"))):
            state = import_module("torch").load(folder / f"rank{self.rank % saved}.pt", weights_only=False)
            self.loader.load_state_dict(state)


class Numbers:
    """A map-style dataset: item i is a payload that says i."""

    def __len__(self):
        return SAMPLES

    def __getitem__(self, index):
        return import_module("torch").full((16,), index)


def numbers(batch):
    """Return the numbers of a batch, which may be a column of a table."""
    batch = batch[next(iter(batch))] if isinstance(batch, dict) else batch
    return [int(one) for one in batch.reshape(len(batch), -1)[:, 0]]


class Skipping(Loader, name="torch", package="torch", offers="world workers"):
    """torch DataLoader, batches skipped by the user

    There is no state; the order of a DistributedSampler depends on its seed and the epoch.
    """

    def open(self):
        data = import_module("torch.utils.data")
        self.sampler = data.DistributedSampler(Numbers(), self.world, self.rank, seed=SEED)
        self.loader = data.DataLoader(Numbers(), self.batch, sampler=self.sampler, num_workers=self.workers)

    def batches(self, epoch):
        self.sampler.set_epoch(epoch)
        return map(numbers, itertools.islice(self.loader, self.step, None))


class Accelerate(Loader, name="accelerate", package="accelerate", needs="accelerate torch.utils.data"):
    """accelerate, skip_first_batches

    accelerate docs, usage_guides/checkpoint: save_state, load_state, skip_first_batches; with the same configuration.
    """

    stateful = False

    def open(self):
        accelerate = import_module("accelerate")
        import_module("accelerate.utils").set_seed(SEED)
        how = accelerate.DataLoaderConfiguration(use_seedable_sampler=True, use_stateful_dataloader=self.stateful)
        self.accelerator = accelerate.Accelerator(cpu=True, dataloader_config=how)
        loader = import_module("torch.utils.data").DataLoader(**self.given(), num_workers=self.workers)
        self.loader = self.accelerator.prepare(loader)

    def given(self):
        return {"dataset": Numbers(), "batch_size": self.batch, "shuffle": True}

    def batches(self, epoch):
        self.loader.set_epoch(epoch)
        skip = self.step and not self.stateful
        return map(numbers, self.accelerator.skip_first_batches(self.loader, self.step) if skip else self.loader)

    def save(self, folder):
        self.accelerator.save_state(str(folder / "all"))

    def load(self, folder, _epoch):
        self.accelerator.load_state(str(folder / "all"))


class AccelerateStateful(Accelerate, name="accelerate-stateful", package="accelerate", needs="accelerate torchdata"):
    """accelerate, use_stateful_dataloader

    accelerate docs, usage_guides/checkpoint: load_state then restores the loader.
    """

    stateful = True


class Torchdata(Loader, name="torchdata", package="torchdata", needs="torchdata.stateful_dataloader"):
    """torchdata StatefulDataLoader

    torchdata docs, stateful_dataloader: state_dict and load_state_dict, across worker processes but not across ranks;
    with the package's StatefulDistributedSampler.
    """

    def open(self):
        sampler = import_module("torchdata.stateful_dataloader.sampler").StatefulDistributedSampler
        self.order = sampler(Numbers(), self.world, self.rank, seed=SEED)
        self.stateful(Numbers(), sampler=self.order)

    def stateful(self, rows, **how):
        loader = import_module("torchdata.stateful_dataloader").StatefulDataLoader
        self.loader = loader(rows, self.batch, num_workers=self.workers, **how)

    def batches(self, epoch):
        self.order.set_epoch(epoch)
        return map(numbers, self.loader)


class Datasets(Torchdata, name="datasets", package="datasets", needs="datasets torchdata.stateful_dataloader"):
    """HF datasets streaming, shuffle buffer

    datasets docs, stream and use_with_pytorch: StatefulDataLoader, split_dataset_by_node, set_epoch.
    """

    shuffled = True

    @staticmethod
    def make(root):
        for shard in range(SHARDS):
            rows = [json.dumps({"number": number}) for number in range(shard * EACH, (shard + 1) * EACH)]
            (root / f"{shard:02d}.jsonl").write_text("\n".join(rows))

    def open(self):
        files = sorted(map(str, self.root.glob("*.jsonl")))
        rows = import_module("datasets").load_dataset("json", data_files=files, streaming=True, split="train")
        rows = rows.shuffle(SEED, buffer_size=BUFFER) if self.shuffled else rows
        self.order = import_module("datasets.distributed").split_dataset_by_node(rows, self.rank, self.world)
        self.stateful(self.order)


class DatasetsInOrder(Datasets, name="datasets-in-order", package="datasets", needs="datasets torchdata"):
    """HF datasets streaming, not shuffled

    datasets docs, stream: exact unless .shuffle() is used.
    """

    shuffled = False


def write_tars(root):
    """Write shards of samples with one text file each."""
    writer = import_module("webdataset").ShardWriter(str(root / "%02d.tar"), maxcount=EACH, verbose=0)
    with writer:
        for number in range(SAMPLES):
            writer.write({"__key__": f"{number:04d}", "txt": str(number)})


class Webdataset(Loader, name="webdataset", package="webdataset", needs="webdataset torch.utils.data"):
    """webdataset, resampled

    webdataset issues 177, 234 and 271: resampled=True, so that there is nothing to resume.
    """

    make = staticmethod(write_tars)

    def batches(self, _epoch):
        wds = import_module("webdataset")
        urls = sorted(map(str, self.root.glob("*.tar")))
        made = wds.WebDataset(urls, resampled=True, nodesplitter=wds.split_by_node).shuffle(BUFFER)
        made = made.map(lambda sample: int(sample["txt"])).batched(self.batch, collation_fn=list)
        return itertools.islice(wds.WebLoader(made, batch_size=None, num_workers=self.workers), STEPS - self.step)


class Energon(Loader, name="energon", package="megatron-energon", needs="megatron.energon", offers="world"):
    """Megatron Energon

    Energon docs, save_restore: save_state_rank and restore_state_rank; repro_scaling: world times workers stays the
    same, here 4; `energon checkpoint redist` divides the states.
    """

    @staticmethod
    def energon(*words):
        subprocess.run([str(Path(sys.executable).with_name("energon")), *words], check=True)

    @staticmethod
    def make(root):
        write_tars(root)
        words = "--non-interactive --split-ratio 1,0,0 --num-workers 1 --sample-type TextSample --field-map"
        Energon.energon("prepare", *words.split(), '{"text": "txt"}', str(root))

    def open(self):
        energon, workers = import_module("megatron.energon"), {1: 4, 4: 1}.get(self.world, self.workers)
        own = energon.WorkerConfig(rank=self.rank, world_size=self.world, num_workers=workers)
        how = {"shuffle_buffer_size": BUFFER, "max_samples_per_sequence": 100, "worker_config": own}
        made = energon.get_train_dataset(self.root, batch_size=4, **how)
        self.loader, self.stream = energon.get_savable_loader(made), None

    def batches(self, _epoch):
        self.stream = self.stream or iter(self.loader)
        for _ in range(self.step, STEPS):
            micro = itertools.islice(self.stream, self.batch // 4)
            yield [int(text) for one in micro for text in one.text]

    def save(self, folder):
        import_module("torch").save(self.loader.save_state_rank(), folder / f"rank{self.rank}.pt")

    def load(self, folder, _epoch):
        if self.world != 2:
            saved, folder = sorted(map(str, folder.glob("rank*.pt"))), folder / f"for{self.world}-{self.rank}"
            folder.mkdir()
            self.energon("checkpoint", "redist", "--new-world-size", str(self.world), *saved, str(folder))
        state = import_module("torch").load(folder / f"rank{self.rank}.pt", weights_only=False)
        self.loader.restore_state_rank(state)


class Streaming(Loader, name="streaming", package="mosaicml-streaming", needs="streaming", offers="world workers"):
    """MosaicML streaming

    streaming docs, fast_resumption and elastic_determinism: StreamingDataLoader, a constant global batch.
    """

    @staticmethod
    def make(root):
        how = {"columns": {"number": "int", "padding": "bytes"}, "size_limit": 1 << 16}
        with import_module("streaming").MDSWriter(out=str(root), **how) as writer:
            for number in range(SAMPLES):
                writer.write({"number": number, "padding": bytes(1000)})

    def open(self):
        streaming, how = import_module("streaming"), {"shuffle": True, "shuffle_seed": SEED}
        made = streaming.StreamingDataset(local=str(self.root), batch_size=self.batch, **how)
        self.loader = streaming.StreamingDataLoader(made, batch_size=self.batch, num_workers=self.workers)


class Litdata(Loader, name="litdata", package="litdata", needs="litdata", offers="world workers"):
    """litdata

    litdata README, pause and resume: StreamingDataLoader, a constant global batch. drop_last is as by default with
    several ranks, because one rank would refuse their state otherwise.
    """

    @staticmethod
    def make(root):
        import_module("litdata").optimize(int, list(range(SAMPLES)), str(root), chunk_size=EACH, num_workers=1)

    def open(self):
        litdata = import_module("litdata")
        made = litdata.StreamingDataset(str(self.root), shuffle=True, seed=SEED, drop_last=True)
        self.loader = litdata.StreamingDataLoader(made, batch_size=self.batch, num_workers=self.workers)


class Lerobot(Accelerate, name="lerobot", package="lerobot", needs="lerobot.datasets", offers="world workers"):
    """LeRobot, EpisodeAwareSampler

    lerobot_train.py: compute_sampler_state with the numbers of the run that saved, accelerate; other worlds warn.
    """

    def given(self):
        sampler, starts = import_module("lerobot.datasets").EpisodeAwareSampler, range(0, SAMPLES, EACH)
        self.sampler = sampler(list(starts), [one + EACH for one in starts], shuffle=True, seed=SEED)
        return {"dataset": Numbers(), "batch_size": self.batch, "sampler": self.sampler}

    batches = Loader.batches

    def save(self, folder):
        (folder / "facts.json").write_text(json.dumps({"batch_size": self.batch, "num_processes": self.world}))

    def load(self, folder, epoch):
        facts, step = json.loads((folder / "facts.json").read_text()), epoch * STEPS + self.step
        self.sampler.load_state_dict(import_module("lerobot.datasets").compute_sampler_state(step, SAMPLES, **facts))


class LerobotStreaming(Accelerate, name="lerobot-streaming", package="lerobot", needs="lerobot.datasets"):
    """LeRobot, StreamingLeRobotDataset

    lerobot_train.py with dataset.streaming: there is no state, the stream begins again.
    """

    @staticmethod
    def make(root):
        features = {"observation.state": {"dtype": "float32", "shape": (1,), "names": None}}
        new = import_module("lerobot.datasets.lerobot_dataset").LeRobotDataset.create
        made = new("bench/resume", 10, features, root=root / "robot", data_files_size_in_mb=1e-6)
        for number in range(SAMPLES):
            made.add_frame({"observation.state": import_module("numpy").float32([number]), "task": "count"})
            if number % EACH == EACH - 1:
                made.save_episode()
        made.finalize()

    def given(self):
        kind = import_module("lerobot.datasets.streaming_dataset").StreamingLeRobotDataset
        made = kind("bench/resume", root=self.root / "robot", buffer_size=BUFFER, seed=SEED)
        tensor, self.stream = import_module("torch").tensor, None
        # Only the numbers: accelerate, which shares out the batches, cannot divide texts.
        collate = lambda rows: tensor([float(row["observation.state"]) for row in rows])  # noqa: E731
        return {"dataset": made, "batch_size": self.batch, "collate_fn": collate}

    def batches(self, _epoch):
        self.stream = self.stream or itertools.chain.from_iterable(itertools.repeat(self.loader))
        return map(numbers, itertools.islice(self.stream, STEPS - self.step))

    def save(self, _folder):
        """Save nothing."""

    def load(self, _folder, _epoch):
        """Load nothing."""


class Fastvid(Loader, name="fastvid", package="fastvid", needs="fastvid torch", offers="world workers"):
    """fastvid ClipLoader

    fastvid docs, load: state_dict, load_state_dict.
    """

    @staticmethod
    def make(root):
        av, np = import_module("av"), import_module("numpy")
        (root / "videos").mkdir()
        for shard in range(SHARDS):
            with av.open(str(root / "videos" / f"{shard:02d}.mp4"), "w") as file:
                stream = file.add_stream("libx264", rate=10, options={"g": "1"}, width=176, height=32)
                stream.pix_fmt = "yuv420p"
                for number in range(shard * EACH, (shard + 1) * EACH):
                    bits = np.repeat(number >> np.arange(11) & 1, 16).astype(np.uint8)
                    picture = np.broadcast_to(255 * bits[None, :, None], (32, 176, 3)).copy()
                    file.mux(stream.encode(av.VideoFrame.from_ndarray(picture, "rgb24")))
                file.mux(stream.encode())
        words = ["-m", "fastvid", "index", str(root / "videos"), "--out", str(root / "dataset")]
        subprocess.run([sys.executable, *words], check=True)

    def open(self):
        fastvid, torch = import_module("fastvid"), import_module("torch")
        self.loader = fastvid.ClipLoader(
            fastvid.EveryFrame(fastvid.open(str(self.root / "dataset"))),
            frames=fastvid.Deltas([0.0]),
            spatial=fastvid.Native(),
            global_batch_size=BATCH,
            seed=SEED,
            output=fastvid.Output(dtype=torch.uint8, layout="BTCHW"),
            workers=fastvid.Workers(num_threads=max(1, self.workers)),
            rank=self.rank,
            world_size=self.world,
        )

    def batches(self, epoch):
        self.loader.set_epoch(epoch)
        for batch in self.loader:
            bits = batch.video[:, 0, 0, 16, 8::16] > 127
            yield [sum(1 << place for place, bit in enumerate(one) if bit) for one in bits.tolist()]


def deliver(kind, settings):
    """Deliver epochs of one rank, and log each batch as [epoch, step, numbers].

    `save` and `hold` are places, [epoch, step]: to save a state, and to wait until killed. `start` is the place of the
    state to load.
    """
    os.environ.update(settings["variables"])
    folder, place = Path(settings["state"]), list(settings.get("start", [0, 0]))
    with open(settings["log"], "a") as file:
        try:
            loader = kind(*(settings[name] for name in ("root", "rank", "world", "workers")))
            loader.step = place[1]
            if "start" in settings:
                loader.load(folder, place[0])
            while place[0] < settings["epochs"]:
                for batch in loader.batches(place[0]):
                    print(json.dumps([*place, batch]), file=file, flush=True)
                    place[1] += 1
                    if place == settings.get("save"):
                        loader.save(folder)
                    while place == settings.get("hold"):
                        time.sleep(1)
                place, loader.step = [place[0] + 1, 0], 0
            last = {"done": True}
        except Exception as error:  # noqa: BLE001
            text = (str(error).strip() or traceback.extract_tb(error.__traceback__)[-1].line).splitlines()[-1]
            last = {"error": text if "Error: " in text else f"{type(error).__name__}: {text}"}
            traceback.print_exc()
        print(json.dumps(last), file=file, flush=True)


def serve(kind, root):
    """Import what the loader needs, then fork a rank for each line of settings."""
    found = [import_module(name) for name in kind.needs]
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # what libraries print is no answer
    known = getattr(found[0], "__version__", None) if kind.package == "fastvid" else version(kind.package)
    print(known, file=answers, flush=True)
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # ranks that ended leave nothing
    for line in sys.stdin:
        if (process := os.fork()) == 0:
            os.setsid()
            signal.signal(signal.SIGCHLD, signal.SIG_DFL)
            deliver(kind, {"root": root, **json.loads(line)})
            os._exit(0)
        print(process, file=answers, flush=True)


def main(command, name, root):
    """Make the samples of a loader, or serve its ranks."""
    if command == "make":
        LOADERS[name].make(Path(root))
    else:
        serve(LOADERS[name], root)


if __name__ == "__main__":
    main(*sys.argv[1:])
