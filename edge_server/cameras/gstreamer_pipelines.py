"""The GStreamer pipeline of each kind of camera, from the elements that a machine has.

One table holds Jetson's elements and those of every Linux; the first one in the registry is taken.
Nothing here imports GStreamer, so the pipelines of a Jetson can be built and read on any machine.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from fractions import Fraction
from types import MappingProxyType
from typing import TYPE_CHECKING

from edge_server.errors import SourceError, SourceUriError

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from edge_server.cameras.source_uri import SourceUri
    from edge_server.cameras.v4l2 import VideoMode

    Registry = Callable[[str], bool]

# Only the newest frame waits, and no clock delays it.
SINK = "appsink name=frames max-buffers=1 drop=true sync=false"

# The name of a decoder in front of which damaged JPEGs are sorted out.
JPEG_DECODER = "jpeg"

# The name of the element whose output shows that the camera sends images.
DEPAYLOADER = "packets"

# The name of the element that holds an image over HTTP until it has come whole.
DEMULTIPLEXER = "parts"

# Formats of `PixelFormat`; videoconvert passes each of them on untouched.
_FORMATS = "video/x-raw,format=(string){NV12,I420,YUY2,BGR,GRAY8}"

# A CSI sensor's mode where the URI names none.
_CSI_WIDTH, _CSI_HEIGHT, _CSI_FPS = 1920, 1080, Fraction(30)

# By codec, the best first. The properties are of NVIDIA's decoder: its clock stays at the highest,
# and `mjpeg` makes it take JPEG.
_DECODERS: Mapping[str, tuple[str, ...]] = MappingProxyType(
    {
        "H264": ("nvv4l2decoder enable-max-performance=1", "avdec_h264", "openh264dec"),
        "H265": ("nvv4l2decoder enable-max-performance=1", "avdec_h265", "libde265dec"),
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
# Of 8K, upright too. A decoder takes memory for up to 17 pictures of the size that a stream claims.
_SIZES = "width=(int)[1,8192],height=(int)[1,8192]"
# From RTP packets to what a decoder takes. Cameras may send SPS and PPS in the SDP only, and
# NVIDIA's decoder wants them in the stream: config-interval=-1 puts them before every key frame.
_DEPAYLOADERS: Mapping[str, str] = MappingProxyType(
    {
        "H264": f"rtph264depay name={DEPAYLOADER} ! h264parse config-interval=-1 "
        f"! video/x-h264,{_SIZES}",
        "H265": f"rtph265depay name={DEPAYLOADER} ! h265parse config-interval=-1 "
        f"! video/x-h265,{_SIZES}",
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
class PictureOptions:
    """What the URI of a camera on this machine says; 0 and "" leave it to the camera.

    Attributes:
        width: in px; together with `height`.
        fps: of the camera.
        flip: one of `_FLIPS`.
        mode: of a CSI sensor; None lets Argus choose.
    """

    width: int = 0
    height: int = 0
    fps: Fraction = Fraction(0)
    flip: str = ""
    mode: int | None = None


@dataclass(frozen=True)
class CameraPipeline:
    """A pipeline in the notation of gst-launch-1.0; the appsink `frames` is its last element.

    Attributes:
        text: without user, password and address. For RTSP it ends with the source.
        properties: of elements by their names: what no text may have, or what would need quoting.
        where_known: names of flags that are set where the version of an element has them, by the
            elements' names.
        branch: of RTSP: returns the elements behind the source for a codec, or raises SourceError.
    """

    text: str
    properties: Mapping[str, Mapping[str, str]] = field(default_factory=dict, repr=False)
    where_known: Mapping[str, str] = field(default_factory=dict)
    branch: Callable[[str], str] | None = None

    def whole(self, codec: str = "H264") -> str:
        """Return the text from the camera to the appsink."""
        return self.text if self.branch is None else f"{self.text} ! {self.branch(codec)}"


def csi_pipeline(sensor: int, picture: PictureOptions, has: Registry) -> CameraPipeline:
    """Return the pipeline of a camera on the CSI connector: the image signal processor scales it.

    Raises:
        SourceError: this machine is no Jetson, or lacks its plugins.
    """
    _need(has, "nvarguscamerasrc", "nvvidconv")
    width, height = picture.width or _CSI_WIDTH, picture.height or _CSI_HEIGHT
    mode = "" if picture.mode is None else f" sensor-mode={picture.mode}"
    size = f"width={width},height={height}" if picture.mode is None or picture.width else ""
    fps = picture.fps or _CSI_FPS
    rate = f"framerate={rate_of(fps)}" if picture.mode is None or picture.fps else ""
    parts = ("video/x-raw(memory:NVMM)", size, rate, "format=NV12")
    caps = ",".join(part for part in parts if part)
    out = _converter(has, picture.flip)
    return CameraPipeline(
        f"nvarguscamerasrc name=source sensor-id={sensor}{mode} ! {caps} ! {out} ! {SINK}"
    )


def v4l2_pipeline(
    device: str, mode: VideoMode, picture: PictureOptions, has: Registry
) -> CameraPipeline:
    """Return the pipeline of a video device in one of its modes.

    Raises:
        SourceError: no decoder or plugin.
    """
    _need(has, "v4l2src")
    stages = ["v4l2src name=source io-mode=2 do-timestamp=true", mode.caps]
    if mode.format == "JPEG":
        stages += [decoder("JPEG", has), _converter(has, picture.flip)]
    else:
        # The memory of a raw frame is the device's own: no hardware saves anything.
        stages.append(_untouched(has))
        if picture.flip:
            stages.append(_converter(has, picture.flip))
    return CameraPipeline(" ! ".join([*stages, SINK]), {"source": {"device": device}})


def rtsp_pipeline(
    location: str,
    login: tuple[str, str] | None,
    has: Registry,
    *,
    transport: str = "tcp",
) -> CameraPipeline:
    """Return the pipeline of an RTSP camera; its codec is known when the camera has described it.

    `buffer-mode=none` keeps the pace of the RTP timestamps: the default one bends them towards the
    arrival, so that a backlog looks fresh.

    Raises:
        SourceError: no plugin.
    """
    _need(has, "rtspsrc")
    text = (
        f"rtspsrc name=source protocols={transport} latency=100 drop-on-latency=true "
        "buffer-mode=none tcp-timeout=3000000"
    )
    if location.startswith("rtsps:"):
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
        {"source": {"location": location, **_login(login)}},
        # The camera's NTP time of each frame; since GStreamer 1.22, so not on JetPack 6.
        {"source": "add-reference-timestamp-meta"},
        branch,
    )


def http_pipeline(location: str, login: tuple[str, str] | None, has: Registry) -> CameraPipeline:
    """Return the pipeline of a camera that sends JPEGs over HTTP (multipart/x-mixed-replace).

    Redirects are not followed: libsoup gives the password to any host that asks for it.

    Raises:
        SourceError: no decoder or plugin.
    """
    _need(has, "souphttpsrc", "multipartdemux")
    strict = " ssl-strict=false" if location.startswith("https:") else ""
    text = (
        "souphttpsrc name=source is-live=true do-timestamp=true timeout=5 retries=0 "
        f"automatic-redirect=false{strict} "
        f"! multipartdemux name={DEMULTIPLEXER} single-stream=true ! image/jpeg "
        f"! {decoder('JPEG', has)} ! {_converter(has)} ! {SINK}"
    )
    return CameraPipeline(text, {"source": {"location": location, **_login(login)}})


def own_pipeline(text: str, has: Registry) -> CameraPipeline:
    """Return a person's own pipeline, whose last pad has video in system memory; a rotation among
    its tags is obeyed."""
    _need(has, "videoflip")
    return CameraPipeline(f"{text} ! {_untouched(has)} ! videoflip video-direction=auto ! {SINK}")


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
        f"elsewhere: apt install {package_of(_DECODERS[codec][1])}",
        reason="no_decoder",
    )


def first_decoder(codec: str, has: Registry) -> str:
    """Return the name of the decoder that is taken; "" where the registry has none."""
    return next((name for each in _DECODERS[codec] if has(name := each.split()[0])), "")


def missing_elements(scheme: str, has: Registry) -> str:
    """Return why cameras of `scheme` cannot be read; empty where all elements are there."""
    try:
        match scheme:
            case "csi":
                csi_pipeline(0, PictureOptions(), has)
            case "v4l2":
                _need(has, "v4l2src")
                _converter(has)
                decoder("JPEG", has)
            case "rtsp" | "rtsps":
                pipeline = rtsp_pipeline("", None, has)
                pipeline.whole("H264")
                pipeline.whole("H265")
            case "http" | "https":
                http_pipeline("", None, has)
            case _:
                own_pipeline("", has)
        _need(has, "appsink")
    except SourceError as error:
        return str(error)
    return ""


def rate_of(fps: Fraction) -> str:
    """Return a frame rate as caps write it."""
    return f"{fps.numerator}/{fps.denominator}"


def package_of(element: str) -> str:
    """Return the Debian or Ubuntu package that has `element`."""
    return next(package for start, package in _PACKAGES if element.startswith(start))


def flip_of(uri: SourceUri) -> str:
    """Return the value of `flip`, one of `_FLIPS`; "" if absent.

    Raises:
        SourceUriError: the value is none of them.
    """
    text = uri.query.get("flip", "")
    if text and text not in _FLIPS:
        raise SourceUriError(f"{uri.label}: flip is {text!r}; write one of {', '.join(_FLIPS)}")
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
    packages = " ".join(sorted({package_of(element) for element in lacking}))
    where = "; a CSI camera needs a Jetson" if "nvarguscamerasrc" in lacking else ""
    raise SourceError(
        f"GStreamer has no {', '.join(lacking)}{where}; apt install {packages}", reason="no_decoder"
    )


def _login(login: tuple[str, str] | None) -> Mapping[str, str]:
    return {} if login is None else {"user-id": login[0], "user-pw": login[1]}
