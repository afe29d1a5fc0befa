"""Loaders for CUDA, on the fake one: devices, streams, memory, and the order of what is done to it."""

import pytest
import torch

from fastvid.decode import pixels
from fastvid.errors import UsageError
from fastvid.load.batch.assemble import Assembler
from fastvid.load.batch.batch import Batch
from fastvid.load.batch.canvas import RgbSink
from fastvid.load.batch.spec import VideoSpec
from fastvid.load.device import LoaderStream
from fastvid.load.memory import SharedBufferPool
from fastvid.load.order.epoch import MASKED
from fastvid.load.workers import lanes
from tests import fake_cuda
from tests.load.fakes import FakeDataset, fake
from tests.load.gpu_fakes import GpuDecoder, gpu
from tests.load.tools import channels_are_neighbours, make, plan_of, rows, until

WAYS = {
    "planes": ("PlanesDecoder", "PlanesDecoder"),
    "rgb": ("RgbDecoder", "RgbDecoder"),
    "device rgb": ("GpuDecoder", "RgbDecoder"),
    "device planes": ("GpuPlanesDecoder", "PlanesDecoder"),
    "hybrid rgb": ("RgbDecoder+GpuDecoder", "RgbDecoder"),
    "hybrid planes": ("PlanesDecoder+GpuPlanesDecoder", "PlanesDecoder"),
}
"""Decoders of a loader on a GPU, and one on the CPU that makes the same pictures."""


@pytest.fixture
def cuda(monkeypatch):
    cuda = fake_cuda.install(monkeypatch)
    monkeypatch.setattr(pixels, "_fused", lambda *_: None)  # a kernel needs a real device
    GpuDecoder.opened.clear()
    names = ("PlanesDecoder", "RgbDecoder")
    table = {one.name: one for one in (*map(fake, names), gpu(), gpu("GpuPlanesDecoder"))}
    monkeypatch.setattr(lanes, "backend", table.__getitem__)
    return cuda


def train(loader, *, steps=10**6):
    """Use batches as a training step does: on a stream of its own, without waiting for the device."""
    stream = torch.cuda.Stream(loader.device)
    with torch.cuda.stream(stream):
        for number, batch in enumerate(loader):
            _ = batch.video.float().sum(), batch.label.sum() + batch.valid.sum(), batch.weight.sum()
            if "flow" in batch:
                _ = batch.flow.sum()
            del batch
            if number + 1 == steps:
                break
    return stream


def to_host(batch):
    return Batch(batch, **{name: getattr(batch, name).cpu() for name in ("video", "label", "valid", "weight")})


@pytest.mark.parametrize("decoder", ["GpuDecoder", "GpuPlanesDecoder"])
def test_every_thread_of_every_rank_works_on_the_device_of_the_loader(cuda, decoder):
    cuda.set_device(3)
    ranks = [make(FakeDataset(40), decoder=gpu(decoder), device="cuda", rank=rank, world_size=2) for rank in range(2)]
    cuda.set_device(0)
    assert [loader.device for loader in ranks] == [torch.device("cuda", 3)] * 2
    cuda.log.clear()
    for batches in zip(*ranks, strict=True):
        assert all(batch.video.device == batch.label.device == torch.device("cuda", 3) for batch in batches)
    assert [device for device, _ in GpuDecoder.opened] == [3] * 4
    assert {entry.device for entry in cuda.log} == {3}
    # The planner and the finisher have chosen it too, not only the threads with a decoder.
    chosen = {entry.thread for entry in cuda.entries("device")}
    assert chosen == {"fastvid-plan", "fastvid-finish", "fastvid-decode-0", "fastvid-decode-1"}


def test_device_of_a_loader_is_that_of_the_thread_that_made_it(cuda):
    cuda.set_device(2)
    assert make(FakeDataset(64), device="cuda").device == torch.device("cuda", 2)
    assert make(FakeDataset(64), device="cuda:1").device == torch.device("cuda", 1)
    with pytest.raises(UsageError, match="'cuda:7' does not exist: torch finds 4"):
        make(FakeDataset(64), device="cuda:7")


def test_device_that_torch_does_not_find_is_refused_at_once(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    for name in ("cuda", "cuda:0", "xpu"):
        with pytest.raises(UsageError, match=f"device '{name}' does not exist: torch finds no CUDA devices"):
            make(FakeDataset(64), device=name)


@pytest.mark.parametrize(("dtype", "layout"), [(torch.uint8, "BTCHW"), (torch.bfloat16, "BCTHW")])
@pytest.mark.parametrize("way", WAYS)
def test_batches_on_a_gpu_are_those_of_the_cpu(cuda, way, dtype, layout):
    there, here = WAYS[way]
    options = {"dtype": dtype, "layout": layout, "last": "mask"}
    on_host = make(FakeDataset(21), decoder=here, **options)
    on_device = make(FakeDataset(21), decoder=there, device="cuda:1", **options)
    # RGB that numpy normalises on the host is rounded twice, on a device once.
    exact = dtype == torch.uint8 or here == "PlanesDecoder"
    off = {"rtol": 0, "atol": 0} if exact else {"rtol": torch.finfo(dtype).eps, "atol": 1e-6}
    turned = make(FakeDataset(21), decoder=there, device="cuda:1", channels_last=True, **options)
    for ours, other, theirs in zip(map(to_host, on_device), map(to_host, turned), on_host, strict=True):
        torch.testing.assert_close(ours.video, theirs.video, **off)
        assert torch.equal(other.video, ours.video)
        assert channels_are_neighbours(other.video, layout)
        assert rows(Batch(ours, video=ours.valid)) == rows(Batch(theirs, video=theirs.valid))
        for name in ("label", "weight", "valid"):
            assert torch.equal(getattr(ours, name), getattr(theirs, name))
    assert not cuda.races


@pytest.mark.parametrize("way", WAYS)
def test_no_access_is_unordered_and_only_decoders_wait_for_the_device(cuda, way):
    loader = make(FakeDataset(72), decoder=WAYS[way][0], device="cuda:1", dtype=torch.float32, last="mask")
    for _ in range(2):
        train(loader)
        loader.load_state_dict(loader.state_dict())  # releases what may have been prefetched of the next epoch
    assert not cuda.races
    assert [who for who, _ in cuda.syncs if not who.startswith("fastvid-decode")] == []
    assert all(what.startswith("event") for _, what in cuda.syncs)
    # Labels, weights and masks in one block, and whatever was decoded on the host in another, all of it pinned.
    copies = cuda.entries("copy")
    assert {entry.what.split()[0] for entry in copies} == {"pinned"}
    assert {entry.thread for entry in copies} == {"fastvid-finish"}
    assert len(copies) == 2 * 9 * (1 + (way not in ("device rgb", "device planes")))
    for _ in range(3):  # and where an epoch follows another
        train(loader)
    assert not cuda.races


def test_each_stream_does_its_own_part(cuda):
    loader = make(FakeDataset(40), decoder="GpuDecoder", device="cuda:1", dtype=torch.float32)
    consumer = train(loader).name
    (ours,) = {entry.stream for entry in cuda.entries("allocate", "fastvid-plan")}
    decoders = {entry.stream for entry in cuda.entries("write", "fastvid-decode")}
    assert len({consumer, ours, "default", *decoders}) == 5
    # The planner allocates and marks, the finisher reads and writes on the loader's stream, decoders on theirs.
    for thread in ("fastvid-plan", "fastvid-finish"):
        assert {entry.stream for entry in cuda.log if entry.thread == thread and entry.kind != "device"} == {ours}
    assert {entry.stream for entry in cuda.entries("wait", "fastvid-decode")} == decoders
    # The consumer waits once for each batch, and is entered as a user of its memory: of the video and the labels.
    assert [entry.stream for entry in cuda.entries("wait", "MainThread")] == [consumer] * 5
    assert [entry.stream for entry in cuda.entries("keep")] == [consumer] * 10


def only_wait(self, tensors, done):
    torch.cuda.current_stream(self.device).wait_event(done)


def only_record(self, tensors, done):
    for tensor in tensors:
        tensor.record_stream(torch.cuda.current_stream(self.device))


SPOILED = {
    "no wait": ("GpuDecoder", only_record, "on <stream s.* has no order with a write"),
    "no record": ("GpuDecoder", only_wait, "has no order with a read"),
    "writes too early": ("Careless", None, "has no order with a read"),
    "returns too early": ("Hasty", None, "has no order with a write"),
}


@pytest.mark.parametrize("fault", SPOILED)
def test_missing_order_is_noticed(cuda, monkeypatch, fault):
    """Positive control: the loader or a decoder leaves out one step."""
    decoder, hand_over, message = SPOILED[fault]
    if hand_over is not None:
        monkeypatch.setattr(LoaderStream, "hand_over", hand_over)
    train(make(FakeDataset(72), decoder=gpu(decoder), device="cuda:1", dtype=torch.float32))
    assert cuda.races
    for race in cuda.races:
        with pytest.raises(AssertionError, match=message):
            raise AssertionError(race)


def test_memory_of_a_used_batch_is_reused_by_the_stream_that_allocated_it(cuda):
    # Values as decoded: the decoder writes what the consumer gets.
    loader = make(FakeDataset(320), decoder="GpuDecoder", device="cuda:1", prefetch=2)
    consumer = train(loader).name
    videos = [entry for entry in cuda.log if entry.thread == "fastvid-plan" and entry.kind in ("allocate", "reuse")]
    assert len(videos) == 40
    assert len({entry.stream for entry in videos} - {consumer}) == 1
    # Two are prefetched, one is used, and one is allocated in place of the one that was just taken.
    assert len({entry.what for entry in videos}) <= 4
    freed, kept = set(), set()
    for entry in cuda.log:
        freed |= {entry.what} if entry.kind == "free" else set()
        kept |= {entry.what} if entry.kind == "keep" else set()
        if entry in videos and entry.kind == "reuse":
            assert entry.what in freed
            assert entry.what in kept
            freed.remove(entry.what)


def test_batch_that_the_user_keeps_is_not_overwritten(cuda):
    loader = make(FakeDataset(72), decoder="GpuDecoder", device="cuda:1")
    kept = list(loader)
    fresh = list(make(FakeDataset(72), decoder="GpuDecoder", device="cuda:1"))
    assert [rows(to_host(batch)) for batch in kept] == [rows(to_host(batch)) for batch in fresh]
    assert not cuda.races


def test_iteration_that_ends_early_leaves_nothing_unordered(cuda):
    loader = make(FakeDataset(200), decoder="GpuDecoder", device="cuda:1", dtype=torch.float32, prefetch=3)
    for steps in (1, 2, 3, 1):
        train(loader, steps=steps)
    assert not cuda.races
    assert loader.position == 7 * 8


def test_one_batch_is_finished_ahead_of_the_consumer(cuda, monkeypatch):
    made = []
    plain = Assembler.make

    def make_one(self, canvas):
        made.append(canvas.plan.share.start)
        return plain(self, canvas)

    monkeypatch.setattr(Assembler, "make", make_one)
    loader = make(FakeDataset(64), decoder="PlanesDecoder", device="cuda:1", prefetch=3)
    batches = iter(loader)
    next(batches)
    until(lambda: loader._run.ready == 3 and len(made) == 2)
    assert made == [0, 8]
    next(batches)
    until(lambda: loader._run.ready == 3 and len(made) == 3)
    assert made == [0, 8, 16]
    assert len(list(batches)) == 6
    # On a CPU the consumer finishes each batch when it asks for it.
    made.clear()
    for number, _ in enumerate(make(FakeDataset(64), decoder="PlanesDecoder", prefetch=3)):
        assert made == list(range(0, 8 * number + 8, 8))


def test_error_of_finishing_reaches_the_consumer(cuda, monkeypatch):
    def broken(self, *_):
        raise UsageError("no such matrix")

    monkeypatch.setattr(Assembler, "make", broken)
    with pytest.raises(UsageError, match="no such matrix"):
        train(make(FakeDataset(64), decoder="PlanesDecoder", device="cuda:1"))


def test_damaged_clips_are_zero_on_the_gpu(cuda):
    options = {"device": "cuda:1", "dtype": torch.float32, "on_error": "skip", "max_skip_rate": 1.0, "last": "keep"}
    loader = make(FakeDataset(30), decoder=gpu("Damaged"), **options)
    for batch in loader:
        copied = to_host(batch)
        assert copied.valid.tolist() == [sample % 3 != 0 for sample in batch.sample.tolist()]
        for ok, video, weight in zip(copied.valid, copied.video, copied.weight, strict=True):
            assert ok == video.any() == bool(weight)
    assert loader.stats.total.skips.total() == 10
    assert not cuda.races


def test_rows_of_worker_processes_are_copied_from_pinned_memory(cuda):
    spec = VideoSpec((2, 4, 6), "BCTHW", None, LoaderStream(torch.device("cuda", 1)))
    pool = SharedBufferPool(1)
    sink = RgbSink(spec, plan_of(FakeDataset(1), samples=[MASKED] * 3), 0, batches=pool)
    row = sink.output(1)
    assert (pool.offset(row.memory) % 4096, row.layout.nbytes) == (row.layout.nbytes, 3 * 2 * 4 * 6)
    row.memory[:] = 9
    del row
    with spec.stream.use():
        assert not sink.finish([False] * 3).cpu().any()
    assert [entry.what.split()[0] for entry in cuda.entries("copy")] == ["pinned"]
