"""Options of a loader that are rarely changed: the form of its tensors, its workers, what to do with damaged clips."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, get_args

import torch

from fastvid.decode.colours import IMAGENET_MEAN, IMAGENET_STD, Layout, Pixels
from fastvid.errors import UsageError
from fastvid.runtime.values import check_choice, check_least, check_seconds

Kind = Literal["thread", "process"]


@dataclass(frozen=True)
class Output:
    """The form of a loader's video tensors.

    Args:
        layout: "BCTHW" or "BTCHW".
        dtype: A floating type for normalised values, or torch.uint8 for levels 0 to 255.
        mean: Mean of R, G, B in 0 to 1; not used for torch.uint8.
        std: Standard deviation of R, G, B in 0 to 1, positive; not used for torch.uint8.
        channels_last: Whether the channels of a pixel are neighbours in memory, as models in torch's channels-last
            memory format expect: "BCTHW" is then `torch.channels_last_3d`. Values and shapes are the same.

    Raises:
        UsageError: If an argument is invalid.
    """

    layout: Layout = "BCTHW"
    dtype: torch.dtype = torch.float32
    mean: tuple[float, float, float] = IMAGENET_MEAN
    std: tuple[float, float, float] = IMAGENET_STD
    channels_last: bool = False

    def __post_init__(self) -> None:
        _ = self.pixels  # checks them

    @property
    def pixels(self) -> Pixels:
        """How values are normalised; of the type float32 if the output keeps levels."""
        dtype = torch.float32 if self.dtype is torch.uint8 else self.dtype
        return Pixels(self.mean, self.std, dtype, self.layout, self.channels_last)


@dataclass(frozen=True)
class Workers:
    """Who decodes a loader's clips, and how far ahead.

    Args:
        kind: "thread" decodes in threads of this process. "process" starts as many processes of about 100 MB each,
            which leave the GIL to the training step and write batches into memory shared with forked children. One
            that crashes or hangs in native code is killed, and its clip is named and treated according to `on_error`.
        num_threads: Decode threads or processes; by default the cores this rank may use.
        prefetch: Batches to prefetch. At most prefetch + 1 batches of this rank are in memory, besides those you keep.
            Threads also prefetch from the next epoch, once one has followed another; between epochs these batches stay.
        num_fetchers: Threads that read packets ahead of decoding. By default none for local disks, where each decode
            thread or process reads its own, and for remote storage its number of concurrent requests, at most 32.
        device_lanes: Decoders of a back-end that decodes on a GPU; by default as many as it recommends.
        timeout: Seconds a batch may take before WorkerError names the clips in progress and ends the iteration.
        clip_timeout: Seconds that reading or decoding one clip may take in a worker process before it counts as hung.

    Raises:
        UsageError: If an argument is out of range.
    """

    kind: Kind = "thread"
    num_threads: int | None = None
    prefetch: int = 2
    num_fetchers: int | None = None
    device_lanes: int | None = None
    timeout: float = 600.0
    clip_timeout: float = 60.0

    def __post_init__(self) -> None:
        check_choice("kind", self.kind, get_args(Kind))
        check_least(1, num_threads=self.num_threads, device_lanes=self.device_lanes, prefetch=self.prefetch)
        check_least(0, num_fetchers=self.num_fetchers)
        check_seconds(timeout=self.timeout, clip_timeout=self.clip_timeout)


@dataclass(frozen=True)
class Skip:
    """Mask damaged clips and count them, instead of raising their error. A clip is never replaced by another.

    A store or disk that fails or denies access is no damaged clip: `UnavailableError` is always raised.

    Args:
        max_rate: Share of this rank's clips that may be skipped before the loader raises, 0 to 1.

    Raises:
        UsageError: If the rate is out of range.
    """

    max_rate: float = 0.01

    def __post_init__(self) -> None:
        if not 0 <= self.max_rate <= 1:
            raise UsageError(f"max_rate is {self.max_rate}, expected 0 to 1")


OnError = Literal["raise"] | Skip
