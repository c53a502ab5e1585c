"""The GStreamer pipeline of each kind of camera, from the elements that a machine has.

One table holds Jetson's elements and those of every Linux; the first one in the registry is taken.
Nothing here imports GStreamer, so the pipelines of a Jetson can be built and read on any machine.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from fractions import Fraction
from types import MappingProxyType
from typing import TYPE_CHECKING

from edge_server.cameras.source_uri import NO_OPTIONS, parse_source_uri
from edge_server.cameras.v4l2 import VideoMode, device_mode
from edge_server.errors import SourceError

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from edge_server.cameras.source_uri import SourceOptions, SourceUri

    Registry = Callable[[str], bool]

# Only the newest frame waits, and no clock delays it.
SINK = "appsink name=frames max-buffers=1 drop=true sync=false"

# The names of a decoder in front of which damaged JPEGs are sorted out, and of another one.
JPEG_DECODER = "jpeg"
_HARDWARE_DECODER = "decoder"

# The name of the element whose output shows that the camera sends images.
DEPAYLOADER = "packets"

# Formats of `PixelFormat`; videoconvert passes each of them on untouched.
_FORMATS = "video/x-raw,format=(string){NV12,I420,YUY2,BGR,GRAY8}"

# By codec, the best first. `mjpeg` makes NVIDIA's decoder take JPEG.
_DECODERS: Mapping[str, tuple[str, ...]] = MappingProxyType(
    {
        "H264": (f"nvv4l2decoder name={_HARDWARE_DECODER}", "avdec_h264", "openh264dec"),
        "H265": (f"nvv4l2decoder name={_HARDWARE_DECODER}", "avdec_h265", "libde265dec"),
        "JPEG": (
            f"nvv4l2decoder name={JPEG_DECODER} mjpeg=1",
            f"jpegdec name={JPEG_DECODER}",
            f"avdec_mjpeg name={JPEG_DECODER}",
        ),
    }
)
CODEC_NAMES: Mapping[str, str] = MappingProxyType(
    {"H264": "H.264", "H265": "H.265", "JPEG": "JPEG"}
)
# Width and height at most, in px: `LARGEST_VIDEO_PX` by its shape. A decoder takes memory for up to
# 17 pictures of the size that a stream claims: a gigabyte for these.
SIZES = ((5440, 3072), (4096, 4096), (3072, 5440))


def _of_sizes(media: str) -> str:
    return ";".join(f"{media},width=(int)[1,{wide}],height=(int)[1,{high}]" for wide, high in SIZES)


# From RTP packets to what a decoder takes. Cameras may send SPS and PPS in the SDP only, and
# NVIDIA's decoder wants them in the stream: config-interval=-1 puts them before every key frame.
_DEPAYLOADERS: Mapping[str, str] = MappingProxyType(
    {
        "H264": f"rtph264depay name={DEPAYLOADER} ! h264parse config-interval=-1 "
        f"! {_of_sizes('video/x-h264')}",
        "H265": f"rtph265depay name={DEPAYLOADER} ! h265parse config-interval=-1 "
        f"! {_of_sizes('video/x-h265')}",
        "JPEG": f"rtpjpegdepay name={DEPAYLOADER}",
    }
)

# `flip` of a URI: the names of nvvidconv's flip-method and of videoflip's method differ.
_FLIPS: Mapping[str, tuple[int, str]] = MappingProxyType(
    {
        "rotate-90": (3, "clockwise"),
        "rotate-180": (2, "rotate-180"),
        "rotate-270": (1, "counterclockwise"),
        "horizontal": (4, "horizontal-flip"),
        "vertical": (6, "vertical-flip"),
    }
)

# The Debian and Ubuntu package of an element, by the beginning of its name.
_PACKAGES = (
    ("nv", "nvidia-l4t-gstreamer (JetPack's own)"),
    ("avdec_", "gstreamer1.0-libav"),
    ("h26", "gstreamer1.0-plugins-bad"),
    ("openh264", "gstreamer1.0-plugins-bad"),
    ("video", "gstreamer1.0-plugins-base"),
    ("app", "gstreamer1.0-plugins-base"),
    ("", "gstreamer1.0-plugins-good"),
)


@dataclass(frozen=True)
class CameraPipeline:
    """A pipeline in the notation of gst-launch-1.0; the appsink `frames` is its last element.

    Attributes:
        text: without user, password and address. For RTSP it ends with the source.
        properties: of elements by their names: what no text may have, or what would need quoting.
        where_known: names of flags that are set where the version of an element has them, by the
            elements' names; also of those of `branch`.
        branch: of RTSP: returns the elements behind the source for a codec, or raises SourceError.
    """

    text: str
    properties: Mapping[str, Mapping[str, str]] = field(default_factory=dict, repr=False)
    where_known: Mapping[str, str] = field(default_factory=dict)
    branch: Callable[[str], str] | None = None

    def whole(self, codec: str = "H264") -> str:
        """Return the text from the camera to the appsink."""
        return self.text if self.branch is None else f"{self.text} ! {self.branch(codec)}"


def pipeline_of(
    uri: SourceUri,
    options: SourceOptions,
    has: Registry,
    mode_of: Callable[[SourceUri], VideoMode] = device_mode,
) -> CameraPipeline:
    """Return the pipeline that reads `uri`.

    Args:
        uri: of a live camera.
        options: its credentials, where the URI has none.
        has: whether the registry has an element.
        mode_of: finds the mode of a video device.

    Raises:
        SourceError: an element is missing, or the device has no such mode.
    """
    given = uri.credentials or options.credentials
    login = {} if given is None else {"user-id": given.user, "user-pw": given.password}
    match uri.scheme:
        case "csi":
            return _csi(uri, has)
        case "v4l2":
            return _v4l2(uri, mode_of(uri), has)
        case "rtsp" | "rtsps":
            return _rtsp(uri, login, has)
        case "http" | "https":
            return _http(uri, login, has)
    # A person's own; its last pad has video in system memory, a rotation in its tags is obeyed.
    _need(has, "videoflip")
    return CameraPipeline(
        f"{uri.path} ! {_untouched(has)} ! videoflip video-direction=auto ! {SINK}"
    )


def _csi(uri: SourceUri, has: Registry) -> CameraPipeline:
    """Return the pipeline of a camera on the CSI connector: the image signal processor scales it.
    A sensor's mode has a size and a rate."""
    _need(has, "nvarguscamerasrc", "nvvidconv")
    query, mode, caps = uri.query, "", ["video/x-raw(memory:NVMM)"]
    if "mode" in query:
        mode = f" sensor-mode={uri.whole('mode', 0, 0, 99)}"
    if not mode or "width" in query:
        caps.append(f"width={query.get('width', 1920)},height={query.get('height', 1080)}")
    if not mode or "fps" in query:
        fps = Fraction(uri.fps() or 30).limit_denominator(1001)
        caps.append(f"framerate={fps.numerator}/{fps.denominator}")
    caps.append("format=NV12")
    return CameraPipeline(
        f"nvarguscamerasrc name=source sensor-id={int(uri.host)}{mode} ! {','.join(caps)} "
        f"! {_converter(has, flip_of(uri))} ! {SINK}"
    )


def _v4l2(uri: SourceUri, mode: VideoMode, has: Registry) -> CameraPipeline:
    """Return the pipeline of a video device in one of its modes."""
    _need(has, "v4l2src")
    stages, flip = ["v4l2src name=source io-mode=2 do-timestamp=true", mode.caps], flip_of(uri)
    if mode.format == "JPEG":
        stages += [decoder("JPEG", has), _converter(has, flip)]
    else:
        # The memory of a raw frame is the device's own: no hardware saves anything.
        stages += [_untouched(has), *([_converter(has, flip)] if flip else [])]
    return CameraPipeline(" ! ".join([*stages, SINK]), {"source": {"device": uri.path}})


def _rtsp(uri: SourceUri, login: dict[str, str], has: Registry) -> CameraPipeline:
    """Return the pipeline of an RTSP camera; its codec is known when the camera has described it.

    `buffer-mode=none` keeps the pace of the RTP timestamps: the default one bends them towards the
    arrival, so that a backlog looks fresh.
    """
    _need(has, "rtspsrc")
    text = (
        f"rtspsrc name=source protocols={uri.query.get('transport', 'tcp')} latency=100 "
        "drop-on-latency=true buffer-mode=none tcp-timeout=3000000"
    )
    if uri.scheme == "rtsps":
        text += " tls-validation-flags=0"  # cameras sign their own certificates

    def branch(codec: str) -> str:
        packets = _DEPAYLOADERS.get(codec)
        if packets is None:
            known = ", ".join(CODEC_NAMES.values())
            raise SourceError(
                f"the camera sends {codec}; set it to one of {known}", reason="no_decoder"
            )
        elements = [part.split()[0] for part in packets.split(" ! ")]
        _need(has, *(name for name in elements if "/" not in name))
        return f"{packets} ! {decoder(codec, has)} ! {_converter(has)} ! {SINK}"

    return CameraPipeline(
        text,
        {"source": {"location": uri.address("transport"), **login}},
        # The camera's NTP time of each frame; since GStreamer 1.22, so not on JetPack 6. And the
        # clock of NVIDIA's decoder at its highest.
        {"source": "add-reference-timestamp-meta", _HARDWARE_DECODER: "enable-max-performance"},
        branch,
    )


def _http(uri: SourceUri, login: dict[str, str], has: Registry) -> CameraPipeline:
    """Return the pipeline of a camera that sends JPEGs over HTTP (multipart/x-mixed-replace).

    Redirects are not followed: libsoup gives the password to any host that asks for it.
    """
    _need(has, "souphttpsrc", "multipartdemux")
    strict = " ssl-strict=false" if uri.scheme == "https" else ""
    text = (
        "souphttpsrc name=source is-live=true do-timestamp=true timeout=5 retries=0 "
        f"automatic-redirect=false{strict} "
        "! multipartdemux single-stream=true ! image/jpeg "
        f"! {decoder('JPEG', has)} ! {_converter(has)} ! {SINK}"
    )
    return CameraPipeline(text, {"source": {"location": uri.address(), **login}})


def decoder(codec: str, has: Registry) -> str:
    """Return the first decoder of `codec` that the registry has.

    Raises:
        SourceError: none; the text names the package.
    """
    element = first_decoder(codec, has)
    if element:
        return next(each for each in _DECODERS[codec] if each.split()[0] == element)
    # The first is of a Jetson, the second of every Linux.
    raise SourceError(
        f"no decoder for {CODEC_NAMES[codec]}; on a Jetson: apt install nvidia-l4t-gstreamer, "
        f"elsewhere: apt install {_package_of(_DECODERS[codec][1])}",
        reason="no_decoder",
    )


def first_decoder(codec: str, has: Registry) -> str:
    """Return the name of the decoder that is taken; "" where the registry has none."""
    return next((name for each in _DECODERS[codec] if has(name := each.split()[0])), "")


def missing_elements(scheme: str, has: Registry) -> str:
    """Return why cameras of `scheme` cannot be read; empty where all elements are there."""
    uri = parse_source_uri(
        {"csi": "csi://0", "v4l2": "/dev/video0", "gst": "gst:it"}.get(scheme, f"{scheme}://it/")
    )
    jpegs = VideoMode("JPEG", (640, 480), Fraction(30))
    try:
        pipeline = pipeline_of(uri, NO_OPTIONS, has, lambda _: jpegs)
        pipeline.whole("H264")
        pipeline.whole("H265")
        _need(has, "appsink")
    except SourceError as error:
        return str(error)
    return ""


def _package_of(element: str) -> str:
    """Return the Debian or Ubuntu package that has `element`."""
    return next(package for start, package in _PACKAGES if element.startswith(start))


def flip_of(uri: SourceUri) -> str:
    """Return the value of `flip`, one of `_FLIPS`; "" if absent.

    Raises:
        SourceUriError: the value is none of them.
    """
    text = uri.query.get("flip", "")
    if text and text not in _FLIPS:
        raise uri.wrong(f"flip is {text!r}; write one of {', '.join(_FLIPS)}")
    return text


def _converter(has: Registry, flip: str = "") -> str:
    """Return the elements between a decoder and the appsink: NVIDIA's decoder gives frames in
    memory that only nvvidconv reads; it flips in hardware, too."""
    if has("nvvidconv"):
        method = f" flip-method={_FLIPS[flip][0]}" if flip else ""
        return f"nvvidconv{method} ! video/x-raw,format=NV12"
    if not flip:
        return _untouched(has)
    _need(has, "videoflip")
    return f"{_untouched(has)} ! videoflip method={_FLIPS[flip][1]}"


def _untouched(has: Registry) -> str:
    _need(has, "videoconvert")
    return f"videoconvert ! {_FORMATS}"


def _need(has: Registry, *elements: str) -> None:
    lacking = [element for element in elements if not has(element)]
    if not lacking:
        return
    packages = " ".join(sorted({_package_of(element) for element in lacking}))
    where = "; a CSI camera needs a Jetson" if "nvarguscamerasrc" in lacking else ""
    raise SourceError(
        f"GStreamer has no {', '.join(lacking)}{where}; apt install {packages}", reason="no_decoder"
    )
