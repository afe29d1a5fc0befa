"""The floor: libavcodec alone decoding fastvid's planned packets, by its C interface, with the frames discarded.

No decoder built on libavcodec can be faster on these bytes. Packets are already in memory; nothing is read, checked,
copied or converted. The library is the one that PyAV has loaded, so both run the same code.
"""

from __future__ import annotations

import ctypes
from functools import cache
from typing import Any, Final

import numpy as np

from fastvid.decode.clips import read_clip, reader_of
from fastvid.decode.engines import library
from fastvid.decode.request import EncodedClip
from fastvid.errors import MissingDependency
from fastvid.format.packets import StreamInfo
from fastvid.format.schema import INPUT_PADDING
from fastvid.tune.measure import Corpus

# Offsets of fields in libavcodec 59 to 62: AVCodecContext has no setter for extradata, AVPacket none for its data.
_FLAGS2, _EXTRADATA, _EXTRADATA_SIZE = 68, 72, 80
_PACKET_DATA: Final = 24
_MAJORS: Final = range(59, 63)
_PROBE: Final = 1 << 15  # AV_CODEC_FLAG2_CHUNKS, which the H.264 decoder ignores

_RETURNS_POINTER: Final = (
    "av_frame_alloc",
    "av_malloc",
    "av_packet_alloc",
    "avcodec_alloc_context3",
    "avcodec_find_decoder_by_name",
)


class FloorJob:
    """The codec contexts and packets of one thread."""

    def __init__(self, corpus: Corpus) -> None:
        self._codec, self._util = _libraries()
        self._frame = ctypes.c_void_p(self._util.av_frame_alloc())
        self._contexts: dict[tuple[object, ...], ctypes.c_void_p] = {}
        self._clips = []
        for request in corpus.requests:
            video = corpus.dataset[request.sample]
            clip = read_clip(request, video.info, video.table, reader_of(corpus.mp4s[request.sample]))
            self._clips.append((self._context(video.info), self._packets(clip)))

    def __call__(self, task: int, /) -> int:
        """Decode a clip, check that every packet yields a frame, and return the number of frames."""
        context, packets = self._clips[task]
        send, receive, frame = self._codec.avcodec_send_packet, self._codec.avcodec_receive_frame, self._frame
        frames = 0
        for packet in (*packets, None):
            send(context, packet)
            while not receive(context, frame):
                frames += 1
        self._codec.avcodec_flush_buffers(context)
        assert frames == len(packets), (frames, len(packets))
        return frames

    def _context(self, info: StreamInfo) -> ctypes.c_void_p:
        key = (info.codec, info.extradata, info.width, info.height)
        if key not in self._contexts:
            codec = ctypes.c_void_p(self._codec.avcodec_find_decoder_by_name(info.codec.label.encode()))
            context = ctypes.c_void_p(self._codec.avcodec_alloc_context3(codec))
            start = context.value
            assert start is not None
            # Verify the struct layout by flags2, which has a setter and directly precedes the extradata fields.
            self._util.av_opt_set_int(context, b"flags2", ctypes.c_int64(_PROBE), 0)
            if ctypes.c_int.from_address(start + _FLAGS2).value != _PROBE:
                raise MissingDependency(
                    "the floor cannot be measured: this libavcodec has an unexpected AVCodecContext layout"
                )
            self._util.av_opt_set_int(context, b"flags2", ctypes.c_int64(0), 0)
            self._util.av_opt_set_int(context, b"threads", ctypes.c_int64(1), 0)
            size = len(info.extradata)
            copy = self._util.av_malloc(ctypes.c_size_t(size + INPUT_PADDING))
            ctypes.memset(copy, 0, size + INPUT_PADDING)
            ctypes.memmove(copy, info.extradata, size)
            ctypes.c_void_p.from_address(start + _EXTRADATA).value = copy
            ctypes.c_int.from_address(start + _EXTRADATA_SIZE).value = size
            if self._codec.avcodec_open2(context, codec, None):
                raise MissingDependency(f"libavcodec failed to open its {info.codec.label} decoder")
            self._contexts[key] = context
        return self._contexts[key]

    def _packets(self, clip: EncodedClip) -> list[ctypes.c_void_p]:
        packets = []
        for start, size in zip(clip.starts.tolist(), clip.sizes.tolist(), strict=True):
            packet = ctypes.c_void_p(self._codec.av_packet_alloc())
            self._codec.av_new_packet(packet, size)  # adds the required padding
            assert packet.value is not None
            target = ctypes.c_void_p.from_address(packet.value + _PACKET_DATA).value
            assert target is not None
            ctypes.memmove(target, np.frombuffer(clip.data[start : start + size], np.uint8).ctypes.data, size)
            packets.append(packet)
        return packets


@cache
def _libraries() -> tuple[Any, Any]:
    codec, util = library("avcodec"), library("avutil")
    if codec.avcodec_version() >> 16 not in _MAJORS:
        raise MissingDependency(f"the floor supports only libavcodec {_MAJORS[0]} to {_MAJORS[-1]}")
    for name in _RETURNS_POINTER:
        getattr(codec if name.startswith(("avcodec", "av_packet")) else util, name).restype = ctypes.c_void_p
    codec.avcodec_find_decoder_by_name.argtypes = [ctypes.c_char_p]
    for name in ("avcodec_send_packet", "avcodec_receive_frame"):
        getattr(codec, name).argtypes = [ctypes.c_void_p, ctypes.c_void_p]
    return codec, util
