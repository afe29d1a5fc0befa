"""What the trainer does differently on a GPU, shown without one: kernels, memory format, devices, events."""

import os
from collections import Counter
from dataclasses import replace
from types import SimpleNamespace
from typing import Any
from unittest.mock import MagicMock

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from fastvid.errors import UsageError
from fastvid.load.batch.batch import Batch
from fastvid.load.batch.labels import IGNORED_LABEL
from fastvid.load.clips.crops import CenterCrop, RandomCrop
from fastvid.load.workers import lanes
from fastvid.models.ghost import update_running_stats, use_ghost_norm
from fastvid.runtime.processes import World
from fastvid.train import ranks as elastic
from fastvid.train.config.config import OptimConfig
from fastvid.train.loop.loop import Stepper
from fastvid.train.loop.strategy import build_strategy
from fastvid.train.parts.optim import Lamb, Lars, Schedule, load_optimizer, make_optimizer
from fastvid.train.parts.replica import Replica
from fastvid.train.ranks import SHARED_DEVICE, Member, device_of, join
from fastvid.train.run import assemble
from fastvid.train.tasks.classification import Mixer
from tests import fake_cuda
from tests.load.fakes import FakeDataset, fake
from tests.train import toy

CPU = torch.device("cpu")
CUDA = torch.device("cuda", 0)


class Calls(TorchDispatchMode):
    """Counts the operations that are dispatched, by name."""

    def __init__(self):
        super().__init__()
        self.names = Counter()
        self.casts = Counter()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.names[func.overloadpacket.__name__] += 1
        if func.overloadpacket.__name__ == "_to_copy" and args[0].requires_grad:
            self.casts[(kwargs or {}).get("dtype")] += 1
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("layout", [torch.contiguous_format, torch.channels_last])
def test_ghost_norm_is_one_batch_norm_for_any_number_of_groups(layout):
    torch.manual_seed(0)
    plain, ghost = nn.Sequential(nn.BatchNorm2d(6)), nn.Sequential(nn.BatchNorm2d(6))
    use_ghost_norm(ghost, 2)
    for model in (plain, ghost):
        nn.init.uniform_(model[0].weight)
        nn.init.uniform_(model[0].bias)
    ghost.load_state_dict(plain.state_dict())
    clips = (torch.randn(8, 6, 5, 3, dtype=torch.float64) * 3 + 1).to(memory_format=layout)
    plain, ghost = plain.double(), ghost.double()
    ours, theirs = (clips.clone(memory_format=torch.preserve_format).requires_grad_() for _ in range(2))
    with Calls() as calls:
        out = ghost(ours)
    norms = sum(count for name, count in calls.names.items() if "batch_norm" in name)
    assert norms == 1, calls.names
    expected = torch.cat([plain(group) for group in theirs.split(2)])
    assert torch.allclose(out, expected, atol=1e-12)
    # The next convolution needs no transposition.
    assert out.is_contiguous(memory_format=layout)
    slope = torch.randn_like(expected)
    out.backward(slope)
    expected.backward(slope)
    assert torch.allclose(ours.grad, theirs.grad, atol=1e-12)
    assert torch.allclose(ghost[0].weight.grad, plain[0].weight.grad, atol=1e-12)
    update_running_stats(ghost)
    groups = torch.stack([group.mean(dim=(0, 2, 3)) for group in clips.split(2)])
    assert torch.allclose(ghost[0].running_mean, 0.1 * groups.mean(0), atol=1e-12)


def lars(groups, state, lr, momentum, trust):
    """One step of LARS, one parameter at a time."""
    for group in groups:
        for weight in group["params"]:
            update = weight.grad.add(weight, alpha=group["weight_decay"])
            if group["adapt"]:
                size, length = weight.norm(), weight.grad.norm()
                update = update.mul(trust * size / (length + group["weight_decay"] * size))
            velocity = state.setdefault(weight, torch.zeros_like(weight)).mul_(momentum).add_(update, alpha=lr)
            weight.sub_(velocity)


def lamb(groups, state, number, lr, eps):
    """One step of LAMB, one parameter at a time."""
    for group in groups:
        for weight in group["params"]:
            mean, square = state.setdefault(weight, (torch.zeros_like(weight), torch.zeros_like(weight)))
            mean.lerp_(weight.grad, 0.1)
            square.mul_(0.999).addcmul_(weight.grad, weight.grad, value=1 - 0.999)
            root = (square / (1 - 0.999**number)).sqrt_().add_(eps)
            update = (mean / (1 - 0.9**number)).div_(root).add_(weight, alpha=group["weight_decay"])
            if group["adapt"]:
                update.mul_(weight.norm() / update.norm())
            weight.sub_(update, alpha=lr)


def weights(count):
    generator = torch.Generator().manual_seed(1)
    made = [nn.Parameter(torch.randn(3 + number % 4, 5, generator=generator)) for number in range(count)]
    half = count // 2
    return [
        {"params": made[:half], "adapt": True, "weight_decay": 0.1},
        {"params": made[half:], "adapt": False, "weight_decay": 0.0},
    ]


def graded(groups, number):
    generator = torch.Generator().manual_seed(number)
    for group in groups:
        for weight in group["params"]:
            weight.grad = torch.randn(weight.shape, generator=generator)


@pytest.mark.parametrize("name", ["lars", "lamb"])
@torch.no_grad()
def test_large_batch_optimizers_update_all_parameters_at_once_as_one_by_one(name):
    ours, theirs, state = weights(6), weights(6), dict[Tensor, Any]()
    optimizer = Lars(ours, lr=0.1, trust=0.01) if name == "lars" else Lamb(ours, lr=0.1, eps=1e-6)
    for number in range(1, 6):
        graded(ours, number)
        graded(theirs, number)
        optimizer.step()
        if name == "lars":
            lars(theirs, state, 0.1, 0.9, 0.01)
        else:
            lamb(theirs, state, number, 0.1, 1e-6)
    for one, two in zip(ours, theirs, strict=True):
        for weight, expected in zip(one["params"], two["params"], strict=True):
            assert torch.allclose(weight, expected, rtol=1e-6, atol=1e-7)


class OnGpu(nn.Linear):
    """A layer that says that its parameters are on a GPU."""

    def parameters(self, recurse=True):
        return iter([SimpleNamespace(is_cuda=True)])


@pytest.mark.parametrize("name", ["sgd", "adam", "adamw"])
def test_optimizers_are_fused_on_a_gpu_only_and_stay_so_after_a_restore(name):
    config = OptimConfig(base_lr=0.1, base_batch_size=8, name=name)
    on_cpu, on_gpu = make_optimizer(nn.Linear(3, 2), config), make_optimizer(OnGpu(3, 2), config)
    assert [group["fused"] for group in on_cpu.param_groups] == [None, None]
    assert [group["fused"] for group in on_gpu.param_groups] == [True, True]
    saved = [optimizer.state_dict() for optimizer in (on_cpu, on_gpu)]
    load_optimizer(on_gpu, saved[0])
    load_optimizer(on_cpu, saved[1])
    assert [group["fused"] for group in on_cpu.param_groups] == [None, None]
    assert [group["fused"] for group in on_gpu.param_groups] == [True, True]
    assert on_gpu.param_groups[0]["lr"] == 0.1


def configured(tmp_path, **run):
    base = toy.toy_config(tmp_path, **run)
    model = replace(base.model, name="tsn-r18", options={"width": 8})
    return replace(base, model=model, data=replace(base.data, spatial=base.data.spatial))


def test_channels_last_is_the_default_on_a_gpu_in_half_precision(tmp_path):
    half, full = configured(tmp_path, amp="bf16"), configured(tmp_path)
    assert assemble.channels_last(half, CUDA)
    assert not assemble.channels_last(half, CPU)
    assert not assemble.channels_last(full, CUDA)
    for chosen in (False, True):
        config = replace(half, model=replace(half.model, channels_last=chosen))
        assert assemble.channels_last(config, CUDA) is chosen
        assert assemble.channels_last(config, CPU) is chosen


def test_a_model_on_a_gpu_is_channels_last_and_tries_cudnns_algorithms(tmp_path, monkeypatch):
    monkeypatch.setattr(nn.Module, "to", lambda self, *_: self)
    monkeypatch.setattr(torch.backends.cudnn, "benchmark", False)
    config = configured(tmp_path, amp="bf16")
    assemble.build_model(config, toy.ALONE)
    assert not torch.backends.cudnn.benchmark
    model = assemble.build_model(config, Member(World(), CUDA))
    assert torch.backends.cudnn.benchmark
    kernels = [weight for weight in model.parameters() if weight.ndim == 4 and weight.shape[-1] > 1]
    assert kernels
    assert all(weight.is_contiguous(memory_format=torch.channels_last) for weight in kernels)


@pytest.mark.parametrize("chosen", [True, False])
def test_batches_reach_a_channels_last_model_without_a_copy(tmp_path, monkeypatch, chosen):
    monkeypatch.setattr(lanes, "backend", fake)
    base = configured(tmp_path)
    crop = {"spatial": (RandomCrop(16),), "eval_spatial": (CenterCrop(16),), "decoder": "PlanesDecoder"}
    config = replace(
        base, model=replace(base.model, channels_last=chosen), data=replace(base.data, num_threads=1, **crop)
    )
    model, seen = assemble.build_model(config, toy.ALONE), []
    first = next(module for module in model.modules() if isinstance(module, nn.Conv2d))
    first.register_forward_pre_hook(lambda _, inputs: seen.append(inputs[0]))
    batch = next(iter(assemble.make_loader(config, FakeDataset(64), toy.ALONE, train=True)))
    for video in (batch.video, Mixer(0.4, 0.0, 2, seed=1)(batch).video):
        model(video)
        assert (seen[-1].data_ptr() == video.data_ptr()) is chosen
        assert seen[-1].is_contiguous(memory_format=torch.channels_last) is chosen


def toy_batch():
    return next(iter(toy.ToyLoader(World(), group=2, bad=(3, 5))))


def replica_of(model, optim):
    schedule = Schedule(optim, epochs=5, samples_per_epoch=80, global_batch_size=8)
    return Replica(model, make_optimizer(model, optim), schedule)


def moved(batch):
    return Batch(batch, **{name: getattr(batch, name).to("cuda:0") for name in ("video", "label", "weight", "valid")})


@pytest.mark.parametrize(("mixup", "cutmix"), [(0.4, 0.0), (0.0, 1.0)])
def test_mixing_does_not_wait_for_the_device(monkeypatch, mixup, cutmix):
    batch = toy_batch()
    expected = Mixer(mixup, cutmix, 2, seed=1)(batch)
    cuda = fake_cuda.install(monkeypatch)
    there = moved(batch)
    cuda.syncs.clear()
    mixed = Mixer(mixup, cutmix, 2, seed=1)(there)
    assert not cuda.syncs
    for name in ("video", "partner_label", "own_share"):
        assert torch.equal(getattr(mixed, name).cpu(), getattr(expected, name))
    # Positive control: reading a tensor of the device is noticed.
    there.valid.tolist()
    assert cuda.syncs


def test_labels_of_another_column_do_not_wait_for_the_device(monkeypatch):
    cuda = fake_cuda.install(monkeypatch)
    batch = moved(toy_batch())
    batch = Batch(batch, fields={"picture": tuple(range(batch.num_rows))})
    clips = MagicMock(
        epoch=0, **{"state_dict.return_value": {"epoch": 0}, "__iter__.side_effect": lambda: iter([batch])}
    )
    cuda.syncs.clear()
    (found,) = assemble.Loader(clips, "picture")
    assert not cuda.syncs
    wanted = torch.arange(batch.num_rows).where(batch.valid.cpu(), IGNORED_LABEL)
    assert torch.equal(found.label.cpu(), wanted)


def test_a_step_does_not_read_its_loss_scale(tmp_path, monkeypatch):
    base = configured(tmp_path)
    optim = replace(base.optim, groups="plain")
    data = replace(base.data, group_size=2)
    config = replace(base, optim=optim, data=data, model=replace(base.model, name="toy", ghost_norm=True))
    found = []
    for scale in (2.0, torch.tensor(2.0, dtype=torch.float64)):
        model = use_ghost_norm(toy.net(norm=True), 2)
        replica = replica_of(model, optim)
        strategy = build_strategy("ddp", toy.ALONE, {})
        monkeypatch.setattr(strategy, "loss_scale", lambda _, scale=scale: scale)
        with Calls() as calls:
            Stepper(config, toy.ALONE, strategy).step(replica, toy_batch())
        assert not calls.names["_local_scalar_dense"]
        found.append({name: value.clone() for name, value in model.state_dict().items()})
    for name, value in found[0].items():
        torch.testing.assert_close(found[1][name], value)


def test_weights_are_cast_once_for_all_micro_batches(tmp_path):
    config = toy.toy_config(tmp_path, amp="bf16", micro_batch_size=2)
    # A convolution and a linear layer, each with a weight and a bias.
    model = nn.Sequential(nn.Conv3d(3, 4, (2, 3, 3)), nn.Flatten(), nn.Linear(16, toy.CLASSES))
    replica = replica_of(model, replace(config.optim, groups="plain"))
    batch = next(iter(toy.ToyLoader(World())))
    batch = Batch(batch, video=batch.video.float())
    with Calls() as calls:
        Stepper(config, toy.ALONE, build_strategy("ddp", toy.ALONE, {})).step(replica, batch)
    assert calls.casts[torch.bfloat16] == 4


@pytest.fixture
def gpus(monkeypatch):
    """One GPU, and what the process group is told."""
    told = {}
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    monkeypatch.setattr(torch.cuda, "set_device", lambda device: told.update(device=device))
    monkeypatch.setattr(dist, "init_process_group", lambda backend, **words: told.update(words, backend=backend))
    monkeypatch.setattr(dist, "destroy_process_group", lambda: None)
    monkeypatch.setattr(elastic, "meet", lambda _: (World(1, 2), None))
    monkeypatch.setattr(elastic, "check_rendezvous", lambda *_: None)
    monkeypatch.setattr(elastic, "gather_bytes", lambda data, _: [data, data])
    for name, value in {"RANK": "1", "LOCAL_RANK": "0", "WORLD_SIZE": "2"}.items():
        monkeypatch.setitem(os.environ, name, value)
    monkeypatch.delenv(SHARED_DEVICE, raising=False)
    return told


def test_a_rank_tells_nccl_its_device(gpus):
    with join(60) as member:
        assert member.device == CUDA
    assert gpus["device"] == gpus["device_id"] == CUDA
    assert gpus["backend"] == "cpu:gloo,cuda:nccl"


def test_ranks_share_a_gpu_over_gloo_only_if_told_to(gpus, monkeypatch):
    monkeypatch.setitem(os.environ, "LOCAL_RANK", "1")
    with pytest.raises(UsageError, match="local rank 1 has no GPU, this machine has 1"), join(60):
        pass
    monkeypatch.setitem(os.environ, SHARED_DEVICE, "1")
    with join(60) as member:
        assert member.device == CUDA
    assert (gpus["backend"], gpus["device_id"]) == ("gloo", None)
    assert device_of({"LOCAL_RANK": "5", SHARED_DEVICE: "1"}) == CUDA
