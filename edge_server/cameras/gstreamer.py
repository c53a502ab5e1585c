"""GStreamer as the reader of live cameras.

`open_gstreamer` opens one, `gstreamer_missing` says why that cannot work here. The files beside
this one: `gstreamer_pipelines` (the table), `gstreamer_modes` (what a video device offers),
`gstreamer_player` and `gstreamer_frames` (which touch GStreamer), `gstreamer_source` (deadlines),
`gstreamer_timestamps`, and `gstreamer_faults` (words).
"""

from __future__ import annotations

import logging
import sys
import time
from fractions import Fraction
from functools import partial
from typing import TYPE_CHECKING, Any, Literal

from edge_server.board.installation import remedy
from edge_server.cameras.frame import Frame, TimestampMapper
from edge_server.cameras.gstreamer_frames import load_gstreamer
from edge_server.cameras.gstreamer_pipelines import (
    CODEC_NAMES,
    V4L2_FORMATS,
    CameraPipeline,
    PictureOptions,
    best_mode,
    csi_pipeline,
    first_decoder,
    flip_of,
    http_pipeline,
    missing_elements,
    own_pipeline,
    parse_modes,
    rtsp_pipeline,
    v4l2_pipeline,
)
from edge_server.cameras.gstreamer_player import (
    CameraPlace,
    GstreamerPlayer,
    fault_of,
    offered_caps,
    registry_has,
)
from edge_server.cameras.network import PORTS, addresses_of, find_fault
from edge_server.errors import SourceError, SourceUriError
from edge_server.process.logs import log_once
from edge_server.process.masking import masked

if TYPE_CHECKING:
    from collections.abc import Callable

    from edge_server.cameras.frame import FrameSource
    from edge_server.cameras.gstreamer_frames import PulledFrame
    from edge_server.cameras.gstreamer_player import BusMessage, Player
    from edge_server.cameras.source_uri import SourceOptions, SourceUri

log = logging.getLogger(__name__)

# The longest wait in GStreamer before its messages are read.
_PULL_S = 0.1
_FIRST_FRAME_S = 8.0
# A camera is stalled after this, or after so many periods of its rate, whichever is longer. Its
# frames would come in a burst afterwards and look fresh, so it is opened again.
_GAP_S = 0.5
_GAP_PERIODS = 3
# How long images may come that cannot be decoded, or are damaged: a lost packet damages them up to
# the next key frame, which cameras send every second or two.
_CORRUPT_S = 3.0
# A driver stamps a frame at the end of its exposure and transfer; Argus after its own queue.
_LATE_PERIODS = {"v4l2": 1, "csi": 3}


class GstreamerSource:
    """Reads a camera through a pipeline; a FrameSource.

    The first frame is read by the constructor, so that a camera that cannot be opened raises there.
    Damaged frames are counted and not delivered.

    Attributes:
        size_changes: number of times that the camera changed the size or the format of its images.

    Args:
        player: runs the pipeline; closed by `close`, and by the constructor where it raises.
        place: names the camera in errors.
        clock: the meaning of the pipeline's timestamps, see `TimestampMapper`.
        monotonic_ns: CLOCK_MONOTONIC.
        epoch_ns: Unix time.

    Raises:
        SourceError: no frame came.
    """

    def __init__(
        self,
        player: Player,
        place: CameraPlace,
        clock: Literal["sensor", "rtp", "arrival"],
        *,
        monotonic_ns: Callable[[], int] = time.monotonic_ns,
        epoch_ns: Callable[[], int] = time.time_ns,
    ) -> None:
        self._corrupt = 0
        self.size_changes = 0
        self._player = player
        self._place = place
        self._stamps = TimestampMapper(clock)
        self._monotonic_ns = monotonic_ns
        self._epoch_ns = epoch_ns
        self._arrived = 0
        self._count = 0
        self._form: tuple[object, int, int] | None = None
        self._period_s = 0.0
        self._closed = False
        self._ended = False
        self._opened_ns = self._last_arrival_ns = self._last_good_ns = monotonic_ns()
        try:
            self._first = self._next()
        except BaseException:
            self.close()
            raise
        if self._first is None:
            self.close()
            raise place.error("the pipeline ends without a frame", "unavailable")

    @property
    def corrupt(self) -> int:
        """Number of damaged frames, and of parts of the stream that could not be decoded."""
        return self._corrupt + self._player.damaged

    def read(self) -> Frame | None:
        first, self._first = self._first, None
        return self._next() if first is None else first

    def close(self) -> None:
        if not self._closed:
            self._closed = True
            self._player.close()

    def _next(self) -> Frame | None:
        if self._closed:
            raise self._place.error("the camera is closed", "lost")
        while not self._ended:
            self._read_messages()
            pulled = self._player.pull(_PULL_S)
            now_ns = self._monotonic_ns()
            if pulled is None:
                self._check_deadline(now_ns)
                continue
            frame = self._delivered(pulled, now_ns)
            if frame is not None:
                return frame
        return None

    def _read_messages(self) -> None:
        for message in self._messages():
            running = self._count > 0
            if message.kind == "end" and not self._player.live:
                # The sink reports its end once its last frame has been pulled.
                self._ended = True
            elif message.kind == "warning":
                self._corrupt += message.is_corruption
                log.debug("%s: %s (%s)", self._place.label, message.text, message.debug)
            elif message.kind != "status" or message.code == 0 or message.code >= 400:
                log.debug("%s: %s (%s)", self._place.label, message.text, message.debug)
                raise fault_of(self._place, message, running=running)

    def _messages(self) -> list[BusMessage]:
        try:
            messages = list(self._player.messages())
        except SourceError as error:
            raise self._place.error(str(error), error.reason) from error
        # The response of an HTTP server says more than the error that it leads to.
        return sorted(messages, key=lambda message: message.kind != "status")

    def _check_deadline(self, now_ns: int) -> None:
        """Raise where images have not come for too long, or come and cannot be used."""
        if self._player.arrived > self._arrived:
            self._arrived = self._player.arrived
            self._last_arrival_ns = now_ns
        if self._form is None and not self._player.damaged:
            if now_ns - self._opened_ns > _FIRST_FRAME_S * 1e9:
                raise self._place.error(
                    f"no frame within {_FIRST_FRAME_S:g} s, though the camera was opened; "
                    "restart the camera, or look at it with another player",
                    "unavailable",
                )
            return
        waited_s = (now_ns - self._last_arrival_ns) / 1e9
        if self._form and waited_s > max(_GAP_S, _GAP_PERIODS * self._period_s):
            raise self._place.error(
                f"no frame for {waited_s:.1f} s; the camera is opened again", "stalled"
            )
        if now_ns - self._last_good_ns > _CORRUPT_S * 1e9:
            raise self._place.error(
                f"images came for {_CORRUPT_S:g} s, all of them damaged; check cable and network "
                "for lost packets, and the camera's bit rate",
                "corrupt",
            )

    def _delivered(self, pulled: PulledFrame, now_ns: int) -> Frame | None:
        """Return the frame; None where it is damaged."""
        gap_s = (now_ns - self._last_arrival_ns) / 1e9
        self._last_arrival_ns = now_ns
        self._arrived = self._player.arrived
        self._note_form(pulled, gap_s)
        capture = self._stamps.map(now_ns, pulled.stamp_ns, pulled.ntp_ns)
        if pulled.corrupt:
            self._corrupt += 1
            self._check_deadline(now_ns)
            return None
        self._last_good_ns = now_ns
        self._count += 1
        late_periods = _LATE_PERIODS.get(self._place.scheme, 0) if capture.clock == "sensor" else 0
        return Frame(
            self._count - 1,
            pulled.image,
            capture.mono_ns,
            self._epoch_ns() - (now_ns - capture.mono_ns),
            capture.clock,
            int(late_periods * self._period_s * 1e9),
        )

    def _note_form(self, pulled: PulledFrame, gap_s: float) -> None:
        image = pulled.image
        form = (image.pixel_format, image.width, image.height)
        if form != self._form:
            if self._form is not None:
                self.size_changes += 1
                log.warning(
                    "%s: the camera changed to %d x %d %s",
                    self._place.label,
                    image.width,
                    image.height,
                    image.pixel_format.value,
                )
            else:
                self._last_good_ns = self._last_arrival_ns
            self._form = form
        if pulled.period_ns:
            self._period_s = pulled.period_ns / 1e9
        elif self._count:
            # Of cameras that do not state a rate: the mean gap of about ten frames.
            self._period_s += (gap_s - self._period_s) / min(self._count, 10)


_CLOCKS = {"csi": "sensor", "v4l2": "sensor", "rtsp": "rtp", "rtsps": "rtp"}


def gstreamer_missing(scheme: str = "") -> str:
    """Return why GStreamer cannot read here, with the packages to install; "" if it can.

    The packages have the same names on Debian 12 and on JetPack 6 and 7.

    Args:
        scheme: also require the elements for cameras of this kind.
    """
    try:
        load_gstreamer()
    except ModuleNotFoundError as error:
        if error.name != "gi":
            raise
        version = "{}.{}".format(*sys.version_info)
        return f"PyGObject is not there for Python {version}; {remedy('gi')}"
    except ImportError as error:
        return f"PyGObject cannot be imported: {error}; {remedy('gi')}"
    except ValueError as error:
        return f"GStreamer's bindings are incomplete: {error}; {remedy('gi')}"
    if not registry_has("appsink"):
        return "GStreamer has no appsink; apt install gstreamer1.0-plugins-base"
    return missing_elements(scheme, registry_has) if scheme else ""


def decodes_jpeg_in_hardware() -> bool:
    """Return whether GStreamer, which is there, has an element for it."""
    return first_decoder("JPEG", registry_has).startswith("nv")


def report() -> dict[str, Any]:
    """Return what `edge-server doctor` reports.

    GStreamer's `version`, the `decoders` by codec, and what each kind of camera is `lacking`; or
    `missing`, and the `reason`.
    """
    missing = gstreamer_missing()
    if missing:
        return {"missing": True, "reason": missing}
    found = {name: first_decoder(codec, registry_has) for codec, name in CODEC_NAMES.items()}
    kinds = {kind: gstreamer_missing(kind) for kind in ("csi", "v4l2", "rtsp", "http")}
    return {
        "version": load_gstreamer().gst.version_string(),
        "decoders": {name: element for name, element in found.items() if element},
        "lacking": {kind: text for kind, text in kinds.items() if text},
    }


def open_gstreamer(uri: SourceUri, options: SourceOptions) -> FrameSource:
    """Open a live camera and read its first frame.

    Raises:
        SourceError: the camera delivers no frame; the text names the cause and the next step.
        SourceUriError: the URI is wrong.
    """
    missing = gstreamer_missing()
    if missing:
        raise SourceError(f"{uri.label}: {missing}", reason="unavailable")
    credentials = uri.credentials or options.credentials
    probe = partial(find_fault, uri, credentials) if uri.scheme in PORTS else None
    place = CameraPlace(uri.scheme, uri.label, uri.path, probe)
    try:
        pipeline = pipeline_of(uri, options, registry_has, _caps_of_device)
        log.debug("%s: %s", uri.label, "a pipeline" if uri.scheme == "gst" else pipeline.text)
        hosts = addresses_of(uri) if uri.scheme.startswith("rtsp") else ()
        player = GstreamerPlayer(pipeline, options.matrix, options.range, hosts)
    except SourceUriError:
        raise
    except SourceError as error:
        raise SourceError(f"{uri.label}: {masked(str(error))}", reason=error.reason) from error
    clock: Any = _CLOCKS.get(uri.scheme, "arrival")
    return GstreamerSource(player, place, clock)


def pipeline_of(
    uri: SourceUri,
    options: SourceOptions,
    has: Callable[[str], bool],
    caps_of_device: Callable[[str], str],
) -> CameraPipeline:
    """Return the pipeline that reads `uri`.

    Args:
        uri: of a live camera.
        options: its credentials, where the URI has none.
        has: whether the registry has an element.
        caps_of_device: what a video device offers.

    Raises:
        SourceError: an element is missing, or the device has no such mode.
    """
    given = uri.credentials or options.credentials
    login = None if given is None else (given.user, given.password)
    match uri.scheme:
        case "csi":
            return csi_pipeline(int(uri.host), _picture(uri), has)
        case "v4l2":
            return _device_pipeline(uri, _picture(uri), has, caps_of_device(uri.path))
        case "rtsp" | "rtsps":
            transport = uri.query.get("transport", "tcp")
            address = uri.address("transport")
            return rtsp_pipeline(address, login, has, transport=transport)
        case "http" | "https":
            return http_pipeline(uri.address(), login, has)
        case _:
            return own_pipeline(uri.path, has)


def _device_pipeline(
    uri: SourceUri, picture: PictureOptions, has: Callable[[str], bool], caps: str
) -> CameraPipeline:
    modes = parse_modes(caps)
    name = V4L2_FORMATS.get(uri.query.get("format", ""), "")
    if not caps:
        # The device could not be opened: with any mode, the pipeline reports why.
        return v4l2_pipeline(uri.path, None, picture, has)
    mode = best_mode(modes, picture.width, picture.height, picture.fps, name)
    log_once(log, f"{uri.label}: takes {mode}, of {len(modes)} modes")
    return v4l2_pipeline(uri.path, mode, picture, has)


def _picture(uri: SourceUri) -> PictureOptions:
    fps = uri.fps()
    return PictureOptions(
        uri.whole("width", 0, 0, 16384),
        uri.whole("height", 0, 0, 16384),
        Fraction(0) if fps is None else Fraction(fps).limit_denominator(1001),
        flip_of(uri),
        uri.whole("mode", 0, 0, 99) if "mode" in uri.query else None,
    )


def _caps_of_device(device: str) -> str:
    return offered_caps("v4l2src", {"device": device})
