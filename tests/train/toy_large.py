"""The parts of the large-batch recipe on a toy, 200 steps in float64; see `tests.train.toy` for how it is started."""

from dataclasses import replace
from functools import partial

from fastvid.models.ghost import use_ghost_norm
from fastvid.train.config.config import ModelConfig
from tests.train import toy
from tests.train.strategies import lab

BATCH, GROUP = 30, 2  # in worlds of 2 and 5: shares of 14 and 16, and of 6
EPOCHS = 67  # of 3 steps
NAMES = ("plain", "norm", "ghost", "micro", "recipe", "lamb", "half")


def toy_config(name, folder):
    base = toy.toy_config(folder, epochs=EPOCHS, eval_every_epochs=EPOCHS, log_every_steps=50)
    data = replace(base.data, global_batch_size=BATCH, group_size=GROUP)
    optim = replace(base.optim, base_batch_size=BATCH, base_lr=0.02, groups="plain", milestones=(40.0,))
    run, model, options = base.run, ModelConfig(name="toy", ghost_norm=name in ("ghost", "micro", "recipe")), {}
    if name == "micro":
        run = replace(run, micro_batch_size=4)
    if name == "recipe":
        optim = replace(optim, name="lars", trust=0.02, ema_decay=0.95, head_lr_mult=2.0, freeze=("0:10",))
        base = replace(base, data=data, task=replace(base.task, mixup=0.4, cutmix=1.0))
    if name == "lamb":
        optim = replace(optim, name="lamb", base_lr=0.005, decay="cosine")
    if name == "half":
        options = {"gradients": "fp16"}
    return replace(base, data=data, optim=optim, run=run, model=model, sync_options=options)


def scenario(name, folder, member):
    config = toy_config(name, folder)
    model = toy.net(norm=name in ("norm", "ghost", "micro", "recipe"))
    if config.model.ghost_norm:
        use_ghost_norm(model, GROUP)
    made = toy.trainer(config, member, model=model, saves=False, group=GROUP)
    over = made.fit()
    average = made.replica.average
    result = toy.outcome(made, over=over)
    return result | {"average": None if average is None else average.module.state_dict()}


if __name__ == "__main__":
    lab.main({name: partial(scenario, name) for name in NAMES})
