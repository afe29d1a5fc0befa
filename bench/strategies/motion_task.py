"""The demo's motion dataset with its recipe, trained by its real loader and model."""

from __future__ import annotations

from dataclasses import replace
from typing import Any, Final

from bench.strategies.ranks import TIMEOUT_S, RunSpec

RECIPE: Final = "motion_tsm"
SIDE: Final = 32  # instead of 64, so that a run takes a quarter of a minute of CPU time


class MotionTask:
    """The recipe's parts, and its held-out clips."""

    def __init__(self, spec: RunSpec) -> None:
        from fastvid.load.clips.crops import CenterCrop, RandomCrop
        from fastvid.train.config import config as recipes

        config = recipes.load(RECIPE, [f"data.path={spec.data}", f"run.seed={spec.seed}", *spec.changes])
        self.config = replace(
            config,
            data=replace(
                config.data, spatial=(RandomCrop(SIDE),), eval_spatial=(CenterCrop(SIDE),),
                global_batch_size=spec.batch, num_threads=1,
            ),
            optim=replace(config.optim, base_batch_size=spec.batch, **spec.optim),
            run=replace(config.run, out="", log_every_steps=10**9, eval_every_epochs=10**9, timeout_s=TIMEOUT_S),
            sync=spec.sync,
            sync_options=dict(spec.options),
        )  # fmt: skip

    def parts(self, member: Any, reader: Any) -> tuple[Any, Any, Any]:
        """Return configuration, replica and loader of this rank."""
        from fastvid.runtime.processes import World
        from fastvid.train.ranks import Member
        from fastvid.train.run import assemble

        found = assemble.parts(self.config, None, member, reader)
        if found.eval_data is not None:
            found.eval_data.loader.clips.close()
        if member.leads:
            alone = assemble.eval_data(found.config, found.eval_set, Member(World(), member.device))
            self._held = [(batch["video"], batch["label"]) for batch in alone.loader]
            alone.loader.clips.close()
        return found.config, found.replica, found.loader

    def held_out(self, model: Any) -> tuple[float, float]:
        """Return loss in nats and accuracy on the held-out clips; only on rank 0."""
        import torch

        with torch.no_grad():
            logits = torch.cat([model.eval()(video) for video, _ in self._held])
        model.train()
        label = torch.cat([label for _, label in self._held])
        right = logits.argmax(1) == label
        return float(torch.nn.functional.cross_entropy(logits, label)), float(right.double().mean())
