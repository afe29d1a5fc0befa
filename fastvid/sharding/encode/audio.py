"""The audio of a sample: an M4A next to its video, cut to the same seconds of the source.

Second zero is the first frame of the video: audio that starts later is padded with silence, earlier audio is cut.

- ``aac`` decodes the first audio stream, cuts it to the sample, and encodes it as AAC at 128 kbit/s with at most two
  channels. CPU optimisations are off, because the float code of FFmpeg's encoder differs between CPU models.
- ``copy`` keeps AAC and ALAC packets unchanged, so cuts fall between packets (21 ms of AAC at 48 kHz). Other codecs
  cannot be in an M4A that every player reads; they are encoded as with ``aac``, with a warning.

Audio never causes a source to be rejected: if there is none, or it does not decode, the sample is packed without audio
and with a warning.
"""

from __future__ import annotations

import contextlib
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from fractions import Fraction
from typing import Any, Final

import av
from av.container import InputContainer
from av.video.stream import VideoStream

from fastvid.errors import FormatError, SourceError
from fastvid.format.mp4 import AudioInfo, index_m4a
from fastvid.media.container import fraction, open_demuxer
from fastvid.media.ffmpeg import Limits, contents
from fastvid.media.probe import OpenSource, private_copy
from fastvid.media.reasons import Reason
from fastvid.sharding.encode.profiles import QUIET, Settings
from fastvid.sharding.encode.transcode import FfmpegLog, run_ffmpeg

# Codecs that every M4A player supports.
_COPIED: Final = frozenset({"aac", "alac"})
# Transparent to most listeners, and the usual rate of phones.
_BITRATE: Final = "128k"
_MAX_CHANNELS: Final = 2
# Seconds by which audio may be longer than its video: copies may add a packet at either end, and resampling rounds.
_SLACK: Final = 0.25

NO_AUDIO: Final = "no-audio"
DAMAGED: Final = "audio-damaged"
ENCODED: Final = "audio-encoded"
NOT_CUT: Final = "audio-not-cut"


@dataclass(frozen=True, slots=True)
class AudioSource:
    """The first audio stream of a source."""

    codec: str
    channels: int
    rate: int  # samples per second
    video_start: Fraction  # seconds from the first packet of the file to the first frame of the video


@dataclass(frozen=True, slots=True)
class SampleAudio:
    """The audio of all samples of a source: the M4A of each and its properties; None for a sample without audio."""

    tracks: tuple[tuple[bytes, AudioInfo] | None, ...]
    copied: bool = False
    warnings: tuple[str, ...] = ()

    @classmethod
    def none(cls, count: int, *warnings: str) -> SampleAudio:
        """Return the result for `count` samples without audio."""
        return cls((None,) * count, warnings=warnings)

    def split(self, counts: Sequence[int]) -> Iterator[SampleAudio]:
        """Yield the audio of consecutive groups of samples, with the warnings that each group would get by itself.

        `counts`: number of samples in each group.
        """
        first = 0
        for count in counts:
            tracks = self.tracks[first : first + count]
            warnings = [*(one for one in self.warnings if one != NO_AUDIO), *([NO_AUDIO] if None in tracks else [])]
            yield SampleAudio(tracks, self.copied, tuple(warnings))
            first += count


def extract_audio(
    settings: Settings, source: OpenSource, spans: Sequence[tuple[Fraction, Fraction]], patience: float = 1.0
) -> SampleAudio:
    """Extract the audio of a source's samples.

    `spans`: start and end of each sample in seconds from the first frame of the video.
    """
    choice = settings.streams.audio
    if choice == "drop":
        return SampleAudio.none(len(spans))
    try:
        found = probe_audio(source)
        if found is None:
            return SampleAudio.none(len(spans), NO_AUDIO)
        copied = choice == "copy" and found.codec in _COPIED
        data = _write(settings, source, found, spans, patience, copied=copied)
        tracks = tuple(_check(member, float(end - start)) for member, (start, end) in zip(data, spans, strict=True))
    except SourceError as error:
        if error.transient:
            raise
        if source.private:
            return SampleAudio.none(len(spans), DAMAGED)
        # FFmpeg reports a disk error like damage, so try again with a copy. The video need not be encoded again.
        with private_copy(source) as copy:
            return extract_audio(settings, copy, spans, patience)
    warnings = [ENCODED] if choice == "copy" and not copied else []
    warnings += [NO_AUDIO] if None in tracks else []
    return SampleAudio(tracks, copied, tuple(warnings))


def take_over_audio(data: bytes, count: int, seconds: float) -> SampleAudio:
    """Return the audio of an existing sample of a dataset, unchanged.

    `data`: its M4A. `count`: number of new samples from this one; if more than 1, none gets audio, because it is not
    cut. `seconds`: duration of the video.
    """
    if count > 1:
        return SampleAudio.none(count, NOT_CUT)
    try:
        track = _check(data, seconds)
    except SourceError:
        return SampleAudio.none(1, DAMAGED)
    return SampleAudio.none(1, NO_AUDIO) if track is None else SampleAudio((track,), copied=True)


def audio_seconds(source: OpenSource, spans: Sequence[tuple[Fraction, Fraction]], limits: Limits) -> float:
    """Return the wall-time limit for extracting audio, in seconds: that of reading the file plus the audio's length."""
    return min(limits.max_seconds, limits.read_seconds(source.size) + float(max(end for _, end in spans)))


def probe_audio(source: OpenSource) -> AudioSource | None:
    """Return a source's first audio stream; None if there is none or it has no decoder."""
    try:
        with open_demuxer(source.url, source.container) as container:
            if not container.streams.audio:
                return None
            stream: Any = container.streams.audio[0]
            # PyAV has no context for a codec that it cannot decode.
            context: Any = stream.codec_context
            if context is None:
                return None
            pictures = [s for s in container.streams.video if not s.disposition & av.stream.Disposition.attached_pic]
            begins = Fraction(container.start_time or 0, av.time_base)
            shown = begins
            name, channels, rate = context.codec.canonical_name, context.channels, context.sample_rate
            if pictures and (tick := fraction(pictures[0].time_base)):
                first = _first_shown(container, pictures[0]) if source.container == "avi" else pictures[0].start_time
                shown = shown if first is None else first * tick
            return AudioSource(name, channels, rate, max(Fraction(0), shown - begins))
    except (av.FFmpegError, ValueError) as error:
        raise SourceError(f"audio cannot be read: {error}", reason=Reason.DAMAGED) from error


def _first_shown(container: InputContainer, stream: VideoStream) -> int | None:
    """Return the tick at which a player shows the first picture of an AVI, which stores no presentation times.

    If pictures are reordered, this is later than the first packet, and the sound must begin at the same tick.
    """
    with contextlib.suppress(av.FFmpegError):  # the step that encodes the pictures reports it
        stream.codec_context.thread_count = 1
        return next((frame.dts for frame in container.decode(stream)), None)
    return None


def _write(
    settings: Settings,
    source: OpenSource,
    found: AudioSource,
    spans: Sequence[tuple[Fraction, Fraction]],
    patience: float,
    *,
    copied: bool,
) -> tuple[bytes, ...]:
    seconds = patience * audio_seconds(source, spans, settings.limits)
    with contextlib.ExitStack() as stack:
        files = [stack.enter_context(tempfile.TemporaryFile(prefix="fastvid-")) for _ in spans]
        command = [settings.build.path, *QUIET, "-cpuflags", "0"]
        command += ["-f", source.container, "-protocol_whitelist", "file", "-threads", "1", "-i", source.url]
        for file, (start, end) in zip(files, spans, strict=True):
            command += _target(found, start, end, copied=copied)
            command += [f"file:/dev/fd/{file.fileno()}"]
        log = run_ffmpeg(command, [source.descriptor, *(file.fileno() for file in files)], seconds, settings.limits)
        _check_log(log)
        return tuple(contents(file.fileno()) for file in files)


def _target(found: AudioSource, start: Fraction, end: Fraction, *, copied: bool) -> list[str]:
    first, last = float(found.video_start + start), float(found.video_start + end)
    options = ["-map", "0:a:0", "-map_metadata", "-1", "-map_chapters", "-1", "-fflags", "+bitexact"]
    options += ["-flags:a", "+bitexact", "-movflags", "+faststart", "-f", "ipod"]
    # The edit list stores in movie ticks how much later than the video the first packet begins; 1 ms, the default tick,
    # is too coarse.
    options += ["-movie_timescale", str(found.rate)]
    if copied:
        return [*options, "-codec:a", "copy", "-copypriorss", "0", "-ss", f"{first:.6f}", "-t", f"{last - first:.6f}"]
    # Fill gaps with silence, also before the first packet, so that the index of an audio sample tells its time. Fill
    # gaps from 5 ms on, because clocks of containers round to a millisecond; by default gaps below 0.1 s stay.
    cut = f"atrim=start={first:.6f}:end={last:.6f},asetpts=PTS-STARTPTS"
    filters = f"aresample=async=1:min_hard_comp=0.005:first_pts=0,{cut}"
    options += ["-filter:a", filters, "-threads", "1", "-codec:a", "aac", "-b:a", _BITRATE]
    return [*options, "-ac", str(min(found.channels, _MAX_CHANNELS))]


def _check_log(log: FfmpegLog) -> None:
    if log.status:
        raise SourceError(f"ffmpeg exited with {log.status}: {'; '.join(log.last)}", reason=Reason.DAMAGED)
    complaints = [line for line in log.lines if "[error]" in line or "[fatal]" in line or "[panic]" in line]
    if complaints:
        raise SourceError(f"errors while decoding audio: {complaints[0]}", reason=Reason.DAMAGED)


def _check(data: bytes, seconds: float) -> tuple[bytes, AudioInfo] | None:
    """Decode an M4A and return it with its properties; None if it contains no audio sample."""
    if b"trak" not in data:  # ffmpeg writes no track without packets
        return None
    try:
        info = index_m4a(data)
    except FormatError as error:
        raise SourceError(f"the M4A cannot be indexed: {error.message}", reason=Reason.DAMAGED) from error
    samples = count_samples(data)
    if samples > (seconds + _SLACK) * info.sample_rate:
        raise SourceError(
            f"{samples / info.sample_rate:.2f} s of audio for {seconds:.2f} s of video", reason=Reason.DAMAGED
        )
    return (data, info) if samples else None


def count_samples(data: bytes | memoryview) -> int:
    """Return the number of samples per channel that an M4A decodes to."""
    try:
        with open_demuxer(data, "mov") as container:
            stream = container.streams.audio[0]
            stream.codec_context.thread_count = 1
            return sum(frame.samples for frame in container.decode(stream))
    except (av.FFmpegError, ValueError, IndexError) as error:
        raise SourceError(f"audio does not decode: {error}", reason=Reason.DAMAGED) from error
