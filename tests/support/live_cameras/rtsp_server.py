"""One camera with RTSP: GStreamer's server, fed picture by picture.

    /usr/bin/python3 rtsp_server.py '{"port": 8554, "clip": "road.i420", "width": 640, ...}'

Runs with the Python that has the GStreamer bindings, so it imports nothing but those and its
neighbour. It prints `ready` once it listens. Each line of its standard input is a command, and
`done` on its standard output says that the next picture obeys:

- `play`: show the clip's pictures, forwards and back; `freeze`: send the last one ever again.
- `black`, `white`, `grey`: send a plain picture.  `silence`: send nothing, and keep connections.
- `clip FILE WIDTH HEIGHT`: another clip, perhaps of another size.
- `rate FPS`: that many pictures a second from now on.
- `encode_ms`: nothing changes; `done` is followed by the median time from a picture's time code to
  its last byte leaving the encoder, in ms.

The process ends with its standard input.
"""

from __future__ import annotations

import json
import mmap
import os
import sys
import threading
import time
from collections import deque
from contextlib import suppress
from statistics import median

import gi
from time_code import write_time  # the file beside this one

gi.require_version("Gst", "1.0")
gi.require_version("GstApp", "1.0")
gi.require_version("GstRtspServer", "1.0")
from gi.repository import GLib, Gst, GstApp, GstRtspServer  # noqa: E402, F401 - GstApp: push_buffer

# Of two cores, one camera may have little: the fastest presets, one thread, no look-ahead.
ENCODERS = {
    "h264": "x264enc tune=zerolatency speed-preset=ultrafast threads=1 key-int-max={gop} "
    "bitrate={kbit_s} ! video/x-h264,profile=constrained-baseline "
    "! rtph264pay name=pay0 pt=96 config-interval=1",
    "h265": "x265enc tune=zerolatency speed-preset=ultrafast key-int-max={gop} log-level=none "
    "bitrate={kbit_s} option-string=pools=1:frame-threads=1 "
    "! rtph265pay name=pay0 pt=96 config-interval=1",
    "jpeg": "jpegenc quality=80 ! rtpjpegpay name=pay0 pt=26",
}
PLAIN = {"black": 16}


class Pictures:
    """What the camera sees: I420 pictures of a clip, or one picture for ever."""

    def __init__(self, clip: str, width: int, height: int, *, stamp: bool) -> None:
        self.stamp = stamp
        self.mode = "play"
        self.size = (0, 0)
        self._last = b""
        self._at = 0
        self.show_clip(clip, width, height)

    def show_clip(self, clip: str, width: int, height: int) -> None:
        with open(clip, "rb") as file:  # noqa: PTH123 - mmap wants a descriptor
            self._clip = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
        self.size = (width, height)
        self._bytes = width * height * 3 // 2
        self._at = 0
        if len(self._clip) % self._bytes:
            raise ValueError(f"{clip} has no whole pictures of {width} x {height}")

    def next(self) -> bytes | None:
        """Return the picture that is due now; None in silence."""
        width, height = self.size
        luma_bytes = width * height
        if self.mode == "silence":
            return None
        if self.mode in PLAIN:
            return bytes([PLAIN[self.mode]]) * luma_bytes + b"\x80" * (luma_bytes // 2)
        if self.mode == "freeze" and len(self._last) == self._bytes:
            return self._last
        count = len(self._clip) // self._bytes
        # There and back, as a jump from the last picture to the first would be no drive.
        at = self._bytes * (self._at if self._at < count else 2 * count - 2 - self._at)
        self._at = (self._at + 1) % max(1, 2 * count - 2)
        picture = bytearray(self._clip[at : at + self._bytes])
        if self.stamp:
            write_time(picture, width, height, time.monotonic_ns())
        self._last = bytes(picture)
        return self._last


class Server:
    """GStreamer's server with one stream; all clients share one encoder."""

    def __init__(self, settings: dict[str, object]) -> None:
        self._fps = float(str(settings["fps"]))
        self._pictures = Pictures(
            str(settings["clip"]),
            int(str(settings["width"])),
            int(str(settings["height"])),
            stamp=bool(settings["stamp"]),
        )
        self._lock = threading.Lock()
        self._inputs: list[tuple[Gst.Element, list[tuple[int, int]]]] = []
        self._fed_ns = 0
        self._encode_ns: deque[int] = deque(maxlen=300)
        self._server = GstRtspServer.RTSPServer()
        self._server.set_address("127.0.0.1")
        self._server.set_service(str(settings["port"]))
        if settings["user"]:
            self._server.set_auth(_auth(settings))
        factory = GstRtspServer.RTSPMediaFactory()
        encoder = ENCODERS[str(settings["codec"])].format(
            gop=max(1, round(self._fps * float(str(settings["key_frame_s"])))),
            kbit_s=settings["kbit_s"],
        )
        factory.set_launch(
            "( appsrc name=pictures is-live=true do-timestamp=true format=time block=false "
            f"max-buffers=2 leaky-type=downstream ! {encoder} )"
        )
        factory.set_shared(True)
        if settings["user"]:
            _allow(factory, str(settings["user"]))
        factory.connect("media-configure", self._configure)
        self._server.get_mount_points().add_factory(str(settings["path"]), factory)

    def run(self) -> None:
        if not self._server.attach(None):
            raise SystemExit(f"port {self._server.get_service()} is not free")
        threading.Thread(target=self._feed, daemon=True).start()
        print("ready", flush=True)
        loop = GLib.MainLoop()
        threading.Thread(target=self._obey, args=(loop,), daemon=True).start()
        loop.run()

    def _configure(self, _factory: object, media: GstRtspServer.RTSPMedia) -> None:
        entry = (media.get_element().get_by_name("pictures"), [])
        with self._lock:
            self._inputs.append(entry)

        def forget(*_: object) -> None:
            with self._lock:
                if entry in self._inputs:
                    self._inputs.remove(entry)

        media.connect("unprepared", forget)
        # The picture that was fed last is the one that leaves: an encoder here takes less than a
        # period, and holds none back.
        encoded = media.get_element().get_by_name("pay0").get_static_pad("sink")
        encoded.add_probe(Gst.PadProbeType.BUFFER, self._note_encoded)

    def _note_encoded(self, *_: object) -> Gst.PadProbeReturn:
        self._encode_ns.append(time.monotonic_ns() - self._fed_ns)
        return Gst.PadProbeReturn.OK

    def _feed(self) -> None:
        due = time.monotonic()
        while True:
            due = max(due + 1 / self._fps, time.monotonic() - 0.2)
            time.sleep(max(0.0, due - time.monotonic()))
            with self._lock:
                if not self._inputs:
                    continue
                self._fed_ns = time.monotonic_ns()
                picture, size = self._pictures.next(), self._pictures.size
                if picture is None:
                    continue
                for source, sizes in self._inputs:
                    if sizes[-1:] != [size]:
                        sizes.append(size)
                        source.set_caps(self._caps(size))
                    source.push_buffer(Gst.Buffer.new_wrapped(picture))

    def _caps(self, size: tuple[int, int]) -> Gst.Caps:
        width, height = size
        rate = round(self._fps * 1000)
        return Gst.Caps.from_string(
            f"video/x-raw,format=I420,width={width},height={height},framerate={rate}/1000,"
            "colorimetry=bt601,pixel-aspect-ratio=1/1,interlace-mode=progressive"
        )

    def _obey(self, loop: GLib.MainLoop) -> None:
        for line in sys.stdin:
            command, *words = line.split()
            answer = "done"
            with self._lock:
                if command == "clip":
                    self._pictures.show_clip(words[0], int(words[1]), int(words[2]))
                elif command == "rate":
                    self._fps = float(words[0])
                elif command == "encode_ms":
                    answer = f"done {median(self._encode_ns or [0]) / 1e6}"
                else:
                    self._pictures.mode = command
            print(answer, flush=True)
        loop.quit()


def _auth(settings: dict[str, object]) -> GstRtspServer.RTSPAuth:
    """Return the check of a password; without a default token, a client without one gets 401."""
    auth = GstRtspServer.RTSPAuth()
    user, password = str(settings["user"]), str(settings["password"])
    token = GstRtspServer.RTSPToken()
    token.set_string("media.factory.role", user)
    if settings["digest"]:
        from gi.repository import GstRtsp

        auth.set_supported_methods(GstRtsp.RTSPAuthMethod.DIGEST)
        auth.add_digest(user, password, token)
    else:
        auth.add_basic(GstRtspServer.RTSPAuth.make_basic(user, password), token)
    return auth


def _allow(factory: GstRtspServer.RTSPMediaFactory, role: str) -> None:
    permissions = GstRtspServer.RTSPPermissions()
    permissions.add_permission_for_role(role, "media.factory.access", True)
    permissions.add_permission_for_role(role, "media.factory.construct", True)
    factory.set_permissions(permissions)


if __name__ == "__main__":
    # A camera keeps its pace however busy the machine is that reads it. Only root may say so.
    with suppress(OSError):
        os.setpriority(os.PRIO_PROCESS, 0, -10)
    Gst.init(None)
    Server(json.loads(sys.argv[1])).run()
