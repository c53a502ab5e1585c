"""An RTSP camera as a process of its own, see `rtsp_server.py`."""

from __future__ import annotations

import json
import os
import signal
import subprocess
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING
from urllib.parse import quote

from support.free_ports import free_ports

if TYPE_CHECKING:
    from support.live_cameras.clip import Clip

# The Python that Debian's and Ubuntu's bindings of GStreamer belong to.
PYTHON = "/usr/bin/python3"
_SERVER = Path(__file__).with_name("rtsp_server.py")
_PARTS = "appsrc", "x264enc", "x265enc", "rtph264pay", "rtph265pay"
PACKAGES = (
    "python3-gi python3-gst-1.0 gir1.2-gst-plugins-base-1.0 gir1.2-gst-rtsp-server-1.0 "
    "gstreamer1.0-plugins-base gstreamer1.0-plugins-good gstreamer1.0-plugins-bad "
    "gstreamer1.0-plugins-ugly gstreamer1.0-libav"
)


def what_is_missing() -> str:
    """Return why there can be no RTSP camera on this machine, with the remedy; "" if there can."""
    look = (
        "import gi; gi.require_version('GstRtspServer', '1.0'); "
        "from gi.repository import Gst, GstRtspServer; Gst.init(None); "
        f"print(*[name for name in {_PARTS} if Gst.ElementFactory.find(name) is None])"
    )
    try:
        found = subprocess.run([PYTHON, "-c", look], capture_output=True, text=True, check=False)
    except OSError as error:
        return f"{PYTHON}: {error.strerror}; apt install {PACKAGES}"
    if found.returncode:
        return f"no RTSP server: {found.stderr.strip().splitlines()[-1]}; apt install {PACKAGES}"
    missing = found.stdout.strip()
    return f"GStreamer has no {missing}; apt install {PACKAGES}" if missing else ""


@dataclass(frozen=True)
class Stream:
    """What a camera sends.

    Attributes:
        codec: h264, h265 or jpeg.
        fps: pictures per second.
        kbit_s: the encoder's rate.
        key_frame_s: seconds between two key frames.
        user, password: empty where anyone may look; `digest` as RFC 2617's digest, else as basic.
        stamp: each picture shows the time at which it was made, see `time_code`.
    """

    codec: str = "h264"
    fps: float = 15.0
    kbit_s: int = 1500
    key_frame_s: float = 1.0
    user: str = ""
    password: str = ""
    digest: bool = False
    path: str = "/camera"
    stamp: bool = False


class RtspCamera:
    """A camera that streams a clip on loopback, until `close`.

    Attributes:
        port: the camera's, also after it was killed and started again.
    """

    def __init__(self, clip: Clip, stream: Stream = Stream()) -> None:
        (self.port,) = free_ports(1)
        self._settings = {
            **asdict(stream),
            "port": self.port,
            "clip": str(clip.path),
            "width": clip.width,
            "height": clip.height,
        }
        self._stream = stream
        self._process: subprocess.Popen[str] | None = None
        self.start()

    def uri(self, port: int | None = None, *, password: str | None = None) -> str:
        """Return the URI of the stream, with its password, or another one; by way of `port`."""
        stream = self._stream
        login = quote(stream.password if password is None else password, safe="")
        user = f"{stream.user}:{login}@"
        host = f"127.0.0.1:{self.port if port is None else port}"
        return f"rtsp://{user if stream.user else ''}{host}{stream.path}"

    @property
    def pid(self) -> int:
        assert self._process is not None
        return self._process.pid

    def start(self) -> None:
        """Return when the camera listens, at the port that it had before."""
        assert self._process is None
        self._process = subprocess.Popen(
            [PYTHON, str(_SERVER), json.dumps(self._settings)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            # x265's version banner and the like.
            stderr=subprocess.DEVNULL,
            text=True,
            env={**os.environ, "PYTHONPATH": "", "GST_DEBUG": "0"},
        )
        self._expect("ready")

    def kill(self) -> None:
        """kill -9, frozen or not; return when the camera is gone. A second call does nothing."""
        process, self._process = self._process, None
        if process is not None:
            process.kill()
            process.communicate()

    def hang(self) -> None:
        """Stop the whole camera, with its connections open, until `go_on`."""
        os.kill(self.pid, signal.SIGSTOP)
        os.waitid(os.P_PID, self.pid, os.WSTOPPED)

    def go_on(self) -> None:
        os.kill(self.pid, signal.SIGCONT)

    def command(self, text: str) -> str:
        """Give a command, see `rtsp_server`; return its answer when the next picture obeys."""
        assert self._process is not None
        assert self._process.stdin is not None
        self._process.stdin.write(f"{text}\n")
        self._process.stdin.flush()
        return self._expect("done")

    def show(self, clip: Clip) -> None:
        """Show another clip; where its size differs, the stream changes its size on the way."""
        self.command(f"clip {clip.path} {clip.width} {clip.height}")

    def close(self) -> None:
        self.kill()

    def __enter__(self) -> RtspCamera:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _expect(self, word: str) -> str:
        """Return what follows `word` in the camera's next line."""
        assert self._process is not None
        assert self._process.stdout is not None
        line = self._process.stdout.readline().strip()
        if line.partition(" ")[0] != word:
            code = self._process.poll()
            self.kill()
            raise AssertionError(f"the RTSP camera wrote {line!r}, not {word!r} (exit code {code})")
        return line.partition(" ")[2]
