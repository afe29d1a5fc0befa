"""ExactSampler: the order, the ranks' shares and the state of a `ClipLoader` for torch's DataLoader."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, Literal, cast, get_args

import numpy as np
from torch.utils.data import DistributedSampler

from fastvid.errors import UsageError
from fastvid.load.batch.batch import Batch
from fastvid.load.clip_dataset import ClipDataset, SampleVisit
from fastvid.load.clips.streams import streams_text
from fastvid.load.order.batches import MASKED, Batches
from fastvid.load.order.blocks import BlockShuffle
from fastvid.load.order.epoch import ClassBalanced, EpochOrders
from fastvid.load.state import STATE_VERSION, check_state, fingerprint
from fastvid.load.trainers import check_use
from fastvid.runtime.checks import check_choice, check_integer
from fastvid.runtime.world import World

Last = Literal["drop", "keep"]


class ExactSampler(DistributedSampler[SampleVisit]):
    """Yields this rank's visits of an epoch, as a `ClipLoader` of the same arguments makes its batches.

        sampler = ExactSampler(clips, global_batch_size=64)
        loader = DataLoader(clips, batch_size=64 // world_size, sampler=sampler, num_workers=8)

    The state is that of a `ClipLoader` and can be exchanged with it; it holds for any world size and batch size. Each
    ``for`` begins at the place of the loaded state, or at the beginning of the epoch if none was loaded; after the last
    batch, or `set_epoch`, the next one begins an epoch. It is a `DistributedSampler`, so Lightning leaves it as it is.
    Accelerate and the Hugging Face Trainer share out batches themselves: give them rank=0, world_size=1.

    Args:
        clips: The clips.
        global_batch_size: Clips per step over all ranks; a multiple of the world size. The DataLoader's batch_size is
            this number divided by the world size.
        shuffle: See `ClipLoader`.
        balance: See `ClipLoader`.
        clips_per_video: See `ClipLoader`.
        last: "drop" discards the clips that do not fill the last batch; "keep" delivers them, and some ranks then have
            fewer clips, or a batch less.
        rank: This process among `world_size`; by default torch's process group, else torchrun's environment, else 0.
        world_size: Processes that share each global batch.

    Raises:
        UsageError: If an argument is invalid, or if the dataset is too small for one batch.
    """

    def __init__(
        self,
        clips: ClipDataset,
        *,
        global_batch_size: int,
        shuffle: bool | BlockShuffle = True,
        balance: ClassBalanced | None = None,
        clips_per_video: int = 1,
        last: Last = "drop",
        rank: int | None = None,
        world_size: int | None = None,
    ) -> None:
        check_choice("last", last, get_args(Last))
        self.clips, self.world, self._found_world = clips, World.resolve(rank, world_size), rank is None
        self._orders = EpochOrders(clips.dataset, shuffle=shuffle, balance=balance, clips_per_video=clips_per_video)
        self.batches = Batches(
            self._orders.num_samples, global_batch_size, last, self.world, clips_per_video=clips_per_video
        )
        if self.batches.size % self.world.size:
            raise UsageError(
                f"global_batch_size {global_batch_size} is not a multiple of the world size {self.world.size}",
                hint="a DataLoader has one batch size on all ranks; a ClipLoader takes any number",
            )
        super().__init__(cast("Any", clips), self.world.size, self.world.rank, shuffle=False)
        self._seed, self.epoch, self._origin = clips.seed, 0, 0
        self._position = 0  # first position that no complete batch has yielded

    def __iter__(self) -> Iterator[SampleVisit]:
        check_use(self, self.world, found=self._found_world)
        return self._iterate()

    def _iterate(self) -> Iterator[SampleVisit]:
        self._begin()
        order = self._orders.order(self._seed, self.epoch)
        for share in self.batches.shares(self._origin):
            positions = share.positions[share.positions != MASKED]
            samples = order.ids(positions) if len(positions) else np.empty(0, np.int64)
            for left, sample, position in zip(
                range(len(positions) - 1, -1, -1), samples.tolist(), positions.tolist(), strict=True
            ):
                if not left:
                    self._position = share.stop
                yield SampleVisit(sample, position, self._seed, self.epoch, share.start, share.stop)
            self._position = share.stop

    def __len__(self) -> int:
        """Return the clips of this rank in a whole epoch."""
        whole, left = divmod(self.batches.num_samples, self.batches.size)
        rows = whole * self.batches.size // self.world.size
        if self.batches.last == "keep" and left:
            rows += int(np.count_nonzero(self.batches.share(whole * self.batches.size).positions != MASKED))
        return rows

    def set_epoch(self, epoch: int) -> None:
        """Go to the beginning of `epoch`; does nothing if it is the current one, so that a resumed epoch continues.

        Raises:
            UsageError: If the epoch is out of range.
        """
        epoch = check_integer("epoch", epoch, 0, 2**64 - 1)
        if epoch != self.epoch + self._is_over:
            self.epoch, self._position, self._origin = epoch, 0, 0

    def state_dict(self, after: Batch | None = None) -> dict[str, Any]:
        """Return the state {version, fingerprint, seed, epoch, position} after a batch.

        Args:
            after: The last batch that was used. Without it, the state counts what the sampler has yielded: a DataLoader
                with worker processes asks for several batches that it has not delivered. A StatefulDataLoader accounts
                for those itself.
        """
        place = (self.epoch, self._position) if after is None else (after.epoch, after.stop)
        own = {"version": STATE_VERSION, "fingerprint": self._fingerprint(), "seed": self._seed}
        return own | dict(zip(("epoch", "position"), place, strict=True))

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Resume from a state of a sampler, or of a `ClipLoader`, of any world size and batch size.

        Raises:
            StateError: If the state belongs to other data, another sampler or other augmentation; says which part.
        """
        self._seed, self.epoch, self._position = check_state(state, self._fingerprint(), self._orders.num_samples)
        self._origin = self._position

    @property
    def _is_over(self) -> bool:
        return not self.batches.count(self._position)

    def _begin(self) -> None:
        if self._is_over:
            self.epoch, self._origin = self.epoch + 1, 0
        self._position = self._origin

    def _fingerprint(self) -> dict[str, str]:
        clips, streams = self.clips, streams_text(self.clips.streams, self.clips.flow_stack)
        own = fingerprint(clips.dataset, clips.rules, order=self._orders.text, streams=streams)
        return own | clips.annotations.fingerprint
