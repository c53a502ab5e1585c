"""What networks do to cameras: connections that stall or break, packets that are lost, hosts that
do not respond. All of it is on loopback, in threads of this process."""

from __future__ import annotations

import random
import re
import selectors
import socket
import struct
import threading
from contextlib import suppress

from support.free_ports import free_ports

_CHUNK_BYTES = 65536


class TcpProxy:
    """Passes connections at `port` on to `target_port`, until it stalls or cuts them.

    Attributes:
        accepted: number of connections that came in.
    """

    def __init__(self, target_port: int) -> None:
        (self.port,) = free_ports(1)
        self.accepted = 0
        self._target_port = target_port
        self._flowing = threading.Event()
        self._flowing.set()
        self._sockets: set[socket.socket] = set()
        self._lock = threading.Lock()
        self._closed = False
        self._listener = _listener(self.port)
        self._threads = [threading.Thread(target=self._accept)]
        self._threads[0].start()

    def stall(self) -> None:
        """Forward nothing from now on, old connections and new ones alike, and keep them open."""
        self._flowing.clear()

    def flow(self) -> None:
        """Forward again; what came meanwhile goes first."""
        self._flowing.set()

    def cut(self) -> None:
        """Reset every connection; new ones are accepted."""
        with self._lock:
            sockets, self._sockets = self._sockets, set()
        for each in sockets:
            _reset(each)

    def shut(self) -> None:
        """Refuse new connections from now on, as a host whose server is gone."""
        _reset(self._listener)
        self._threads[0].join()

    def open(self) -> None:
        """Accept connections again, after `shut`."""
        self._listener = _listener(self.port)
        self._threads[0] = threading.Thread(target=self._accept)
        self._threads[0].start()

    def close(self) -> None:
        self._closed = True
        _reset(self._listener)
        self.cut()
        self._flowing.set()
        for thread in self._threads:
            thread.join()

    def __enter__(self) -> TcpProxy:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _accept(self) -> None:
        while not self._closed:
            try:
                near = self._listener.accept()[0]
            except OSError:
                return
            self.accepted += 1
            try:
                far = socket.create_connection(("127.0.0.1", self._target_port))
            except OSError:
                _reset(near)
                continue
            with self._lock:
                self._sockets |= {near, far}
            for way in ((near, far, True), (far, near, False)):
                thread = threading.Thread(target=self._pump, args=way)
                self._threads.append(thread)
                thread.start()

    def _pump(self, source: socket.socket, sink: socket.socket, to_camera: bool) -> None:
        with suppress(OSError):
            while data := source.recv(_CHUNK_BYTES):
                self._flowing.wait()
                sink.sendall(self._passed_on(data, to_camera))
        # The end of one side is the end of the connection, but not before the traffic flows.
        self._flowing.wait()
        with self._lock:
            self._sockets -= {source, sink}
        for each in (source, sink):
            with suppress(OSError):
                each.shutdown(socket.SHUT_RDWR)
            each.close()

    def _passed_on(self, data: bytes, to_camera: bool) -> bytes:
        del to_camera
        return data


class LossyRelay(TcpProxy):
    """Passes RTSP on, and its media over UDP with some packets lost.

    It writes its own ports into the Transport headers, so that both sides send through it.

    Args:
        loss: 0 to 1, the share of packets of media that are dropped, by a fixed random sequence.

    Attributes:
        passed, lost: numbers of packets of media.
    """

    _TRANSPORT = re.compile(rb"(client_port|server_port)=(\d+)-(\d+)")

    def __init__(self, target_port: int, *, loss: float = 0.05) -> None:
        self.passed = self.lost = 0
        self.loss = loss
        self._random = random.Random(7)  # noqa: S311 - the same packets are lost in each run
        self._peers: dict[bytes, tuple[int, int]] = {}
        first = next(p for p in iter(lambda: free_ports(1)[0], None) if p % 2 == 0)
        self._media = [_udp(first), _udp(first + 1)]
        self._relaying = threading.Thread(target=self._relay)
        self._relaying.start()
        super().__init__(target_port)

    def close(self) -> None:
        super().close()
        self._relaying.join()
        for each in self._media:
            each.close()

    def _passed_on(self, data: bytes, to_camera: bool) -> bytes:
        """The ports of RTP and RTCP; each header comes in one piece on loopback."""
        ports = b"%d-%d" % tuple(each.getsockname()[1] for each in self._media)

        def replace(match: re.Match[bytes]) -> bytes:
            name = match[1]
            # The server repeats the client's ports, which here are the relay's.
            if name == b"server_port" or to_camera:
                self._peers[name] = int(match[2]), int(match[3])
                return name + b"=" + ports
            return name + b"=%d-%d" % self._peers[name]

        return self._TRANSPORT.sub(replace, data)

    def _relay(self) -> None:
        with selectors.DefaultSelector() as ready:
            for at, each in enumerate(self._media):
                ready.register(each, selectors.EVENT_READ, at)
            while not getattr(self, "_closed", False):
                for key, _ in ready.select(0.1):
                    self._relay_packet(self._media[key.data], key.data)

    def _relay_packet(self, media: socket.socket, at: int) -> None:
        data, (_, port) = media.recvfrom(_CHUNK_BYTES)
        client, server = (self._peers.get(name) for name in (b"client_port", b"server_port"))
        if client is None:
            return
        if at == 0 and port != client[0]:
            if self._random.random() < self.loss:
                self.lost += 1
                return
            self.passed += 1
        to = client if port != client[at] else server
        if to is not None and self._flowing.is_set():
            with suppress(OSError):
                media.sendto(data, ("127.0.0.1", to[at]))


class SilentPort:
    """Accepts every connection and never sends a byte."""

    def __init__(self) -> None:
        (self.port,) = free_ports(1)
        # The kernel accepts; nobody reads.
        self._listener = _listener(self.port, backlog=512)

    def close(self) -> None:
        self._listener.close()

    def __enter__(self) -> SilentPort:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


class DroppingPort:
    """Drops every SYN, as a host that is off or a firewall does, by a full queue of connections."""

    def __init__(self) -> None:
        (self.port,) = free_ports(1)
        self._listener = _listener(self.port, backlog=0)
        self._waiting = [socket.socket() for _ in range(4)]
        for each in self._waiting:
            each.setblocking(False)
            each.connect_ex(("127.0.0.1", self.port))

    def close(self) -> None:
        for each in (*self._waiting, self._listener):
            each.close()

    def __enter__(self) -> DroppingPort:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


class RedirectingPort:
    """Redirects every request of RTSP and HTTP.

    Args:
        location: to which address.
        host: an address of loopback to listen at.

    Attributes:
        location: as given, or as set later.
        requests: what has come.
    """

    def __init__(self, location: str, host: str = "127.0.0.1") -> None:
        (self.port,) = free_ports(1)
        self.requests: list[bytes] = []
        self.location = location
        self._clients: list[socket.socket] = []
        self._listener = _listener(self.port, host=host)
        self._threads = [threading.Thread(target=self._accept)]
        self._threads[0].start()

    def close(self) -> None:
        _reset(self._listener)
        self._threads[0].join()
        for client in self._clients:
            _reset(client)
        for thread in self._threads:
            thread.join()

    def __enter__(self) -> RedirectingPort:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _accept(self) -> None:
        with suppress(OSError):
            while True:
                client = self._listener.accept()[0]
                self._clients.append(client)
                self._threads.append(threading.Thread(target=self._redirect, args=(client,)))
                self._threads[-1].start()

    def _redirect(self, client: socket.socket) -> None:
        with suppress(OSError):
            while request := client.recv(_CHUNK_BYTES):
                self.requests.append(request)
                sequence = re.search(rb"(?i)CSeq: *(\d+)", request)
                client.sendall(
                    (b"HTTP/1.1" if sequence is None else b"RTSP/1.0")
                    + b" 302 Found\r\nContent-Length: 0\r\n"
                    + (b"" if sequence is None else b"CSeq: %s\r\n" % sequence[1])
                    + f"Location: {self.location}\r\n\r\n".encode()
                )


def _listener(port: int, backlog: int = 32, host: str = "127.0.0.1") -> socket.socket:
    made = socket.socket()
    made.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    made.bind((host, port))
    made.listen(backlog)
    return made


def _udp(port: int) -> socket.socket:
    made = socket.socket(type=socket.SOCK_DGRAM)
    made.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 1 << 20)
    made.bind(("127.0.0.1", port))
    return made


def _reset(each: socket.socket) -> None:
    """Close with RST rather than FIN, and wake whoever blocks in it."""
    with suppress(OSError):
        each.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    with suppress(OSError):
        each.shutdown(socket.SHUT_RDWR)
    each.close()
