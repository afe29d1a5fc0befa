"""Raw videos in, a dataset out: probe, encode, verify and pack, restartable at any moment.

The package can be called: ``fastvid.shard(["videos/"], out="shards/mine")`` is `fastvid.shard.job.run_job`.
"""

from __future__ import annotations

import sys
from types import ModuleType
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from fastvid.shard.job import JobReport


class _CallablePackage(ModuleType):
    def __call__(self, *args: Any, **kwargs: Any) -> JobReport:
        from fastvid.shard.job import run_job

        return run_job(*args, **kwargs)


sys.modules[__name__].__class__ = _CallablePackage
