"""What the NVDEC back-end asks of PyNvVideoCodec, on which stream, and which of its failures become errors."""

from __future__ import annotations

import json
import logging
import shutil
import subprocess
import sys
from dataclasses import replace

import numpy as np
import pytest
import torch

from fastvid.decode.backends import backend
from fastvid.decode.containers import elementary_stream
from fastvid.decode.request import DevicePlanes, Rgb
from fastvid.errors import DecodeError, FormatError, UsageError
from fastvid.format.schema import Codec
from tests.conformance.fake_nvc import nvc
from tests.conformance.outputs import empty, numbers

__all__ = ["nvc"]


@pytest.fixture
def decoder(nvc):
    decoder = backend("nvdec").open(device_id=2)
    yield decoder
    decoder.close()


def failure(decoder, clip):
    (error,) = decoder.decode([clip], [empty(clip, DevicePlanes, "cuda:2")])
    assert isinstance(error, DecodeError)
    return str(error)


def test_picture_that_the_parser_swallows_is_an_error(decoder, nvc, videos):
    clip = videos.painted("compact").clip([5, 20, 37])
    nvc.faults.drop = 20
    assert "were decoded from" in failure(decoder, clip)
    nvc.faults.drop = None
    assert numbers(decoder, clip, DevicePlanes, "cuda:2") == [5, 20, 37]


def test_picture_that_is_returned_twice_is_an_error(decoder, nvc, videos):
    nvc.faults.again = 20
    assert "frame 20 was decoded after frame 20" in failure(decoder, videos.painted("compact").clip([5, 20, 37]))


def test_decoder_stays_open_and_is_reconfigured_when_the_size_changes(decoder, nvc, videos):
    for size in ((96, 160), (96, 160), (128, 240), (96, 160), (256, 256)):
        video = videos.painted("intra", size=size)
        assert numbers(decoder, video.clip([3, 60]), DevicePlanes, "cuda:2") == [3, 60]
    assert len(nvc.faults.created) == 1
    assert nvc.faults.sizes == [(240, 128), (160, 96), (256, 256)]
    large = videos.painted("intra", size=(272, 160))
    assert numbers(decoder, large.clip([3]), DevicePlanes, "cuda:2") == [3]
    assert [(one["maxwidth"], one["maxheight"]) for one in nvc.faults.created] == [(256, 256), (256, 512)]
    assert [one["gpuid"] for one in nvc.faults.created] == [2, 2]


def test_clip_that_fails_in_a_reconfigured_decoder_is_tried_in_a_new_one(decoder, nvc, videos):
    small, large = videos.painted("intra"), videos.painted("intra", size=(128, 240))
    assert numbers(decoder, small.clip([3]), DevicePlanes, "cuda:2") == [3]
    nvc.faults.reconfigured = True
    assert numbers(decoder, large.clip([3]), DevicePlanes, "cuda:2") == [3]
    assert len(nvc.faults.created) == 2
    bad = replace(large.clip([3]), data=memoryview(bytes(len(large.clip([3]).data))))
    failure(decoder, bad)
    assert len(nvc.faults.created) == 2  # it failed in one whose size was right


def test_writes_after_the_reader_of_the_memory_and_waits_for_its_own_stream(decoder, nvc, videos):
    clip, training = videos.painted("compact").clip([5, 20]), torch.cuda.Stream("cuda:2")
    output = empty(clip, DevicePlanes, "cuda:2")
    for ordered in (True, False):
        writable = torch.cuda.Event()
        with torch.cuda.stream(training):
            output.y.sum()
            writable.record()
        nvc.cuda.races.clear()
        nvc.cuda.syncs.clear()
        decoder.decode([clip], [replace(output, writable=writable if ordered else None)])
        assert bool(nvc.cuda.races) is not ordered
        assert all(what.startswith("event ") for _, what in nvc.cuda.syncs)
        assert len(nvc.cuda.syncs) == 1
        nvc.cuda.default_stream(2).wait_stream(training)
        training.synchronize()


def test_unknown_latency_and_other_outputs_are_rejected(decoder, nvc, videos):
    with pytest.raises(UsageError, match="latency"):
        backend("nvdec").open(latency="zero")
    clip = videos.painted("intra").clip([3])
    with pytest.raises(UsageError, match="DevicePlanes"):
        decoder.decode([clip], [empty(clip, Rgb)])


def test_lanes_are_two_for_each_engine(nvc):
    assert backend("nvdec").lanes(16, 1) == 14


@pytest.mark.parametrize("encoding", ["compact", "hevc"])
def test_elementary_stream_keeps_every_unit_and_adds_parameter_sets_to_key_packets(videos, encoding):
    clip = videos.painted(encoding).clip([0, 40])
    stream = elementary_stream(clip)
    for number, (start, size) in enumerate(zip(stream.starts, stream.sizes, strict=True)):
        begin, length = int(clip.starts[number]), int(clip.sizes[number])
        packet, made = bytes(clip.data[begin : begin + length]), stream.data[start : start + size].tobytes()
        assert made.startswith(b"\0\0\0\1")
        assert made.endswith(packet[-20:])
        # Lengths have four bytes here, as start codes have.
        assert (size > length) == bool(clip.keys[number])


def units(clip, lengths):
    """Write a clip of two units, a delimiter and a slice, with lengths of some bytes, and its avcC."""
    delimiter, picture, sps, pps = b"\x09\xf0", b"\x65" + bytes(9), b"\x67" + bytes(5), b"\x68\x01"
    data = b"".join(len(unit).to_bytes(lengths, "big") + unit for unit in (delimiter, picture))
    head = bytes([1, 66, 0, 30, 0xFC | lengths - 1, 0xE1]) + len(sps).to_bytes(2, "big") + sps
    extradata = head + b"\x01" + len(pps).to_bytes(2, "big") + pps
    info = replace(clip.info, codec=Codec.H264, extradata=extradata)
    one = np.ones(1, np.int64)
    made = replace(
        clip,
        info=info,
        data=memoryview(data + bytes(64)),
        starts=one * 0,
        sizes=one * len(data),
        shows=one * 0,
        keys=one > 0,
    )
    return made, [delimiter, sps, pps, picture]


@pytest.mark.parametrize("lengths", [1, 2, 4])
def test_parameter_sets_follow_the_delimiter(videos, lengths):
    clip, wanted = units(videos.painted("intra").clip([0]), lengths)
    assert elementary_stream(clip).data.tobytes() == b"".join(b"\0\0\0\1" + unit for unit in wanted)
    cropped = replace(clip, info=replace(clip.info, extradata=clip.info.extradata[:-1]))
    with pytest.raises(FormatError, match="ends inside a parameter set"):
        elementary_stream(cropped)


# Loads the extension of PyNvVideoCodec over driver libraries whose every function fails, and prints what it has.
REAL = """
import ctypes, json, logging, sys
for name in sys.argv[1:]:
    ctypes.CDLL(name, mode=ctypes.RTLD_GLOBAL)
logging.basicConfig(level=logging.INFO)
logging.getLogger("PyNvVideoCodec").addFilter(lambda record: record.levelno > logging.INFO)
import PyNvVideoCodec as nvc
packet = nvc.PacketData()
packet.bsl_data, packet.bsl, packet.pts, packet.decode_flag = 1 << 40, 3, -2, nvc.VideoPacketFlag.ENDOFPICTURE
print(json.dumps({
    "create": nvc.CreateDecoder.__doc__,
    "reconfigure": nvc.PyNvDecoder.setReconfigParams.__doc__,
    "decode": nvc.PyNvDecoder.Decode.__doc__,
    "frame": nvc.DecodedFrame.getPTS.__doc__ + nvc.DecodedFrame.cuda.__doc__,
    "view": hasattr(nvc.CAIMemoryView, "__cuda_array_interface__"),
    "packet": [packet.bsl_data, packet.bsl, packet.pts, packet.decode_flag],
    "names": [str(one) for one in (
        nvc.cudaVideoCodec.H264, nvc.cudaVideoCodec.HEVC, nvc.cudaVideoCodec.VP9, nvc.cudaVideoCodec.AV1,
        nvc.OutputColorType.NATIVE, nvc.DisplayDecodeLatencyType.NATIVE, nvc.DisplayDecodeLatencyType.LOW,
        nvc.VideoPacketFlag.ENDOFSTREAM)],
}))
"""
_FUNCTIONS = """
CtxCreate_v2 CtxDestroy_v2 CtxGetDevice CtxPopCurrent_v2 CtxPushCurrent_v2 DeviceGet DeviceGetCount
DevicePrimaryCtxRelease_v2 DevicePrimaryCtxRetain EventCreate EventDestroy_v2 EventRecord EventSynchronize GetErrorName
GetErrorString Init MemAllocAsync MemAllocPitch_v2 MemAlloc_v2 MemFreeAsync MemFree_v2 Memcpy2DAsync_v2 Memcpy2D_v2
MemcpyDtoHAsync_v2 MemcpyDtoH_v2 MemcpyHtoD_v2 PointerGetAttribute StreamCreate StreamDestroy_v2 StreamGetCtx
StreamSynchronize StreamWaitEvent
"""


def driver(folder):
    """Compile libraries with the names of a driver's: version 13.0 of the encoder, and no device."""
    failing = "".join(f"int cu{name}(void) {{ return 100; }}" for name in _FUNCTIONS.split())
    version = "int NvEncodeAPIGetMaxSupportedVersion(unsigned *version) { *version = 13 << 4; return 0; }"
    made = []
    for name, text in (("libcuda.so.1", failing), ("libnvidia-encode.so.1", version)):
        source = folder / f"{name}.c"
        source.write_text(text)
        command = [shutil.which("cc"), "-shared", "-fPIC", f"-Wl,-soname,{name}", "-o", folder / name, source]
        subprocess.run(command, check=True)
        made.append(str(folder / name))
    return made


def test_pynvvideocodec_has_the_functions_that_are_called(tmp_path):
    libraries = [] if torch.cuda.is_available() else driver(tmp_path)
    run = subprocess.run([sys.executable, "-c", REAL, *libraries], capture_output=True, text=True)
    assert not run.returncode, run.stderr
    assert "INFO" not in run.stderr
    found = json.loads(run.stdout.splitlines()[-1])
    options = "gpuid codec cudacontext cudastream usedevicememory maxwidth maxheight outputColorType latency"
    for option in options.split():
        assert f"{option}: " in found["create"]
    assert "width: int = 0, height: int = 0" in found["reconfigure"]
    assert "PacketData) -> List[_PyNvVideoCodec.DecodedFrame]" in found["decode"]
    assert "-> int" in found["frame"]
    assert "-> List[CAIMemoryView]" in found["frame"]
    assert found["view"]
    assert found["packet"] == [1 << 40, 3, -2, 8]
    assert len(found["names"]) == 8


def test_machine_without_a_driver_says_what_is_missing(caplog):
    sys.modules.pop("fastvid.decode.nvdec", None)
    with caplog.at_level(logging.INFO):
        why = backend("nvdec").why_unavailable()
    if torch.cuda.is_available():
        assert why is None
    else:
        assert why.startswith("decoder 'nvdec' is not available: RuntimeError: Failed to load NVENC library")
        assert "\n" not in why
    assert not [record for record in caplog.records if record.name.startswith(("PyNvVideoCodec", "fastvid.decode"))]
