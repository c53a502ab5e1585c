"""A device without a daemon: sends frames and events as told, is killed, and loses its power."""

from __future__ import annotations

import contextlib
import socket
import threading
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Any

import grpc

from edge_lanes.v1 import events_pb2, lane_service_pb2, lane_service_pb2_grpc, lanes_pb2
from support.free_ports import free_ports

if TYPE_CHECKING:
    from collections.abc import Iterator
    from types import TracebackType


class LaneService(lane_service_pb2_grpc.LaneServiceServicer):
    """A stand-in for the daemon: sends frames with these numbers while they are acknowledged."""

    def __init__(self) -> None:
        self.acknowledged: list[int] = []
        self.events = [
            events_pb2.Event(id=number, log="a", text=f"event {number}") for number in (1, 2, 3)
        ]
        self.asked: list[tuple[int, str]] = []

    def StreamLanes(self, requests: Any, context: Any) -> Iterator[Any]:
        first = next(requests)
        if "absent" in first.cameras:
            context.abort(grpc.StatusCode.NOT_FOUND, "no camera 'absent'")
        free = threading.Semaphore(first.window)

        def listen() -> None:
            with contextlib.suppress(grpc.RpcError):  # the call has ended
                for request in requests:
                    self.acknowledged.append(request.acknowledged)
                    free.release()

        threading.Thread(target=listen, daemon=True).start()
        for number in range(1, 100):
            while not free.acquire(timeout=0.1):
                if not context.is_active():
                    return
            status = number % 5 or 1
            frame = lanes_pb2.LaneFrame(camera="front", frame_id=number, status=status)
            if status != lanes_pb2.FRAME_STATUS_OK:
                frame.reason_details.add(text=f"frame {number} is not well")
            yield lane_service_pb2.StreamLanesResponse(
                sequence=number, frame=frame, lost=number % 2
            )

    def StreamEvents(self, request: Any, context: Any) -> Iterator[Any]:
        self.asked.append((request.after_id, request.log))
        for event in self.events:
            if event.id > request.after_id:
                yield lane_service_pb2.StreamEventsResponse(event=event)


class StandIn:
    """Serves a `LaneService`, is killed, and serves again on the same port."""

    def __init__(self) -> None:
        (self.port,) = free_ports(1)
        self.service = LaneService()
        self.start()

    def start(self) -> None:
        self.server = grpc.server(ThreadPoolExecutor(4))
        lane_service_pb2_grpc.add_LaneServiceServicer_to_server(self.service, self.server)
        self.server.add_insecure_port(f"127.0.0.1:{self.port}")
        self.server.start()

    def stop(self) -> None:
        self.server.stop(0).wait()


class PowerCut:
    """Forwards connections to a port of this machine, and can forget those that are open.

    Neither end of a forgotten connection hears anything more, as when a device loses its power.
    """

    def __init__(self, port: int) -> None:
        self._target = "127.0.0.1", port
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.port: int = self._listener.getsockname()[1]
        self._open: list[socket.socket] = []
        self._forgotten = threading.Event()

    def __enter__(self) -> PowerCut:
        self._accepting = threading.Thread(target=self._accept)
        self._accepting.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()
        self._accepting.join()
        for each in self._open:
            each.close()

    def cut(self) -> None:
        """Forget the connections that are open; later ones are forwarded."""
        self._forgotten.set()
        self._forgotten = threading.Event()

    def _accept(self) -> None:
        with contextlib.suppress(OSError):  # the listener is closed
            while True:
                client, _ = self._listener.accept()
                try:
                    server = socket.create_connection(self._target)
                except ConnectionRefusedError:
                    client.close()
                    continue
                self._open += [client, server]
                for source, sink in ((client, server), (server, client)):
                    threading.Thread(
                        target=self._forward, args=(source, sink, self._forgotten), daemon=True
                    ).start()

    @staticmethod
    def _forward(source: socket.socket, sink: socket.socket, forgotten: threading.Event) -> None:
        with contextlib.suppress(OSError):  # an end is closed
            while data := source.recv(65536):
                if forgotten.is_set():
                    return
                sink.sendall(data)
            if not forgotten.is_set():
                sink.shutdown(socket.SHUT_WR)
