"""A GPU decoder's own CUDA stream: waits until outputs may be written, and completes them before `decode` returns."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch

from fastvid.decode.request import DecoderOutput, DevicePlanes, DeviceRgb

# Types of torch.cuda are incomplete.
_cuda: Any = torch.cuda


class DeviceStream:
    """A stream with high priority, so that copies of frames do not queue after the kernels of a training step."""

    def __init__(self, device_id: int) -> None:
        self.device = torch.device("cuda", device_id)
        self.stream: Any = _cuda.Stream(self.device, priority=-1)
        # A blocking event lets the thread that waits sleep; otherwise the thread would occupy a core.
        self._done: Any = _cuda.Event(blocking=True)

    @contextmanager
    def writing(self, outputs: Iterable[DecoderOutput]) -> Iterator[None]:
        """Make the stream current for a block that writes outputs; when it ends, they are visible to every stream.

        The stream first waits for the event `writable` of each output. At the end the thread waits for this stream
        alone, never for the whole device; also if the block raises an error, so that nothing is still being written.
        """
        with torch.cuda.stream(self.stream):
            for output in outputs:
                if isinstance(output, DeviceRgb | DevicePlanes) and output.writable is not None:
                    self.stream.wait_event(output.writable)
            try:
                yield
            finally:
                self._done.record(self.stream)
                self._done.synchronize()
