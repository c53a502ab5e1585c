"""A camera that serves JPEGs over HTTP (multipart/x-mixed-replace), in threads of this process."""

from __future__ import annotations

import base64
import socket
import threading
import time
from contextlib import suppress
from typing import TYPE_CHECKING, Literal
from urllib.parse import quote

from support.free_ports import free_ports

if TYPE_CHECKING:
    from collections.abc import Callable

Damage = Literal["", "truncated", "corrupt", "no_jpeg"]
_BOUNDARY = b"picture"


class MjpegCamera:
    """Serves pictures in turn at `uri()` until `close`.

    Args:
        picture: returns the next JPEG.
        fps: pictures per second, to each client.
        user, password: HTTP's basic authentication, where `user` is not empty.

    Attributes:
        damage: of each JPEG that is sent from now on: its second half is missing (`truncated`),
            bytes of its scan are changed (`corrupt`), or it is no JPEG at all (`no_jpeg`).
        instead: what is sent in place of each JPEG; empty where they are sent.
        content_length: whether the parts say their length, which not every camera does.
        connections: number of clients that came.
    """

    def __init__(
        self, picture: Callable[[], bytes], *, fps: float = 15.0, user: str = "", password: str = ""
    ) -> None:
        (self.port,) = free_ports(1)
        self.fps = fps
        self.damage: Damage = ""
        self.instead = b""
        self.content_length = True
        self.connections = 0
        self._picture = picture
        self._user, self._password = user, password
        self._flowing = threading.Event()
        self._flowing.set()
        self._lock = threading.Lock()
        self._clients: set[socket.socket] = set()
        self._threads: list[threading.Thread] = []
        self._listener: socket.socket | None = None
        self.start()

    def uri(self, port: int | None = None, *, password: str | None = None) -> str:
        """Return the URI of the stream, with its password, or another one; by way of `port`."""
        login = quote(self._password if password is None else password, safe="")
        user = f"{self._user}:{login}@"
        host = f"127.0.0.1:{self.port if port is None else port}"
        return f"http://{user if self._user else ''}{host}/camera.mjpeg"

    def start(self) -> None:
        """Listen, at the port that the camera had before."""
        assert self._listener is None
        self._listener = socket.socket()
        self._listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        self._listener.bind(("127.0.0.1", self.port))
        self._listener.listen(32)
        self._threads = [threading.Thread(target=self._accept, args=(self._listener,))]
        self._threads[0].start()

    def kill(self) -> None:
        """Close the port and all connections; a second call does nothing."""
        listener, self._listener = self._listener, None
        if listener is None:
            return
        with suppress(OSError):
            listener.shutdown(socket.SHUT_RDWR)
        listener.close()
        with self._lock:
            for client in self._clients:
                with suppress(OSError):
                    client.shutdown(socket.SHUT_RDWR)
        flowed = self._flowing.is_set()
        self._flowing.set()
        for thread in self._threads:
            thread.join()
        if not flowed:
            self._flowing.clear()

    def stall(self) -> None:
        """Send nothing from now on, and keep connections; new ones get a header only."""
        self._flowing.clear()

    def flow(self) -> None:
        self._flowing.set()

    def close(self) -> None:
        self.kill()

    def __enter__(self) -> MjpegCamera:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _accept(self, listener: socket.socket) -> None:
        while self._listener is listener:
            try:
                client = listener.accept()[0]
            except OSError:
                return
            with self._lock:
                self._clients.add(client)
                self.connections += 1
            thread = threading.Thread(target=self._serve, args=(client, listener))
            self._threads.append(thread)
            thread.start()

    def _serve(self, client: socket.socket, listener: socket.socket) -> None:
        with suppress(OSError):
            if self._admits(client):
                self._stream(client, listener)
        with self._lock:
            self._clients.discard(client)
        client.close()

    def _admits(self, client: socket.socket) -> bool:
        """Read the request and write the response's header; whether the client may look."""
        request = b""
        while b"\r\n\r\n" not in request:
            data = client.recv(4096)
            if not data:
                return False
            request += data
        token = base64.b64encode(f"{self._user}:{self._password}".encode())
        if self._user and b"authorization: basic " + token.lower() not in request.lower():
            client.sendall(
                b"HTTP/1.0 401 Unauthorized\r\nWWW-Authenticate: Basic realm=camera\r\n"
                b"Content-Length: 0\r\n\r\n"
            )
            return False
        client.sendall(
            b"HTTP/1.0 200 OK\r\nCache-Control: no-cache\r\n"
            b"Content-Type: multipart/x-mixed-replace; boundary=" + _BOUNDARY + b"\r\n\r\n"
        )
        return True

    def _stream(self, client: socket.socket, listener: socket.socket) -> None:
        due = time.monotonic()
        while self._listener is listener:
            self._flowing.wait()
            jpeg = self.instead or self._damaged(self._picture())
            length = b"Content-Length: %d\r\n" % len(jpeg) if self.content_length else b""
            head = b"--" + _BOUNDARY + b"\r\nContent-Type: image/jpeg\r\n" + length + b"\r\n"
            client.sendall(head + jpeg + b"\r\n")
            due = max(due + 1 / self.fps, time.monotonic() - 0.2)
            time.sleep(max(0.0, due - time.monotonic()))

    def _damaged(self, jpeg: bytes) -> bytes:
        if self.damage == "truncated":
            return jpeg[: len(jpeg) // 2]
        if self.damage == "corrupt":
            middle = len(jpeg) // 2
            return jpeg[:middle] + bytes(64) + jpeg[middle + 64 :]
        return b"<html>busy</html>" if self.damage == "no_jpeg" else jpeg
