"""The list: every recipe with what is expected of it, by kind."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from functools import partial

from tests.fields import paff
from tests.truth import recipes as make
from tests.truth.recipes import CODECS, FRAMES, HEIGHT, WAYS, WIDTH, X264, X265, Recipe

INTERLACED = {"packets": "no-index or damaged"}
HDR = {"packets": "hdr", "encoded": "equal tone-mapped or hdr"}
BROKEN = dict.fromkeys(WAYS, "truncated or damaged or broken-container or no-index")
# Decoders of FFmpeg before 6.1 show AV1 frames that an edit list hides; who encodes with them notices it.
SHOWN_BY_OLD = {"encoded": "equal or verify-failed"}
# Pictures before the first key picture whose references were cut off.
LEADING = {"copy": "damaged", "encoded": "damaged"}
# Containers that cut packets into pieces.
SCATTERED = ("ts", "m2ts")
# What needs no proof: whether a frame decodes is known when it is read.
LATE = {"none": "damaged or truncated or error", "sample": "truncated or damaged or no-index or error"}
# Noise in VP9 and AV1 decodes to pictures without an error, which a player shows, too.
UNNOTICED = {"any": "equal or truncated or damaged or broken-container or no-index or error"}

COPIED = ("h264.mp4", "h264.mkv", "h264.ts", "h264.mov", "hevc.mp4", "hevc.mkv", "vp9.webm", "vp8.mkv", "av1.mp4")
TIMED = ("h264.mp4", "h264.mkv", "h264.ts", "h264.frag.mp4", "hevc.mp4", "vp9.webm", "av1.mkv")
TABLED = ("h264.mp4", "hevc.mp4", "av1.mp4", "vp9.mp4", "mpeg4p.mp4", "h264.mov")
COMMON = ("h264.mp4", "h264.mkv", "hevc.mp4", "vp9.webm", "av1.mp4", "mpeg4.mp4", "mpeg4.avi", "h264.ts", "h264.mov")


def base(name: str, **changes: object) -> Recipe:
    """Return a plain recipe of a codec in a container, such as ``h264.mp4``."""
    codec, _, suffix = name.partition(".")
    recipe = Recipe(f"{codec}-{suffix.replace('.', '-')}", suffix, CODECS[codec])
    if codec == "vp8":
        recipe = recipe.but("", expected={"copy": "no-index"})  # MP4 cannot contain it
    if codec in make.FOREIGN:
        recipe = recipe.but("", expected={"packets": "no-index"})
    elif suffix in SCATTERED:
        recipe = recipe.but("", expected={"place": "no-index"})
    return recipe.but(str(changes.pop("kind", "plain")), **changes)


def plain() -> Iterator[Recipe]:
    """Every codec in every container that holds it."""
    for suffix, codecs in make.CONTAINERS.items():
        for codec in codecs.split():
            yield base(f"{codec}.{suffix}")


def clocks() -> Iterator[Recipe]:
    """Times of every kind."""
    fine = "settb=1/90000"
    chains = {
        "dropped": f"{fine},select='not(eq(n,7)+eq(n,8)+eq(n,15))'",
        "pause": f"{fine},setpts='PTS+gte(N,12)*360000'",
        "tworates": f"{fine},setpts='if(lt(N,12),N*3000,12*3000+(N-12)*9000)'",
        "jitter": f"{fine},setpts='N*3600+720*mod(N*N,3)'",
    }
    for name in TIMED:
        for kind, chain in chains.items():
            kept = tuple(n for n in range(FRAMES) if kind != "dropped" or n not in (7, 8, 15))
            yield base(name, kind=kind, filters=chain, numbers=kept, output="-enc_time_base 1/90000")
        for rate in ("1/2", "30000/1001", "24000/1001", "60", "12.5"):
            if (name, rate) == ("av1.mkv", "1/2"):
                continue  # which libaom does not encode
            yield base(name, kind=f"rate{rate.replace('/', '_')}", rate=rate)
        yield base(name, kind="late", output="-output_ts_offset 10")


def trims() -> Iterator[Recipe]:
    """Edit lists, and parts that were cut without encoding."""
    lists = {
        "front-key": ([(12, 12)], range(12, 24)),
        "front": ([(5, 19)], range(5, 24)),
        "front-late": ([(17, 7)], range(17, 24)),
        "end": ([(0, 9)], range(9)),
        "both": ([(7, 9)], range(7, 16)),
        "empty": ([(-1, 30), (0, 24)], range(24)),
        "empty-front": ([(-1, 10), (14, 10)], range(14, 24)),
    }
    for name in ("h264.mp4", "h264.mov", "hevc.mp4", "av1.mp4", "mpeg4p.mp4"):
        for kind, (segments, shown) in lists.items():
            edit = partial(_edits, segments)
            output = "-use_editlist 1"
            expected = SHOWN_BY_OLD if name == "av1.mp4" else {}
            yield base(name, kind=f"edit-{kind}", edit=edit, numbers=tuple(shown), output=output, expected=expected)
    several = {"copy": "no-index"}
    edit = partial(_edits, [(2, 6), (14, 6)])
    yield base("h264.mp4", kind="edit-two", edit=edit, output="-use_editlist 1", expected=several)
    for name in COPIED:
        suffix = name.partition(".")[2]
        cuts = {
            "early": ("0.22", "", range(6, 24)),
            "middle": ("0.5", "", range(13, 24)),
            "short": ("0.3", "-t 0.4", range(8, 18)),
        }
        for kind, (start, length, shown) in cuts.items():
            av1 = {"numbers": tuple(shown), "expected": SHOWN_BY_OLD} if name == "av1.mp4" else {}
            yield base(name, kind=f"cut-{kind}", more=(f"-ss {start} -i {{}} {length} -c copy {suffix}",), **av1)
    yield base("h264.frag.mp4", kind="cut-of-dash", more=("-ss 0.3 -i {} -t 0.5 -c copy mp4",))
    yield base("hevc.mkv", kind="cut-to-mp4", more=("-ss 0.6 -i {} -c copy -tag:v hvc1 mp4",))


def _edits(segments: list[tuple[float, float]], data: bytes) -> bytes:
    return make.edits(*segments, data=data)


def structures() -> Iterator[Recipe]:
    """Groups of pictures, references, and parameter sets."""
    h264 = {
        "opengop": f"{X264}:bframes=3:open-gop=1",
        "pyramid": f"{X264}:bframes=7:b-pyramid=normal:ref=8:b-adapt=0",
        "strict": f"{X264}:bframes=5:b-pyramid=strict:ref=4:b-adapt=0",
        "nob": f"{X264}:bframes=0",
        "intra": X264.replace("keyint=12:min-keyint=12", "keyint=1"),
        "refresh": X264.replace("min-keyint=12:", "") + ":intra-refresh=1:bframes=0",
        "onekey": X264.replace("keyint=12:min-keyint=12", "keyint=250"),
        "slices": f"{X264}:bframes=2:slices=4",
        "cavlc": f"{X264}:bframes=1:cabac=0",
        "weighted": f"{X264}:bframes=2:weightp=2:weightb=1:ref=4",
    }
    hevc = {"opengop": ":bframes=3:open-gop=1", "pyramid": ":bframes=4:b-pyramid=1:ref=4", "nob": ":bframes=0"}
    for suffix in ("mp4", "mkv", "ts"):
        for kind, encode in h264.items():
            yield base(f"h264.{suffix}", kind=kind, encode=f"-pix_fmt yuv420p {encode}")
        tag = " -tag:v hvc1" if suffix == "mp4" else ""
        for kind, options in hevc.items():
            yield base(f"hevc.{suffix}", kind=kind, encode=f"-pix_fmt yuv420p {X265}{options}{tag}")
        encode, cut = f"-pix_fmt yuv420p {h264['opengop']}", f"-ss 0.5 -i {{}} -c copy {suffix}"
        expected = LEADING if suffix == "ts" else {}
        yield base(f"h264.{suffix}", kind="opengop-cut", encode=encode, more=(cut,), expected=expected)
    for codec in ("h264", "hevc"):
        for suffix, start in (("mp4", "1.0"), ("mov", "1.3")):
            encode = CODECS[codec].replace("bframes=2", "bframes=3:open-gop=1")
            # The edit list of the cut hides pictures that cannot be decoded.
            cut = f"-ss {start} -i {{}} -c copy {'-tag:v hvc1 ' * (codec == 'hevc')}{suffix}"
            yield base(f"{codec}.{suffix}", kind="opengop-cut-late", encode=encode, frames=48, more=(cut,))
    for name, options in (("vp9", "libvpx-vp9 -g 12 -b:v 0 -crf 20"), ("vp8", "libvpx -g 12 -b:v 2M")):
        encode = f"-pix_fmt yuv420p -c:v {options} -auto-alt-ref 1 -lag-in-frames 12 -cpu-used 8"
        yield base(f"{name}.webm", kind="altref", encode=encode)
    for suffix in ("mkv", "mp4"):
        yield base(f"av1.{suffix}", kind="layers", encode="-pix_fmt yuv420p -c:v libsvtav1 -preset 10 -g 12 -crf 20")
    for name, tag in (("h264.mp4", " -tag:v avc3"), ("hevc.mp4", " -tag:v hev1"), ("h264.mkv", ""), ("hevc.mkv", "")):
        encode = CODECS[name[:4]].replace(" -tag:v hvc1", "") + tag
        yield base(name, kind="inband", encode=encode.replace("keyint=12", "repeat-headers=1:keyint=12", 1))
    plain, joined = f"-pix_fmt yuv420p {X264}:bframes=0", tuple(range(FRAMES)) * 2
    for suffix in ("mp4", "mkv", "ts"):
        muxed = (f"-r 25 -i {{}} -c copy {suffix}",)
        expected = {"place": "no-index"} if suffix in SCATTERED else {}
        one = base("h264.h264", kind=f"regular-{suffix}", encode=plain, once=True, more=muxed, expected=expected)
        yield replace(one, numbers=joined[:FRAMES])
        second = f"{plain}:chroma-qp-offset=8:cqm=jvt"
        yield replace(one, name=f"h264-h264-joined-{suffix}", join=second, numbers=joined)
        if suffix != "ts":
            plain_hevc = f"-pix_fmt yuv420p {X265}:bframes=0"
            one = base("hevc.hevc", kind=f"joined-{suffix}", encode=f"{plain_hevc}:cbqpoffs=0", once=True, more=muxed)
            second = f"{plain_hevc}:cbqpoffs=6:crqpoffs=-6:scaling-list=default"
            yield replace(one, join=second, numbers=joined)
    disordered = {"place": "no-index or damaged", "all": "equal times-disordered"}
    equal = ("-i {} -c copy -bsf:v setts=pts=PTS-mod(N\\,2)*40 mkv",)
    for name, kind, more in (
        ("h264.h264", "untimed-mp4", ("-r 25 -i {} -c copy mp4",)),
        ("h264.mkv", "equal-times", equal),
    ):
        yield base(name, kind=kind, more=more, pictures="counted", expected=disordered)


def shapes() -> Iterator[Recipe]:
    """Orientation, proportions, and what is cut off."""
    filters = {
        "rot90": "transpose=clock",
        "rot180": "hflip,vflip",
        "rot270": "transpose=cclock",
        "hflip": "hflip",
        "vflip": "vflip",
        "transpose": "transpose=cclock_flip",
        "rot45": "",
    }
    for name in (*TABLED, "h264.frag.mp4"):
        for turn, turned in filters.items():
            expected = {"packets": "no-index", "encoded": "equal rotated"} if turn == "rot45" else {}
            yield base(name, kind=turn, edit=partial(make.matrix, turn), turned=turned, expected=expected)
    sar = (
        "h264.mp4", "hevc.mp4", "av1.mp4", "mpeg4.mp4", "h264.mov", "h264.mkv", "vp9.webm", "h264.ts", "mpeg4.avi",
        "vp9.mp4", "h264.frag.mp4",
    )  # fmt: skip
    yield base("mpeg2.ts", kind="sar8_9", filters="setsar=8/9", aspect="8/9")  # 4:3
    for name in sar:
        for aspect in ("2/1", "8/9"):
            filter_ = f"setsar={aspect}"
            yield base(name, kind=f"sar{aspect.replace('/', '_')}", filters=filter_, aspect=aspect)
    wide = {"filters": "setsar=2/1", "aspect": "2/1"}
    for turn in ("rot90", "rot270"):
        edit = partial(make.matrix, turn)
        yield base("h264.mp4", kind=f"sar2_1-{turn}", edit=edit, turned=filters[turn], **wide)
    margins = (8, 16, 8, 16)
    inner = (HEIGHT - 16, WIDTH - 32)
    aperture = partial(make.clap, inner[1], inner[0])

    def turned_aperture(data: bytes) -> bytes:
        return make.matrix("rot90", aperture(data))

    for name in TABLED:
        yield base(name, kind="clap", edit=aperture, crop=margins)
    displayed = partial(make.displayed, inner[1], inner[0])
    yield base("h264.mp4", kind="clap-displayed", edit=lambda data: displayed(aperture(data)), crop=margins)
    yield base("h264.mp4", kind="clap-aside", edit=partial(make.clap, WIDTH - 32, HEIGHT, right=16), crop=(0, 32, 0, 0))
    yield base("h264.mp4", kind="clap-rot90", edit=turned_aperture, crop=margins, turned=filters["rot90"])
    yield base("h264.mp4", kind="clap-sar", edit=aperture, crop=margins, **wide)
    for name in ("h264.mkv", "hevc.mkv", "vp9.webm", "av1.mkv", "vp8.webm"):
        suffix = name.partition(".")[2]
        piped = f"-i {{}} -c copy -write_crc32 0 -live 1 -f {'matroska' if suffix == 'mkv' else 'webm'} {suffix}"
        for kind, cut in (("pixelcrop", margins), ("pixelcrop-aside", (16, 0, 0, 32))):
            yield base(name, kind=kind, more=(piped,), edit=partial(make.pixel_crop, cut), crop=cut)
    odd = {"packets": "equal odd-size"}
    for name, size in {
        "vp9.webm": (89, 121),
        "vp9.mp4": (128, 191),
        "av1.mp4": (89, 121),
        "mpeg4.mp4": (90, 121),
        "mjpeg.avi": (89, 121),
        "vp8.webm": (97, 161),
    }.items():
        yield base(name, kind="odd", size=size, expected=odd | ({"copy": "no-index"} if "vp8" in name else {}))
    for name in ("h264.mp4", "hevc.mp4", "h264.mkv"):
        encode = CODECS[name[:4]].replace("yuv420p", "yuv444p")
        yield base(name, kind="odd444", encode=encode, size=(89, 121), expected=odd)
    for name in COMMON:
        yield base(name, kind="size-not-16", size=(106, 162))
        yield base(name, kind="tall", size=(192, 112))


def _paff() -> bytes:
    """Return field-coded H.264, which no encoder here can write."""
    return b"".join(paff(make.paint(FRAMES, (HEIGHT, WIDTH))[..., 1]))


def fields() -> Iterator[Recipe]:
    """Interlaced pictures of every kind."""
    shown = {"player": "bwdif=mode=send_frame:deint=interlaced", "expected": INTERLACED}
    for order in ("tff", "bff"):
        encode = f"-pix_fmt yuv420p {X264}:bframes=2:{order}=1 -flags +ildct+ilme"
        for suffix in ("mp4", "mkv", "ts"):
            yield base(f"h264.{suffix}", kind=f"mbaff-{order}", encode=encode, **shown)
    for suffix in ("mp4", "ts"):
        more = (f"-r 25 -i {{}} -c copy {suffix}",)
        yield base("h264.h264", kind=f"paff-{suffix}", paint=_paff, more=more, **shown)
    for suffix in ("ts", "mpg", "mxf"):
        encode = CODECS["mpeg2"] + " -flags +ildct+ilme"
        yield base(f"mpeg2.{suffix}", kind="interlaced", encode=encode, filters="setfield=tff", **shown)


def _tagged(name: str, kind: str, matrix: str, range_: str, transfer: str = "bt709", pixels: str = "yuv420p") -> Recipe:
    """Return a recipe whose pictures have a matrix, a range and a transfer function, and say so."""
    primaries = "bt2020" if matrix == "bt2020nc" else matrix
    scale = f"scale=out_color_matrix={matrix.removesuffix('nc')}:out_range={range_},format={pixels}"
    params = f"setparams=colorspace={matrix}:range={range_}:color_primaries={primaries}:color_trc={transfer}"
    tags = f"-colorspace {matrix} -color_range {range_} -color_trc {transfer} -color_primaries {primaries}"
    encode = CODECS[name.partition(".")[0]].replace("yuv420p", pixels)
    return base(name, kind=kind, filters=f"{scale},{params}", encode=f"{encode} {tags}")


def colours() -> Iterator[Recipe]:
    """Ranges, matrices, depths and formats."""
    for name in ("h264.mp4", "h264.mkv", "hevc.mp4", "vp9.webm", "av1.mp4"):
        for matrix in ("bt709", "smpte170m", "bt2020nc", "bt470bg"):
            for range_ in ("tv", "pc"):
                yield _tagged(name, f"{matrix}-{range_}", matrix, range_)
    for name in ("h264.mp4", "hevc.mp4", "hevc.mkv", "vp9.webm"):
        for transfer in ("smpte2084", "arib-std-b67"):
            recipe = _tagged(name, transfer, "bt2020nc", "tv", transfer, "yuv420p10le")
            yield replace(recipe, pictures="numbers", expected=HDR)
    deep = {
        "yuv420p10le": ("h264.mp4", "h264.mkv", "hevc.mp4", "vp9.webm", "av1.mkv"),
        "yuv422p": ("h264.mp4", "hevc.mkv", "vp9.webm", "h264.ts"),
        "yuv444p": ("h264.mp4", "hevc.mp4", "vp9.webm", "av1.mp4", "h264.mkv"),
        "yuv422p10le": ("h264.mov", "hevc.mp4"),
        "yuv444p10le": ("hevc.mkv",),
    }
    for pixels, names in deep.items():
        for name in names:
            codec = name.partition(".")[0]
            yield base(name, kind=pixels, encode=CODECS[codec].replace("yuv420p", pixels))
    for suffix in ("mp4", "mkv"):
        rgb = X264.replace("libx264", "libx264rgb")
        yield base(f"h264.{suffix}", kind="rgb", encode=f"-pix_fmt rgb24 {rgb}", expected={"packets": "no-index"})
        yield base(f"h264.{suffix}", kind="gray", encode=f"-pix_fmt gray {X264}", filters="format=gray")
        yield base(f"mjpeg.{suffix}", kind="422", encode="-pix_fmt yuvj422p -c:v mjpeg -q:v 2")
    yield base("ffv1.mkv", kind="rgb", encode="-pix_fmt bgr0 -c:v ffv1")


def lengths() -> Iterator[Recipe]:
    """One and two frames, and files that break off or are damaged."""
    for name in (*COMMON, "h264.frag.mp4", "mjpeg.mp4"):
        for frames in (1, 2):
            yield base(name, kind=f"frames{frames}", frames=frames, numbers=tuple(range(frames)))
    for name in ("h264.mp4", "hevc.mp4", "h264.mkv", "vp9.webm", "h264.frag.mp4", "mpeg4.avi", "av1.mkv", "vp8.webm"):
        yield base(name, kind="truncated", edit=partial(make.cut_off, 0.6), expected=BROKEN)
    for name in ("h264.mp4", "hevc.mp4", "h264.mkv", "vp9.webm", "mpeg4.avi", "h264.mov", "av1.mp4"):
        expected = UNNOTICED if name[:3] in ("vp9", "av1") else BROKEN | LATE
        yield base(name, kind="spoiled", edit=make.spoiled, expected=expected)
        yield base(name, kind="zeroed", edit=make.zeroed, expected=BROKEN | LATE)


def sounds() -> Iterator[Recipe]:
    """Sound of every kind."""
    encoders = {"h264.mp4": "aac -b:a 96k", "h264.mkv": "libopus", "vp9.webm": "libopus", "h264.ts": "aac"}
    encoders |= {"h264.mov": "pcm_s16le", "mpeg4.avi": "libmp3lame", "hevc.mp4": "aac", "h264.frag.mp4": "aac"}
    for name, encode in encoders.items():
        yield base(name, kind="sound", sound=f"-c:a {encode}")
    yield base("h264.mp4", kind="sound-cut", sound="-c:a aac", more=("-ss 0.5 -i {} -c copy mp4",))
    yield base("h264.mp4", kind="sound-late", sound="-c:a aac", output="-output_ts_offset 0.4")


KINDS = (plain, clocks, trims, structures, shapes, fields, colours, lengths, sounds)


def recipes() -> list[Recipe]:
    """Return all recipes."""
    return [recipe for kind in KINDS for recipe in kind()]


SUITE = frozenset((
    "h264-mp4-plain", "h264-mkv-pause", "vp9-webm-tworates", "h264-frag-mp4-dropped", "hevc-mp4-jitter",
    "h264-mp4-rate1_2", "h264-mp4-rate30000_1001", "h264-ts-late", "h264-mp4-edit-front", "h264-mp4-edit-end",
    "hevc-mp4-edit-front-key", "h264-mp4-edit-two", "h264-mkv-cut-middle", "h264-mp4-cut-short",
    "hevc-mkv-cut-to-mp4", "h264-mp4-opengop", "hevc-mp4-opengop", "h264-mp4-pyramid", "hevc-mp4-inband",
    "h264-h264-joined-mp4", "h264-h264-untimed-mp4", "h264-mp4-rot90", "h264-mov-hflip", "av1-mp4-rot270",
    "h264-mp4-rot45", "vp9-webm-sar2_1", "h264-mp4-sar8_9", "h264-mp4-sar2_1-rot90", "h264-mp4-clap-rot90",
    "h264-mkv-pixelcrop", "vp9-webm-odd", "h264-mp4-mbaff-tff", "h264-mp4-bt709-pc", "hevc-mp4-smpte2084",
    "vp9-webm-arib-std-b67", "h264-mkv-yuv420p10le", "h264-mp4-yuv444p", "mpeg2-mp4-plain", "h264-mp4-frames1",
    "h264-mkv-truncated", "mpeg4-avi-plain", "h264-mp4-sound", "mpeg4-avi-sound", "vp9-webm-zeroed",
    "h264-mp4-opengop-cut-late",
))  # fmt: skip
"""Names of those that the suite runs; all the others run in ``make soak``."""
