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

from fastvid.decode.backends import Backend, backend
from fastvid.decode.parity import judge
from fastvid.decode.request import Box, Decoder, DevicePlanes, DeviceRgb, EncodedClip, Levels, Planes, Rgb
from fastvid.errors import DecodeError, UsageError
from fastvid.format.schema import Matrix
from tests.conformance.outputs import arrays, cut, decoded, empties, empty, numbers, pictures, read, reference, rgb
from tests.makers import Video


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

    size: ClassVar[tuple[int, int]] = (96, 160)
    """Height and width of the videos: at least these, multiples of 16, with the same width."""

    matrices: ClassVar[tuple[Matrix, ...]] = (Matrix.SMPTE170M,)
    """Coefficients that it supports."""

    @classmethod
    def backend(cls) -> Backend:
        """The back-end; by default the registered one."""
        return backend(cls.name)

    @property
    def device(self) -> str:
        """Where its outputs are."""
        return self.backend().device

    @pytest.fixture
    def decoder(self):
        if self.device == "cuda" and not torch.cuda.is_available():
            pytest.skip("needs a CUDA device")
        why = self.backend().why_unavailable()
        if why:
            pytest.skip(f"{self.name}: {why}")
        decoder = self.backend().open()
        yield decoder
        decoder.close()

    def test_implements_the_decoder_protocol(self, decoder):
        assert isinstance(decoder, Decoder)
        assert decoder.max_clips >= 1
        assert decoder.outputs - {Levels} == set(self.kinds)
        assert isinstance(self, WritesPlanes) == bool({Planes, DevicePlanes} & set(self.kinds))

    def test_decodes_the_codecs_it_registers(self, videos):
        for encoding in self.encodings:
            assert videos.painted(encoding, size=self.size).info.codec in self.backend().codecs

    def test_decodes_the_requested_frames(self, decoder, kind, videos):
        rng = np.random.default_rng(7)
        for encoding in self.encodings:
            video = videos.painted(encoding, size=self.size)
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
                assert numbers(decoder, video.clip(frames), kind, self.device) == frames, encoding

    def test_decodes_short_videos(self, decoder, kind, videos):
        for encoding in self.encodings:
            for count in (1, 2, 9):
                video = videos.painted(encoding, frames=count, size=self.size)
                frames = [count - 1, 0, count // 2]
                assert numbers(decoder, video.clip(frames), kind, self.device) == frames, (encoding, count)

    @pytest.mark.parametrize("flip", [False, True])
    def test_colours_match_the_reference_when_cropped(self, decoder, videos, flip):
        for encoding in self.encodings:
            video = videos.textured(encoding, size=self.size)
            # All widths modulo 16: SIMD code treats the last columns separately.
            for width in (160, 98, 100, 102, 104, 106, 108, 110, 96, 18, 6, 2):
                clip = video.clip([9, 0, 69, 69], box=Box(6, 160 - width, 58, width), flip=flip)
                self.check_colours(decoder, video, clip, self.cropped)

    @pytest.mark.parametrize("flip", [False, True])
    def test_colours_match_the_reference_when_resized(self, decoder, videos, flip):
        for encoding in self.encodings:
            video = videos.textured(encoding, size=self.size)
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
        video = videos.textured(self.encodings[0], size=self.size)
        clip = video.clip([0, 9], info=replace(video.info, matrix=matrix))
        if matrix in self.matrices:
            self.check_colours(decoder, video, clip, self.cropped)
        else:
            with pytest.raises(DecodeError, match=r"601|matrix"):
                rgb(decoder, clip, self.device)

    def test_rgb_matrix_is_rejected(self, decoder, videos):
        video = videos.textured(self.encodings[0], size=self.size)
        # Planes have no colours yet: then the conversion refuses.
        with pytest.raises(UsageError if self.kinds == (DevicePlanes,) else DecodeError):
            rgb(decoder, video.clip([0], info=replace(video.info, matrix=Matrix.RGB)), self.device)

    def test_resize_is_antialiased(self, decoder, videos):
        # Lines one pixel apart must become grey instead of aliasing into black and white bands.
        video = videos.lines(self.encodings[0], size=self.size)
        picture = rgb(decoder, video.clip([0], size=(24, 40)), self.device)
        assert picture[:, :, 2:-2, 2:-2].std() < 10
        assert abs(float(picture.mean()) - 127) < 12

    def check_colours(self, decoder, video: Video, clip: EncodedClip, tolerance: Tolerance) -> None:
        got = rgb(decoder, clip, self.device).astype(int)
        difference = np.abs(got - reference(video, clip))
        box = clip.request.box
        found = Tolerance(float(difference.mean()), int(difference.max()))
        assert found.mean <= tolerance.mean, (found, video.path.stem, box, clip.request.size)
        assert found.most <= tolerance.most, (found, video.path.stem, box, clip.request.size)

    def test_damaged_packets_do_not_affect_other_clips(self, decoder, kind, videos):
        failures = 0
        for encoding in self.encodings:
            video = videos.textured(encoding, size=self.size)
            clean = video.clip([3, 20, 41, 60])
            expected = pictures(decoded(decoder, clean, kind, self.device))
            for seed in range(12):
                out = empty(clean, kind, self.device)
                (error,) = decoder.decode([damaged(clean, seed)], [out])
                failures += error is not None
                assert error is None or isinstance(error, DecodeError)
                assert (pictures(decoded(decoder, clean, kind, self.device)) == expected).all(), (encoding, seed)
        # Most damaged entropy-coded data still decodes to something; checksums detect it before decoding.
        assert failures

    def test_only_the_bad_clip_of_a_batch_fails(self, decoder, kind, videos):
        video = videos.painted(self.encodings[0], size=self.size)
        clips = [video.clip([number, 60]) for number in range(5)]
        clips[2] = replace(clips[2], data=memoryview(bytes(len(clips[2].data))))
        outputs = [empty(clip, kind, self.device) for clip in clips]
        errors = decoder.decode(clips, outputs)
        assert [error is not None for error in errors] == [False, False, True, False, False]
        assert isinstance(errors[2], DecodeError)
        assert errors[2].where["key"] == video.path.stem
        assert errors[2].where["shard"] == "made"
        for number in (0, 1, 3, 4):
            assert read(outputs[number]) == [number, 60]

    def test_wrong_index_raises(self, decoder, kind, videos):
        for encoding in self.encodings:
            video = videos.painted(encoding, size=self.size)
            clip = video.clip([5, 20, 37, 60])
            broken = {
                "no key packet first": replace(clip, keys=np.zeros_like(clip.keys)),
                "a wanted frame is not shown": replace(clip, shows=np.where(clip.shows == 60, 61, clip.shows)),
                "an empty packet": replace(clip, sizes=np.where(clip.shows == 60, 0, clip.sizes)),
                "two packets show one frame": replace(clip, shows=np.where(clip.shows == 60, 37, clip.shows)),
                "another size": replace(clip, info=replace(clip.info, width=144), request=half(clip)),
            }
            for what, wrong in broken.items():
                (error,) = decoder.decode([wrong], [empty(wrong, kind, self.device)])
                assert isinstance(error, DecodeError), (encoding, what)
                assert numbers(decoder, clip, kind, self.device) == [5, 20, 37, 60], (encoding, what)

    def test_output_of_a_wrong_shape_is_rejected(self, decoder, kind, videos):
        video = videos.painted(self.encodings[0], size=self.size)
        with pytest.raises(UsageError, match="shape"):
            decoder.decode([video.clip([0, 1])], [empty(video.clip([0, 1, 2]), kind, self.device)])

    def test_writes_views_of_a_larger_buffer(self, decoder, kind, videos):
        video = videos.painted(self.encodings[0], size=self.size)
        clips = [video.clip([1, 2]), video.clip([60, 5])]
        outputs = empties(clips, kind, self.device)
        assert decoder.decode(clips, outputs) == [None, None]
        assert [read(out) for out in outputs] == [[1, 2], [60, 5]]

    def test_flip_mirrors_pictures_and_leaves_planes_to_the_conversion(self, decoder, kind, videos):
        video = videos.painted(self.encodings[0], size=self.size)
        plain, flipped = (
            arrays(decoded(decoder, video.clip([60, 5], flip=flip), kind, self.device))[0] for flip in (False, True)
        )
        wanted = plain[..., ::-1] if kind in (Rgb, DeviceRgb) else plain
        assert np.abs(flipped.astype(int) - wanted).mean() <= self.cropped.mean

    def test_every_frame_is_written_and_nearest_to_the_requested_one(self, decoder, videos):
        for encoding in self.encodings:
            video = videos.textured(encoding, size=self.size)
            every = reference(video, video.clip(np.arange(video.info.num_frames)))
            # Twice, because pictures of the call before may be the right ones.
            for frames in ([1, 9, 18, 27, 36, 45, 54, 63], [69, 60, 33, 33, 2, 0, 50, 51]):
                found = rgb(decoder, video.clip(frames), self.device)
                verdict = judge(found, np.array(frames), every, self.cropped.mean)
                assert verdict.problem is None, (encoding, verdict)

    def test_threads_decode_concurrently_with_separate_decoders(self, decoder, kind, videos):
        jobs = [
            videos.painted(encoding, size=self.size).clip([n, 60 - n, 9])
            for encoding in self.encodings
            for n in range(8)
        ]
        found: dict[int, list[list[int]]] = {}

        def work(number: int) -> None:
            own = self.backend().open()
            found[number] = [numbers(own, clip, kind, self.device) for clip in jobs]
            own.close()

        threads = [threading.Thread(target=work, args=(number,)) for number in range(3)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        expected = [clip.request.frames.tolist() for clip in jobs]
        assert found == dict.fromkeys(range(3), expected)

    def test_decoder_rejects_concurrent_use_by_two_threads(self, decoder, kind, videos):
        clip = videos.painted(self.encodings[0], size=self.size).clip(np.arange(70))
        refused: list[UsageError] = []
        barrier = threading.Barrier(2)

        def work() -> None:
            barrier.wait()
            for _ in range(20):
                try:
                    numbers(decoder, clip, kind, self.device)
                except UsageError as error:
                    refused.append(error)

        threads = [threading.Thread(target=work) for _ in range(2)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert refused
        assert numbers(decoder, clip, kind, self.device) == list(range(70))

    def test_closed_decoder_raises_and_a_new_one_decodes(self, decoder, kind, videos):
        video = videos.painted(self.encodings[0], size=self.size)
        assert numbers(decoder, video.clip([4]), kind, self.device) == [4]
        decoder.close()
        decoder.close()
        with pytest.raises(UsageError, match="closed"):
            decoder.decode([video.clip([4])], [empty(video.clip([4]), kind, self.device)])
        fresh = self.backend().open()
        assert numbers(fresh, video.clip([4]), kind, self.device) == [4]
        fresh.close()

    def test_memory_and_handles_do_not_grow(self, decoder, kind, videos):
        clips = [
            videos.painted(encoding, size=self.size).clip([n, 50]) for encoding in self.encodings for n in range(5)
        ]
        outputs = [empty(clip, kind, self.device) for clip in clips]
        bad = [damaged(clip, 0) for clip in clips[:: len(clips) // 4]]
        process = psutil.Process()
        # Threads of earlier tests may still be ending: only those that are started here count.
        others = set(threading.enumerate())

        def after(turns: int) -> tuple[int, int, int]:
            for _ in range(turns):
                for clip, out in zip(clips, outputs, strict=True):
                    decoder.decode([clip], [out])
                for clip in bad:
                    decoder.decode([clip], [empty(clip, kind, self.device)])
            gc.collect()
            return process.memory_info().rss, process.num_fds(), len(set(threading.enumerate()) - others)

        rss, handles, threads = after(6)
        last = after(max(1, 300 // len(clips)))
        # A decoded frame of this size is 23 kB: one leaked for each clip would be 7 MB.
        assert last[0] - rss < 4 * 2**20
        assert last[1] <= handles
        assert last[2] == threads


class WritesPlanes(Conformance):
    """Additional contract of a back-end that writes planes."""

    def test_planes_are_bit_exact(self, decoder, videos):
        (kind,) = {Planes, DevicePlanes} & set(self.kinds)
        rng = np.random.default_rng(3)
        for encoding in self.encodings:
            video = videos.textured(encoding, size=self.size)
            for box in (video.full, Box(0, 0, 2, 2), Box(94, 158, 2, 2), Box(14, 34, 50, 98), Box(2, 0, 64, 112)):
                frames = np.sort(rng.integers(0, video.info.num_frames, 6))
                got = arrays(decoded(decoder, video.clip(frames, box=box), kind, self.device))
                for plane, whole, step in zip(got, video.planes, (1, 2, 2), strict=True):
                    assert (plane == cut(whole[frames], box, step)).all(), (encoding, box)


class DetectsOrder(Conformance):
    """Additional contract of a back-end that detects packets that show other frames than indexed."""

    def test_wrong_frame_order_raises(self, decoder, kind, videos):
        for encoding in self.encodings:
            clip = videos.painted(encoding, size=self.size).clip([5, 20, 37, 60])
            swapped = {37: 60, 60: 37}
            shows = np.asarray([swapped.get(show, show) for show in clip.shows.tolist()], dtype=np.int64)
            (error,) = decoder.decode([replace(clip, shows=shows)], [empty(clip, kind, self.device)])
            assert isinstance(error, DecodeError), encoding


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
