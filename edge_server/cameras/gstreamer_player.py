"""One running GStreamer pipeline, read without a main loop: images, and messages in words."""

from __future__ import annotations

import logging
import re
import threading
import time
import weakref
from dataclasses import dataclass
from functools import partial
from itertools import count
from typing import TYPE_CHECKING, Any, Literal
from urllib.parse import urlsplit

from edge_server.cameras.gstreamer_frames import SampleReader, load_gstreamer
from edge_server.cameras.gstreamer_pipelines import DEPAYLOADER, JPEG_DECODER
from edge_server.cameras.jpeg import LONGEST_JPEG_BYTES, size_of_jpeg
from edge_server.cameras.live_source import StreamEnded
from edge_server.cameras.network import PORTS, CameraSockets, find_fault
from edge_server.cameras.source_uri import NO_OPTIONS
from edge_server.errors import SourceError

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Iterable, Iterator

    from edge_server.cameras.gstreamer_pipelines import CameraPipeline
    from edge_server.cameras.live_source import Picture
    from edge_server.cameras.source_uri import Credentials, SourceOptions, SourceUri


@dataclass(frozen=True)
class BusMessage:
    """One message of a pipeline's bus, as far as a reader needs it.

    Attributes:
        kind: `status` is the code of an HTTP response, 0 where none came; `silence` is rtspsrc's
            own finding that a camera sends nothing any more.
        domain: `resource`, `stream` or `core` of gsterror.h, as are the codes: texts differ between
            versions and languages.
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
        return self.domain == "stream" and self.code == 7


def check_messages(
    uri: SourceUri,
    messages: Iterable[BusMessage],
    credentials: Credentials | None = None,
    *,
    live: bool,
    running: bool,
) -> int:
    """Return how many of `messages` tell of a part of the stream that could not be decoded.

    Args:
        uri: of the camera.
        messages: of its pipeline since the last look.
        credentials: for the camera.
        live: the pipeline is paced by a camera, which has delivered frames where it is `running`.
        running: see `live`.

    Raises:
        SourceError: one of them tells of a fault.
        StreamEnded: the pipeline plays no camera, and has ended.
    """
    damaged = 0
    # The response of an HTTP server says more than the error that it leads to.
    for message in sorted(messages, key=lambda each: each.kind != "status"):
        if message.kind == "end" and not live:
            raise StreamEnded
        if message.kind == "status" and 0 < message.code < 400:
            continue
        log.debug("%s: %s (%s)", uri.label, message.text, message.debug)
        if message.kind != "warning":
            raise fault_of(uri, message, credentials, running=running)
        damaged += message.is_corruption
    return damaged


def fault_of(
    uri: SourceUri, message: BusMessage, credentials: Credentials | None = None, *, running: bool
) -> SourceError:
    """Return the error that `message` stands for, which is an `error`, the `end` of a live camera,
    a `status` or `silence`."""
    quoted = message.text.strip().rstrip(".") or "GStreamer gives no reason"
    phase = "running" if running else "opening"
    facts = f"{uri.scheme} {message.domain or message.kind} {message.code} {phase} "
    for pattern, reason, text in _CAUSES:
        if re.match(pattern, facts + message.debug, re.DOTALL):
            told = text.format(device=uri.path, code=message.code, text=quoted)
            return uri.fault(told, reason)
    if uri.scheme in PORTS:  # GStreamer does not say why it cannot be opened
        return find_fault(uri, credentials)
    return uri.fault("the camera cannot be opened; look at it with another player", "lost")


_REFUSED = "user name or password refused; check the camera's credentials"
_NO_STREAM = "the camera has no such stream; check the path of the address"
_TRY_IT = "{text}; try it: gst-launch-1.0 PIPELINE ! fakesink"
_SENSOR = (
    "{text}; is the sensor connected and in the device tree (dmesg | grep -i imx)? After a crash: "
    "sudo systemctl restart nvargus-daemon; where that does not help, reboot"
)
# The first that fits scheme, domain or kind, code, phase and debugging text; reason; text.
_CAUSES = (
    (r"\w+ end \d+ running", "lost", "the camera closed the stream; it is opened again"),
    (r"\w+ end ", "lost", "the camera closed the stream; look at it with another player"),
    (r"\w+ silence ", "stalled", "the camera sends nothing any more; it is opened again"),
    (r"\w+ status 40[13] ", "unauthorized", _REFUSED),
    (r"\w+ status 404 ", "not_found", _NO_STREAM),
    (r"\w+ status [1-9]", "unavailable", "the camera responds with HTTP status {code}"),
    (
        r"\w+ core 12 ",
        "no_decoder",
        "{text}; on a Jetson: apt install nvidia-l4t-gstreamer, elsewhere: apt install "
        "gstreamer1.0-plugins-good gstreamer1.0-plugins-bad gstreamer1.0-libav",
    ),
    (r"\w+ stream 6 ", "no_decoder", "{text}; apt install gstreamer1.0-libav"),
    (r"\w+ stream 7 ", "corrupt", "the stream cannot be decoded; look at it with another player"),
    (r"csi \w+ 3 ", "unavailable", _SENSOR),
    (r"csi ", "lost", _SENSOR),
    (
        r"gst core 7 opening",
        "unavailable",
        "{text}; the pipeline has to end in raw video in system memory, on a Jetson: … ! nvvidconv "
        "! video/x-raw",
    ),
    (r"gst .* running", "lost", _TRY_IT),
    (r"gst ", "unavailable", _TRY_IT),
    (
        r"v4l2 \w+ \d+ running",
        "lost",  # the cause is in GStreamer's own log only
        "the device gives no frames any more; it was unplugged, or sudo dmesg | tail says why",
    ),
    (
        r"v4l2 (resource 4 |.*busy)",
        "unavailable",
        "another program uses the device; see which: fuser -v {device}",
    ),
    (
        r"v4l2 resource 1[34] ",
        "unavailable",
        "the driver does not start its stream; if the USB bus has no bandwidth left: use MJPEG "
        "(?format=mjpeg), a lower rate (?fps=15) or another USB controller; sudo dmesg | tail says "
        "more",
    ),
    (r"v4l2 ", "unavailable", "{text}; sudo dmesg | tail says what the driver reports"),
    (r"\w+ resource 15 ", "unauthorized", _REFUSED),
    (r"\w+ resource 3 ", "not_found", _NO_STREAM),
    (r".* running", "lost", "the connection to the camera broke; it is opened again"),
)


log = logging.getLogger(__name__)

# A driver that does not return from its stop within this hangs: the end of the process waits no
# longer for it, and a camera finds that its reader hangs.
_STOP_S = 2.0
# Longer than a camera's farewell takes: GStreamer may be within a message of RTSP that has no end.
_QUICK_STOP_S = 0.5
# A camera's description has a few kilobytes. GStreamer takes the square of the number of streams in
# it to set them up, which nothing ends: minutes for 2 MB. Another camera at the same address that
# is opened meanwhile may stream more, which costs this one an attempt.
_MOST_DESCRIPTION_BYTES = 2**18
# Until a camera has described its streams: five redirects, each with a password. GStreamer follows
# any number, thousands a second.
_MOST_REQUESTS = 20
# A camera has one, and another one after its restart.
_MOST_SENDERS = 8
# The longest wait in GStreamer before its messages are read.
_LOOK_S = 0.1


def registry_has(element: str) -> bool:
    return load_gstreamer().gst.ElementFactory.find(element) is not None


class GstreamerStream:
    """Runs a pipeline; a CameraStream.

    Attributes:
        live: the pipeline is paced by a camera, not by its reader.

    Args:
        uri: of the camera, which errors name.
        pipeline: what to run.
        options: the camera's credentials, and colours that override those in the caps.
        hosts: IP addresses of a network camera.

    Raises:
        SourceError: the text is no pipeline.
    """

    def __init__(
        self,
        uri: SourceUri,
        pipeline: CameraPipeline,
        options: SourceOptions = NO_OPTIONS,
        hosts: Collection[str] = (),
    ) -> None:
        self._api = load_gstreamer()
        self._sockets = CameraSockets(hosts)
        gst = self._api.gst
        self.seen = 0
        self._dropped = 0
        self._undecoded = 0
        self._uri = uri
        self._credentials = uri.credentials or options.credentials
        self._sample: Any = None
        self._running = self._ended = self._has_image = False
        self._failure: SourceError | None = None
        self._is_described = pipeline.branch is None
        self._received_before = 0  # up to the last image
        self._branch = pipeline.branch
        # What the pipeline holds of this object, and this object of the pipeline, would keep both.
        self._undo: list[Callable[[], None]] = []
        self._sink: Any = None
        self._pipeline = _parsed(gst.parse_launch, pipeline.text)
        if not isinstance(self._pipeline, gst.Pipeline):  # a single element
            alone, self._pipeline = self._pipeline, gst.Pipeline.new(None)
            self._pipeline.add(alone)
        for name, values in pipeline.properties.items():
            element = self._pipeline.get_by_name(name)
            for key, value in values.items():
                element.set_property(key, value)
            if pipeline.branch is not None:
                self._link_later(element)
        self._where_known = pipeline.where_known
        self._set_where_known(self._pipeline)
        self._samples = SampleReader(self._api, self._pipeline, options)
        self._bus = self._pipeline.get_bus()
        types = gst.MessageType
        self._of_interest = types.ERROR | types.WARNING | types.EOS | types.ELEMENT
        if pipeline.branch is None:
            self._sink = self._pipeline.get_by_name("frames")
            self._watch_images()
        # Python must not end while a pipeline runs: its threads would crash the process.
        self._stop = weakref.finalize(
            self, _stop, self._pipeline, gst.State.NULL, self._bus, self._undo, self._sockets
        )
        change = self._pipeline.set_state(gst.State.PAUSED)
        self.live = change == gst.StateChangeReturn.NO_PREROLL
        if not self.live and self._sink is not None and pipeline.branch is None:
            # A file is read at the pace of its timestamps.
            self._sink.set_property("sync", True)
        self._pipeline.set_state(gst.State.PLAYING)

    @property
    def damaged(self) -> int:
        return self._dropped + self._undecoded

    @property
    def period_s(self) -> float:
        return self._samples.period_s

    def grab(self, timeout_s: float) -> bool:
        try:
            self._undecoded += check_messages(
                self._uri,
                self._messages(),
                self._credentials,
                live=self.live,
                running=self._running,
            )
        except StreamEnded:
            self._ended = True  # the last frame may wait yet
        if self._sink is None:
            # Until the camera has described its streams.
            time.sleep(min(timeout_s, 0.005))
            if not self._is_described:
                self._check_received()
            return False
        timeout_s = min(timeout_s, _LOOK_S)
        self._sample = self._sink.emit("try-pull-sample", int(timeout_s * 1e9))
        if self._sample is not None:
            self._has_image = True
            return True
        if self._ended:
            raise StreamEnded
        self._check_received()
        return False

    def retrieve(self) -> Picture:
        sample, self._sample = self._sample, None
        picture = self._samples.read(sample)
        self._running = True
        return picture

    def _messages(self) -> Iterator[BusMessage]:
        if self._failure is not None:
            raise self._failure
        # What is of no interest is dropped by the same call, so the bus never grows.
        while (message := self._bus.pop_filtered(self._of_interest)) is not None:
            parsed = _bus_message(self._api.gst, message)
            if parsed is not None:
                yield parsed

    def close(self) -> None:
        self._sink = None
        if self._stop.detach() is not None:
            null = self._api.gst.State.NULL
            _stop(self._pipeline, null, self._bus, self._undo, self._sockets, wait=True)

    def _check_received(self) -> None:
        """Let no more come over TCP without an image than the longest one has: GStreamer keeps it
        all, of JPEG, H.264 and H.265."""
        received_bytes = self._sockets.received_bytes()
        if self._has_image:
            self._has_image, self._received_before = False, received_bytes
        elif not self._is_described and received_bytes > _MOST_DESCRIPTION_BYTES:
            self._hang_up(
                f"the camera describes its streams in more than {_MOST_DESCRIPTION_BYTES >> 10} "
                "KiB; restart the camera",
                "unavailable",
            )
        elif received_bytes - self._received_before > LONGEST_JPEG_BYTES:
            self._hang_up(
                f"no image ends within {LONGEST_JPEG_BYTES >> 20} MiB; set a lower resolution in "
                "the camera, or restart it",
                "corrupt",
            )

    def _hang_up(self, text: str, reason: str) -> None:
        self._failure = SourceError(text, reason=reason)
        self._sockets.shut_down()

    def _watch_images(self) -> None:
        """Count encoded images; drop the JPEGs that `size_of_jpeg` refuses: decoders make half an
        image of them, and report nothing. USB cameras send some, most of all first.

        The probes run on threads of GStreamer, each counter on one.
        """
        kinds, result = self._api.gst.PadProbeType, self._api.gst.PadProbeReturn

        def see(_pad: Any, _info: Any) -> Any:
            self.seen += 1
            return result.OK

        def look(_pad: Any, info: Any) -> Any:
            buffer = info.get_buffer()
            self.seen += alone
            try:
                size_of_jpeg(buffer.extract_dup(0, buffer.get_size()))
            except ValueError:
                self._dropped += 1
                return result.DROP
            return result.OK

        depayloader = self._pipeline.get_by_name(DEPAYLOADER)
        decoder = self._pipeline.get_by_name(JPEG_DECODER)
        alone = depayloader is None
        if depayloader is not None:
            self._probe(depayloader, "src", kinds.BUFFER | kinds.BUFFER_LIST, see)
        if decoder is not None:
            self._probe(decoder, "sink", kinds.BUFFER, look)

    def _probe(self, element: Any, name: str, kinds: Any, look: Callable[[Any, Any], Any]) -> None:
        pad = element.get_static_pad(name)
        self._undo.append(partial(pad.remove_probe, pad.add_probe(kinds, look)))

    def _link_later(self, source: Any) -> None:
        """Build what comes behind an rtspsrc when the camera has described its streams, send
        nothing to another host, and follow no more redirects and senders than a camera has; the
        handlers run on the source's threads, whose exceptions nobody would see."""
        chosen: list[str] = []
        requests, senders = count(1), count(1)
        host = urlsplit(source.get_property("location")).hostname

        def send(_source: Any, message: Any) -> bool:
            # What the camera has described may have other addresses, and goes to it.
            if chosen:
                return True
            if next(requests) > _MOST_REQUESTS:
                self._failure = SourceError(
                    "the camera redirects again and again; write the address of the stream itself",
                    reason="not_found",
                )
                return False
            return bool(urlsplit(message.parse_request()[2]).hostname == host)

        def select(_source: Any, _number: int, caps: Any) -> bool:
            self._is_described = True
            structure = caps.get_structure(0)
            if chosen or structure.get_string("media") != "video":
                return False
            chosen.append(structure.get_string("encoding-name") or "an unnamed codec")
            return True

        def link(_source: Any, pad: Any) -> None:
            try:
                self._add_branch(pad, chosen[0])
            except SourceError as error:
                self._failure = error
            except Exception as error:
                log.exception("gstreamer: a stream could not be linked")
                self._failure = SourceError(f"the stream could not be linked: {error}")

        def finished(_source: Any) -> None:
            if not chosen:
                self._failure = SourceError("the camera has no video stream", reason="not_found")

        def bound(_source: Any, manager: Any) -> None:
            # With a second one GStreamer crashes at times, and each has a thread.
            manager.set_property("max-streams", 1)
            found = manager.connect("on-new-ssrc", sender)
            self._undo.append(partial(manager.disconnect, found))

        def sender(_manager: Any, _session: int, _ssrc: int) -> None:
            if next(senders) > _MOST_SENDERS:
                self._failure = SourceError(
                    f"the camera sends as more than {_MOST_SENDERS} senders (SSRC); restart it",
                    reason="corrupt",
                )

        for signal, handler in (
            ("new-manager", bound),
            ("before-send", send),
            ("select-stream", select),
            ("pad-added", link),
            ("no-more-pads", finished),
        ):
            self._undo.append(partial(source.disconnect, source.connect(signal, handler)))

    def _set_where_known(self, elements: Any) -> None:
        """Set the flags of `CameraPipeline.where_known` on what is among the elements of a bin."""
        for name, flag in self._where_known.items():
            element = elements.get_by_name(name)
            if element is not None and element.find_property(flag) is not None:
                element.set_property(flag, True)

    def _add_branch(self, pad: Any, codec: str) -> None:
        if self._branch is None or self._sink is not None:
            return
        gst = self._api.gst
        branch = _parsed(gst.parse_bin_from_description, self._branch(codec), True)
        self._set_where_known(branch)
        self._pipeline.add(branch)
        self._watch_images()
        pad.link(branch.get_static_pad("sink"))
        branch.sync_state_with_parent()
        self._sink = branch.get_by_name("frames")


def _stop(
    pipeline: Any,
    null: Any,
    bus: Any,
    undo: list[Callable[[], None]],
    sockets: CameraSockets,
    *,
    wait: bool = False,
) -> None:
    def stop() -> None:
        pipeline.set_state(null)
        # A stream may have been linked until now.
        while undo:
            undo.pop()()
        # Messages hold their elements, and those the pipeline.
        bus.set_flushing(True)

    # A driver may never return from its stop, Argus among them.
    thread = threading.Thread(target=stop, name="camera-close", daemon=True)
    thread.start()
    thread.join(_QUICK_STOP_S)
    if thread.is_alive():
        sockets.shut_down()
        thread.join(_STOP_S)
    if thread.is_alive():
        log.error("gstreamer: a pipeline does not stop; its driver hangs, and keeps the device")
        if wait:
            thread.join()


def _parsed(parse: Callable[..., Any], text: str, *arguments: Any) -> Any:
    from gi.repository import GLib  # noqa: PLC0415  # no dependency

    try:
        return parse(text, *arguments)
    except GLib.Error as error:
        raise SourceError(
            f"GStreamer does not take the pipeline: {error.message}; write it without a sink, so "
            "that this runs: gst-launch-1.0 PIPELINE ! fakesink",
            reason="unavailable",
        ) from None


def _bus_message(gst: Any, message: Any) -> BusMessage | None:
    kind = message.type
    if kind == gst.MessageType.EOS:
        return BusMessage("end")
    if kind in (gst.MessageType.ERROR, gst.MessageType.WARNING):
        is_error = kind == gst.MessageType.ERROR
        error, debug = message.parse_error() if is_error else message.parse_warning()
        domain = error.domain.removeprefix("gst-").removesuffix("-error-quark")
        level: Literal["error", "warning"] = "error" if is_error else "warning"
        return BusMessage(level, domain, error.code, error.message, debug or "")
    structure = message.get_structure()
    name = "" if structure is None else structure.get_name()
    if name == "http-headers":
        return BusMessage("status", code=structure.get_value("http-status-code"))
    if name == "GstRTSPSrcTimeout":
        return BusMessage("silence")
    return None
