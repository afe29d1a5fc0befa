"""Contract tests for back-ends. A back-end's test class inherits `Conformance` or a stricter class and names itself.

A test file defines a subclass whose name starts with ``Test``; pytest runs every test below for it.
"""

from __future__ import annotations

import gc
import threading
from dataclasses import dataclass, replace
from typing import ClassVar

import numpy as np
import psutil
import pytest
import torch

from fastvid.decode.backends import backend
from fastvid.decode.colours import ClipPlanes
from fastvid.decode.pixels import clip_to_rgb
from fastvid.decode.request import Box, Decoder, EncodedClip, Planes, Rgb
from fastvid.errors import DecodeError, UsageError
from fastvid.format.schema import Matrix
from tests.makers import Video, read_numbers


@dataclass(frozen=True)
class Tolerance:
    """Maximum difference of RGB from the reference conversion, in levels, on a texture of smooth colours."""

    mean: float
    most: int


class Conformance:
    """The contract of `fastvid.decode.request.Decoder`."""

    name: ClassVar[str]
    """Name of the back-end."""

    encodings: ClassVar[tuple[str, ...]]
    """Keys of `makers.ENCODINGS` that it decodes."""

    kinds: ClassVar[tuple[type, ...]] = (Planes, Rgb)
    """The output types that it writes; tests with a `kind` run for each."""

    cropped: ClassVar[Tolerance]
    resized: ClassVar[Tolerance]

    matrices: ClassVar[tuple[Matrix, ...]] = (Matrix.SMPTE170M,)
    """Coefficients that it supports."""

    @pytest.fixture
    def decoder(self):
        why = backend(self.name).why_unavailable()
        if why:
            pytest.skip(f"{self.name}: {why}")
        decoder = backend(self.name).open()
        yield decoder
        decoder.close()

    def test_implements_the_decoder_protocol(self, decoder):
        assert isinstance(decoder, Decoder)
        assert decoder.max_clips >= 1
        assert decoder.outputs == set(self.kinds)
        assert isinstance(self, WritesPlanes) == (Planes in self.kinds)

    def test_decodes_the_codecs_it_registers(self, videos):
        for encoding in self.encodings:
            assert videos.painted(encoding).info.codec in backend(self.name).codecs

    def test_decodes_the_requested_frames(self, decoder, kind, videos):
        rng = np.random.default_rng(7)
        for encoding in self.encodings:
            video = videos.painted(encoding)
            last = video.info.num_frames - 1
            requests = [
                [0],
                [last],
                [0, last],
                [last, 0],
                [3, 3, 3],
                [40, 8, 8, 39, 40],
                list(range(last + 1)),
                *(rng.integers(0, last + 1, 8).tolist() for _ in range(4)),
            ]
            for frames in requests:
                assert numbers(decoder, video.clip(frames), kind) == frames, encoding

    def test_decodes_short_videos(self, decoder, kind, videos):
        for encoding in self.encodings:
            for count in (1, 2, 9):
                video = videos.painted(encoding, frames=count)
                frames = [count - 1, 0, count // 2]
                assert numbers(decoder, video.clip(frames), kind) == frames, (encoding, count)

    @pytest.mark.parametrize("flip", [False, True])
    def test_colours_match_the_reference_when_cropped(self, decoder, videos, flip):
        for encoding in self.encodings:
            video = videos.textured(encoding)
            # All widths modulo 16: SIMD code treats the last columns separately.
            for width in (160, 98, 100, 102, 104, 106, 108, 110, 96, 18, 6, 2):
                clip = video.clip([9, 0, 69, 69], box=Box(6, 160 - width, 58, width), flip=flip)
                self.check_colours(decoder, video, clip, self.cropped)

    @pytest.mark.parametrize("flip", [False, True])
    def test_colours_match_the_reference_when_resized(self, decoder, videos, flip):
        for encoding in self.encodings:
            video = videos.textured(encoding)
            for height, width, size in (
                (96, 160, (48, 80)),
                (60, 98, (37, 61)),
                (60, 98, (80, 112)),
                (50, 50, (50, 64)),
            ):
                clip = video.clip([9, 0, 69, 69], box=Box(4, 8, height, width) if height < 96 else None, size=size)
                clip = replace(clip, request=replace(clip.request, flip=flip))
                self.check_colours(decoder, video, clip, self.resized)

    @pytest.mark.parametrize("matrix", [m for m in Matrix if m is not Matrix.RGB])
    def test_colours_match_the_matrix_or_are_rejected(self, decoder, videos, matrix):
        video = videos.textured(self.encodings[0])
        clip = video.clip([0, 9], info=replace(video.info, matrix=matrix))
        if matrix in self.matrices:
            self.check_colours(decoder, video, clip, self.cropped)
        else:
            with pytest.raises(DecodeError, match=r"601|matrix"):
                decoded(decoder, clip, Rgb)

    def test_rgb_matrix_is_rejected(self, decoder, videos):
        video = videos.textured(self.encodings[0])
        with pytest.raises(DecodeError):
            decoded(decoder, video.clip([0], info=replace(video.info, matrix=Matrix.RGB)), Rgb)

    def test_resize_is_antialiased(self, decoder, videos):
        # Lines one pixel apart must become grey instead of aliasing into black and white bands.
        video = videos.lines(self.encodings[0])
        picture = decoded(decoder, video.clip([0], size=(24, 40)), Rgb).data
        assert picture[:, :, 2:-2, 2:-2].std() < 10
        assert abs(float(picture.mean()) - 127) < 12

    def check_colours(self, decoder, video: Video, clip: EncodedClip, tolerance: Tolerance) -> None:
        got = decoded(decoder, clip, Rgb).data.astype(int)
        difference = np.abs(got - reference(video, clip))
        box = clip.request.box
        found = Tolerance(float(difference.mean()), int(difference.max()))
        assert found.mean <= tolerance.mean, (found, video.path.stem, box, clip.request.size)
        assert found.most <= tolerance.most, (found, video.path.stem, box, clip.request.size)

    def test_damaged_packets_do_not_affect_other_clips(self, decoder, kind, videos):
        failures = 0
        for encoding in self.encodings:
            video = videos.textured(encoding)
            clean = video.clip([3, 20, 41, 60])
            expected = pictures(decoded(decoder, clean, kind))
            for seed in range(12):
                out = empty(clean, kind)
                (error,) = decoder.decode([damaged(clean, seed)], [out])
                failures += error is not None
                assert error is None or isinstance(error, DecodeError)
                assert (pictures(decoded(decoder, clean, kind)) == expected).all(), (encoding, seed)
        # Most damaged entropy-coded data still decodes to something; checksums detect it before decoding.
        assert failures

    def test_only_the_bad_clip_of_a_batch_fails(self, decoder, kind, videos):
        video = videos.painted(self.encodings[0])
        clips = [video.clip([number, 60]) for number in range(5)]
        clips[2] = replace(clips[2], data=memoryview(bytes(len(clips[2].data))))
        outputs = [empty(clip, kind) for clip in clips]
        errors = decoder.decode(clips, outputs)
        assert [error is not None for error in errors] == [False, False, True, False, False]
        assert isinstance(errors[2], DecodeError)
        assert errors[2].where["key"] == video.path.stem
        assert errors[2].where["shard"] == "made"
        for number in (0, 1, 3, 4):
            assert read(outputs[number]) == [number, 60]

    def test_wrong_index_raises(self, decoder, kind, videos):
        for encoding in self.encodings:
            video = videos.painted(encoding)
            clip = video.clip([5, 20, 37, 60])
            broken = {
                "no key packet first": replace(clip, keys=np.zeros_like(clip.keys)),
                "a wanted frame is not shown": replace(clip, shows=np.where(clip.shows == 60, 61, clip.shows)),
                "an empty packet": replace(clip, sizes=np.where(clip.shows == 60, 0, clip.sizes)),
                "two packets show one frame": replace(clip, shows=np.where(clip.shows == 60, 37, clip.shows)),
                "another size": replace(clip, info=replace(clip.info, width=144), request=half(clip)),
            }
            for what, wrong in broken.items():
                (error,) = decoder.decode([wrong], [empty(wrong, kind)])
                assert isinstance(error, DecodeError), (encoding, what)
                assert numbers(decoder, clip, kind) == [5, 20, 37, 60], (encoding, what)

    def test_output_of_a_wrong_shape_is_rejected(self, decoder, kind, videos):
        video = videos.painted(self.encodings[0])
        with pytest.raises(UsageError, match="shape"):
            decoder.decode([video.clip([0, 1])], [empty(video.clip([0, 1, 2]), kind)])

    def test_writes_views_of_a_larger_buffer(self, decoder, videos):
        video = videos.painted(self.encodings[0])
        clips = [video.clip([1, 2]), video.clip([60, 5], flip=True)]
        batch = np.zeros((2, 2, 3, 96, 160), np.uint8)  # [B, T, C, H, W]
        assert decoder.decode(clips, [Rgb(clip.transpose(1, 0, 2, 3)) for clip in batch]) == [None, None]
        assert read_numbers(batch[0, :, 1]) == [1, 2]
        assert read_numbers(batch[1, :, 1, :, ::-1]) == [60, 5]

    def test_threads_decode_concurrently_with_separate_decoders(self, decoder, kind, videos):
        jobs = [videos.painted(encoding).clip([n, 60 - n, 9]) for encoding in self.encodings for n in range(8)]
        found: dict[int, list[list[int]]] = {}

        def work(number: int) -> None:
            own = backend(self.name).open()
            found[number] = [numbers(own, clip, kind) for clip in jobs]
            own.close()

        threads = [threading.Thread(target=work, args=(number,)) for number in range(3)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        expected = [clip.request.frames.tolist() for clip in jobs]
        assert found == dict.fromkeys(range(3), expected)

    def test_decoder_rejects_concurrent_use_by_two_threads(self, decoder, kind, videos):
        clip = videos.painted(self.encodings[0]).clip(np.arange(70))
        refused: list[UsageError] = []
        barrier = threading.Barrier(2)

        def work() -> None:
            barrier.wait()
            for _ in range(20):
                try:
                    numbers(decoder, clip, kind)
                except UsageError as error:
                    refused.append(error)

        threads = [threading.Thread(target=work) for _ in range(2)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert refused
        assert numbers(decoder, clip, kind) == list(range(70))

    def test_closed_decoder_raises_and_a_new_one_decodes(self, decoder, kind, videos):
        video = videos.painted(self.encodings[0])
        assert numbers(decoder, video.clip([4]), kind) == [4]
        decoder.close()
        decoder.close()
        with pytest.raises(UsageError, match="closed"):
            decoder.decode([video.clip([4])], [empty(video.clip([4]), kind)])
        fresh = backend(self.name).open()
        assert numbers(fresh, video.clip([4]), kind) == [4]
        fresh.close()

    def test_memory_and_handles_do_not_grow(self, decoder, kind, videos):
        clips = [videos.painted(encoding).clip([n, 50]) for encoding in self.encodings for n in range(10)]
        outputs = [empty(clip, kind) for clip in clips]
        bad = [damaged(clip, 0) for clip in clips[:: len(clips) // 4]]
        process = psutil.Process()

        def turn() -> tuple[int, int, int]:
            for clip, out in zip(clips, outputs, strict=True):
                decoder.decode([clip], [out])
            for clip in bad:
                decoder.decode([clip], [empty(clip, kind)])
            gc.collect()
            return process.memory_info().rss, process.num_fds(), threading.active_count()

        for _ in range(5):
            turn()
        rss, handles, threads = turn()
        turns = max(1, 300 // len(clips))
        for _ in range(turns):
            last = turn()
        # A decoded frame of this size is 23 kB: one leaked for each clip would be 7 MB.
        assert last[0] - rss < 4 * 2**20
        assert last[1:] == (handles, threads)


class WritesPlanes(Conformance):
    """Additional contract of a back-end that writes planes."""

    def test_planes_are_bit_exact(self, decoder, videos):
        rng = np.random.default_rng(3)
        for encoding in self.encodings:
            video = videos.textured(encoding)
            for box in (video.full, Box(0, 0, 2, 2), Box(94, 158, 2, 2), Box(14, 34, 50, 98), Box(2, 0, 64, 112)):
                frames = np.sort(rng.integers(0, video.info.num_frames, 6))
                got = decoded(decoder, video.clip(frames, box=box), Planes)
                for plane, whole, step in zip((got.y, got.u, got.v), video.planes, (1, 2, 2), strict=True):
                    assert (plane == cut(whole[frames], box, step)).all(), (encoding, box)


class DetectsOrder(Conformance):
    """Additional contract of a back-end that detects packets that show other frames than indexed."""

    def test_wrong_frame_order_raises(self, decoder, kind, videos):
        for encoding in self.encodings:
            clip = videos.painted(encoding).clip([5, 20, 37, 60])
            swapped = {37: 60, 60: 37}
            shows = np.asarray([swapped.get(show, show) for show in clip.shows.tolist()], dtype=np.int64)
            (error,) = decoder.decode([replace(clip, shows=shows)], [empty(clip, kind)])
            assert isinstance(error, DecodeError), encoding


def empty(clip: EncodedClip, kind: type) -> Planes | Rgb:
    """Create an output for a clip, filled with a value that no test expects."""
    request = clip.request
    if kind is Rgb:
        return Rgb(np.full((3, len(request.frames), *request.size), 77, np.uint8))
    buffer = np.full(Planes.nbytes(len(request.frames), request.box), 77, np.uint8)
    return Planes.packed(buffer, len(request.frames), request.box)


def decoded(decoder: Decoder, clip: EncodedClip, kind: type) -> Planes | Rgb:
    """Decode one clip, raising its error."""
    out = empty(clip, kind)
    (error,) = decoder.decode([clip], [out])
    if error is not None:
        raise error
    return out


def pictures(out: Planes | Rgb) -> np.ndarray:
    """Return all bytes of an output."""
    return out.data if isinstance(out, Rgb) else np.concatenate([p.ravel() for p in (out.y, out.u, out.v)])


def read(out: Planes | Rgb) -> list[int]:
    """Read the painted frame numbers in an output."""
    return read_numbers(out.data[1] if isinstance(out, Rgb) else out.y)


def numbers(decoder: Decoder, clip: EncodedClip, kind: type) -> list[int]:
    """Decode a clip and read its painted frame numbers."""
    return read(decoded(decoder, clip, kind))


def cut(planes: np.ndarray, box: Box, step: int) -> np.ndarray:
    """Crop luma (step 1) or chroma (step 2) planes [T, H, W] to a box."""
    rows = slice(box.y // step, (box.y + box.height) // step)
    return planes[:, rows, box.x // step : (box.x + box.width) // step]


def reference(video: Video, clip: EncodedClip) -> np.ndarray:
    """Return RGB [3, T, H, W] of a clip from ffmpeg's decoder and the reference conversion."""
    frames, box = clip.request.frames, clip.request.box
    planes = [torch.from_numpy(cut(p[frames], box, s).copy()) for p, s in zip(video.planes, (1, 2, 2), strict=True)]
    source = ClipPlanes(*planes, flip=clip.request.flip, matrix=clip.info.matrix, range=clip.info.range)
    return clip_to_rgb(source, clip.request.size).numpy().astype(int)


def damaged(clip: EncodedClip, seed: int) -> EncodedClip:
    """Flip bits in one packet of a clip: anywhere, or for even seeds in its headers."""
    rng = np.random.default_rng(seed)
    data = bytearray(clip.data)
    packet = int(rng.integers(0, len(clip.sizes)))
    size = int(clip.sizes[packet]) if seed % 2 else min(24, int(clip.sizes[packet]))
    for bit in rng.integers(0, size * 8, 5).tolist():
        data[int(clip.starts[packet]) + bit // 8] ^= 1 << bit % 8
    return replace(clip, data=memoryview(data))


def half(clip: EncodedClip):
    """Return the clip's request for the left part of its picture."""
    box = Box(0, 0, clip.info.height, 80)
    return replace(clip.request, box=box, size=(box.height, box.width))
