"""What GStreamer reports, in words: a cause, the next step, and the reason word of SourceError."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

from edge_server.errors import SourceError
from edge_server.process.masking import masked

if TYPE_CHECKING:
    from collections.abc import Callable

# By domain and code (gsterror.h), as texts differ between versions and languages.
_RESOURCE = "gst-resource-error-quark"
_STREAM = "gst-stream-error-quark"
_CORE = "gst-core-error-quark"
_NOT_FOUND, _BUSY, _SETTINGS, _NO_SPACE, _NOT_AUTHORIZED = 3, 4, 13, 14, 15
_NO_CODEC, _DECODE = 6, 7
_NEGOTIATION, _MISSING_PLUGIN = 7, 12
_HTTP_UNAUTHORIZED, _HTTP_NOT_FOUND = (401, 403), 404


@dataclass(frozen=True)
class BusMessage:
    """One message of a pipeline's bus, as far as a reader needs it.

    Attributes:
        kind: `status` is the code of an HTTP response, 0 where none came; `silence` is rtspsrc's
            own finding that a camera sends nothing any more.
        domain: the error domain, as "gst-resource-error-quark".
        text: of GStreamer; may quote the pipeline.
        debug: of GStreamer, for logs only.
    """

    kind: Literal["error", "warning", "end", "status", "silence"]
    domain: str = ""
    code: int = 0
    text: str = ""
    debug: str = ""

    @property
    def is_corruption(self) -> bool:
        """A decoder could not decode a part of the stream."""
        return self.domain == _STREAM and self.code == _DECODE


@dataclass(frozen=True)
class CameraPlace:
    """Which camera a message is about.

    Attributes:
        scheme: csi, v4l2, rtsp, rtsps, http, https or gst.
        label: see `SourceUri`.
        device: the path of a video device.
        probe: of a network camera: finds out why it cannot be opened, where GStreamer does not say.
    """

    scheme: str
    label: str
    device: str = ""
    probe: Callable[[], SourceError] | None = None

    def error(self, text: str, reason: str) -> SourceError:
        return SourceError(f"{self.label}: {masked(text)}", reason=reason)


def fault_of(place: CameraPlace, message: BusMessage, *, running: bool) -> SourceError:
    """Return the error that `message` stands for.

    Args:
        place: of the camera.
        message: an `error`, the `end` of a live camera, a `status` or `silence`.
        running: the camera has delivered frames.
    """
    match message.kind:
        case "end":
            again = "it is opened again" if running else "look at it with another player"
            return place.error(f"the camera closed the stream; {again}", "lost")
        case "silence":
            return place.error("the camera sends nothing any more; it is opened again", "stalled")
        case "status":
            return _http(place, message.code)
    return _decoder(place, message) or _of_scheme(place, message, running=running)


def _decoder(place: CameraPlace, message: BusMessage) -> SourceError | None:
    """Return the error of a stream that cannot be decoded; None for other messages."""
    if message.domain == _CORE and message.code == _MISSING_PLUGIN:
        return place.error(
            f"{_sentence(message.text)}; on a Jetson: apt install nvidia-l4t-gstreamer, "
            "elsewhere: apt install gstreamer1.0-plugins-good gstreamer1.0-plugins-bad "
            "gstreamer1.0-libav",
            "no_decoder",
        )
    if message.domain == _STREAM and message.code == _NO_CODEC:
        return place.error(
            f"{_sentence(message.text)}; apt install gstreamer1.0-libav", "no_decoder"
        )
    if message.is_corruption:
        return place.error(
            "the stream cannot be decoded; look at it with another player", "corrupt"
        )
    return None


def _of_scheme(place: CameraPlace, message: BusMessage, *, running: bool) -> SourceError:
    match place.scheme:
        case "v4l2":
            return _device(place, message, running=running)
        case "csi":
            return _argus(place, message)
        case "gst":
            return place.error(_own(message), "lost" if running else "unavailable")
        case _:
            return _network(place, message, running=running)


def _network(place: CameraPlace, message: BusMessage, *, running: bool) -> SourceError:
    code = message.code if message.domain == _RESOURCE else 0
    if code == _NOT_AUTHORIZED:
        return place.error(
            "user name or password refused; check the camera's credentials", "unauthorized"
        )
    if code == _NOT_FOUND:
        return place.error(
            "the camera has no such stream; check the path of the address", "not_found"
        )
    if running:
        return place.error("the connection to the camera broke; it is opened again", "lost")
    return _probed(place)


def _probed(place: CameraPlace) -> SourceError:
    if place.probe is None:
        return place.error("the camera cannot be opened; look at it with another player", "lost")
    return place.probe()


def _http(place: CameraPlace, status: int) -> SourceError:
    if status in _HTTP_UNAUTHORIZED:
        return place.error(
            "user name or password refused; check the camera's credentials", "unauthorized"
        )
    if status == _HTTP_NOT_FOUND:
        return place.error(
            "the camera has no such stream; check the path of the address", "not_found"
        )
    if status:
        return place.error(f"the camera responds with HTTP status {status}", "unavailable")
    return _probed(place)


def _device(place: CameraPlace, message: BusMessage, *, running: bool) -> SourceError:
    device = place.device
    code = message.code if message.domain == _RESOURCE else 0
    if running:
        # The reason is in GStreamer's own log only.
        return place.error(
            "the device gives no frames any more; it was unplugged, or sudo dmesg | tail says why",
            "lost",
        )
    if code == _BUSY or "busy" in message.debug:
        return place.error(
            f"another program uses the device; see which: fuser -v {device}", "unavailable"
        )
    if "Permission denied" in message.debug:
        return place.error(
            f"this user may not open {device}; sudo usermod -aG video USER, then log in again",
            "unauthorized",
        )
    if code == _NOT_FOUND:
        return place.error(
            f"no device {device}; see what is there: edge-server cameras list", "not_found"
        )
    if code in (_SETTINGS, _NO_SPACE):
        return place.error(
            "the driver does not start its stream; if the USB bus has no bandwidth left: use MJPEG "
            "(?format=mjpeg), a lower rate (?fps=15) or another USB controller; sudo dmesg | tail "
            "says more",
            "unavailable",
        )
    return place.error(
        f"{_sentence(message.text)}; sudo dmesg | tail says what the driver reports", "unavailable"
    )


def _argus(place: CameraPlace, message: BusMessage) -> SourceError:
    return place.error(
        f"{_sentence(message.text)}; is the sensor connected and in the device tree (dmesg | grep "
        "-i imx)? After a crash: sudo systemctl restart nvargus-daemon; where that does not help, "
        "reboot",
        "unavailable" if message.code == _NOT_FOUND else "lost",
    )


def _own(message: BusMessage) -> str:
    if message.domain == _CORE and message.code == _NEGOTIATION:
        return (
            f"{_sentence(message.text)}; the pipeline has to end in raw video in system memory, on "
            "a Jetson: … ! nvvidconv ! video/x-raw"
        )
    return f"{_sentence(message.text)}; try it: gst-launch-1.0 PIPELINE ! fakesink"


def _sentence(text: str) -> str:
    return text.strip().rstrip(".") or "GStreamer gives no reason"
