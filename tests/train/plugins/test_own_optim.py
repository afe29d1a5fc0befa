"""Optimizers and schedules that a user names as module:name."""

import math
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import nn

from fastvid.runtime.processes import World
from fastvid.train.config import overrides
from fastvid.train.config.config import OptimConfig
from fastvid.train.parts.optim import Schedule, make_optimizer, state_per_weight
from fastvid.train.parts.replica import Replica
from tests.train import toy

BASE = OptimConfig(base_lr=0.1, base_batch_size=4, weight_decay=0.01, decay="constant")
HERE = __name__


def momentum(groups, *, beta, nesterov=False):
    return torch.optim.SGD(groups, lr=1.0, momentum=beta, nesterov=nesterov)


class Own:
    @staticmethod
    def any_sgd(groups, **options):
        return torch.optim.SGD(groups, **options)


def loses_groups(groups):
    return torch.optim.SGD([one for group in groups for one in group["params"]], lr=1.0)


def forgets(groups):
    torch.optim.SGD(groups, lr=1.0)


def linear(progress, *, end=0.0):
    return 1.0 - (1.0 - end) * progress


def explodes(progress):
    return math.inf if progress == 1 else 1.0


def says(_progress):
    return "half"


def trained(optim):
    model = toy.net()
    replica = Replica(model, make_optimizer(model, optim), schedule(optim))
    batch = next(iter(toy.ToyLoader(World())))
    for _ in range(5):
        replica.set_lr()
        replica.optimizer.zero_grad()
        nn.functional.cross_entropy(model(batch.video), batch.label).backward()
        replica.optimizer.step()
        replica.samples += toy.BATCH
    return [parameter.detach() for parameter in model.parameters()]


def schedule(optim):
    return Schedule(optim, epochs=2, samples_per_epoch=20, global_batch_size=4)


def test_an_own_optimizer_steps_as_the_same_one_of_fastvid_does():
    plain = replace(BASE, groups="tsm", momentum=0.8, nesterov=True)
    for name, key in (("momentum", "beta"), ("Own.any_sgd", "momentum")):
        own = replace(BASE, groups="tsm", name=f"{HERE}:{name}", options={key: 0.8, "nesterov": True})
        for one, other in zip(trained(plain), trained(own), strict=True):
            assert torch.equal(one, other)


def test_a_class_of_torch_is_an_optimizer_as_it_is():
    config = overrides.apply(
        toy.toy_config(Path()), ["optim.name=torch.optim:RMSprop", "optim.options.alpha=0.5"]
    ).optim
    optimizer = make_optimizer(toy.net(), config)
    assert {group["alpha"] for group in optimizer.param_groups} == {0.5}
    assert {group["lr_mult"] for group in optimizer.param_groups} == {1.0, 2.0, 5.0, 10.0}
    # A dry run estimates memory: RMSprop stores one number a weight, AMSGrad three.
    assert state_per_weight(config) == pytest.approx(1, abs=1e-3)
    amsgrad = replace(config, name="torch.optim:Adam", options={"amsgrad": True})
    assert state_per_weight(amsgrad) == pytest.approx(3, abs=1e-3)


@pytest.mark.parametrize("name", ["sgd", f"{HERE}:Own.any_sgd"])
def test_a_restored_optimizer_has_the_settings_of_this_run(name):
    def made(momentum, decay):
        own = {"options": {"momentum": momentum, "lr": 1.0}} if name != "sgd" else {"momentum": momentum}
        model, optim = toy.net(), replace(BASE, name=name, weight_decay=decay, **own)
        return Replica(model, make_optimizer(model, optim), schedule(optim))

    before, after = made(0.9, 0.1), made(0.5, 0.2)
    before.optimizer.param_groups[0]["steps"] = 7  # as optimizers without a schedule count there
    after.load_state_dict(before.state_dict())
    first, *_ = groups = after.optimizer.param_groups
    assert {group["momentum"] for group in groups} == {0.5}
    assert max(group["weight_decay"] for group in groups) == 0.2
    assert first["steps"] == 7


def test_an_own_schedule_follows_warm_up_by_samples():
    own = replace(BASE, decay=f"{HERE}:linear", decay_options={"end": 0.2}, warmup_epochs=0.4)
    made = schedule(own)
    # Warm-up ends at sample 8 of 40.
    assert made.lr(4) == schedule(replace(own, decay="constant", decay_options={})).lr(4)
    assert [made.lr(samples) for samples in (8, 24, 40, 48)] == pytest.approx([0.1, 0.06, 0.02, 0.02])


@pytest.mark.parametrize(
    ("changes", "message", "hint"),
    [
        ({"name": "adamm"}, "optim.name is 'adamm'", "did you mean adam?"),
        ({"options": {"beta": 1}}, "optim.options is set, but optim.name is 'sgd'", "optim.name=module:name"),
        ({"name": f"{HERE}:momentun"}, "has no 'momentun'", "did you mean momentum?"),
        ({"name": f"{HERE}:Own.sgd"}, "has no 'Own.sgd'", "did you mean any_sgd?"),
        ({"name": ":momentum"}, "optim.name is ':momentum'", "write it as module:name"),
        ({"name": "my_optimizers:make"}, "no module 'my_optimizers'", "PYTHONPATH"),
        ({"name": "no.such.package:make"}, "no module 'no.such.package'", "add the folder"),
        ({"name": "torchh:make"}, "no module 'torchh'", "did you mean torch?"),
        ({"name": f"{HERE}:momentum", "options": {"beta": 1, "nestrov": 1}}, "no such option", "mean nesterov?"),
        ({"name": f"{HERE}:momentum", "options": {"beta": 1, "groups": 1}}, "options.groups: ", "use one of beta"),
        ({"name": f"{HERE}:Own.any_sgd", "options": {"groups": 1}}, "options.groups: ", "it has no options"),
        ({"name": f"{HERE}:forgets", "options": {"beta": 1}}, "no such option", "remove it: it has no options"),
        ({"name": f"{HERE}:momentum"}, "requires beta", "set optim.options.beta"),
        ({"name": f"{HERE}:forgets"}, "returned NoneType, not a torch.optim.Optimizer", "return the optimizer"),
        ({"name": f"{HERE}:loses_groups"}, "has other parameter groups", "lr_mult"),
        ({"name": f"{HERE}:BASE"}, "is not callable", "name a function"),
        ({"decay": "cosin"}, "optim.decay is 'cosin'", "did you mean cosine?"),
        ({"decay_options": {"end": 1}}, "optim.decay_options is set", "optim.decay=module:name"),
        ({"decay": f"{HERE}:liner"}, "has no 'liner'", "did you mean linear?"),
        ({"decay": f"{HERE}:linear", "decay_options": {"ende": 1}}, "no such option", "did you mean end?"),
        ({"decay": f"{HERE}:explodes"}, "returned inf at progress 1", "finite factor"),
        ({"decay": f"{HERE}:says"}, "returned 'half' at progress 0", "finite factor"),
    ],
)
def test_wrong_optimizers_and_schedules_are_named(changes, message, hint):
    with toy.refused(message, hint):
        optim = replace(BASE, **changes)
        schedule(optim)
        make_optimizer(toy.net(), optim)
