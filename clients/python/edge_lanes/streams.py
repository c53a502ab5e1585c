"""Lanes and events over gRPC, across restarts of the daemon."""

from __future__ import annotations

import queue
import threading
from typing import TYPE_CHECKING

import grpc

from edge_lanes.reading import SILENT_AFTER_S, Reading, reading_of, readings
from edge_lanes.v1 import events_pb2, lane_service_pb2, lane_service_pb2_grpc

if TYPE_CHECKING:
    from collections.abc import Generator, Iterable
    from pathlib import Path

# Responses that may be on their way: with more, lanes grow old in the connection.
WINDOW = 2
# A device that lost its power closes no connection: a ping that is not answered does.
PINGS = (
    ("grpc.keepalive_time_ms", 10_000),
    ("grpc.keepalive_timeout_ms", 5_000),
    ("grpc.http2.ping_timeout_ms", 5_000),  # what newer versions of grpcio go by
    ("grpc.http2.max_pings_without_data", 0),
)
_SHORTEST_WAIT_S, _LONGEST_WAIT_S = 0.5, 5.0
# The daemon restarts or its streams are all taken, or a connection has reached its age or was slow.
_PASSING = {
    grpc.StatusCode.UNAVAILABLE,
    grpc.StatusCode.RESOURCE_EXHAUSTED,
    grpc.StatusCode.CANCELLED,
    grpc.StatusCode.DEADLINE_EXCEEDED,
}


# What is put here is sent; None ends it.
_Requests = queue.SimpleQueue["lane_service_pb2.StreamLanesRequest | None"]


class _Connection:
    """A channel, and the pauses between the calls on it."""

    def __init__(
        self, address: str, credentials: grpc.ChannelCredentials | None, token: str | None
    ) -> None:
        if credentials is None:
            self.channel = grpc.insecure_channel(address, PINGS)
        else:
            self.channel = grpc.secure_channel(address, credentials, PINGS)
        self.stub = lane_service_pb2_grpc.LaneServiceStub(self.channel)
        self.metadata = (("authorization", f"Bearer {token}"),) if token else ()
        self.error = ""
        self._wait_s = _SHORTEST_WAIT_S

    def heard(self) -> None:
        """Note a response: the next pause is a short one."""
        self.error, self._wait_s = "", _SHORTEST_WAIT_S

    def ended(self, error: grpc.RpcError) -> bool:
        """Note the error of a call; return whether another call may succeed."""
        self.error = f"{error.code().name}: {error.details()}"
        return error.code() in _PASSING

    def pause(self, stopped: threading.Event) -> None:
        """Wait before the next call, each time longer until a response comes."""
        stopped.wait(self._wait_s)
        self._wait_s = min(2 * self._wait_s, _LONGEST_WAIT_S)


class _Receiver:
    """Keeps a call of StreamLanes open, on a thread; responses wait for the reader."""

    def __init__(self, connection: _Connection, first: lane_service_pb2.StreamLanesRequest) -> None:
        self._connection = connection
        self._first = first
        self._arrived: queue.SimpleQueue[
            tuple[lane_service_pb2.StreamLanesResponse, _Requests] | Exception
        ] = queue.SimpleQueue()
        self._used: tuple[int, _Requests] | None = None
        self._call: grpc.Call | None = None
        self._stopped = threading.Event()
        threading.Thread(target=self._receive, name="edge_lanes", daemon=True).start()

    def next(self, timeout_s: float) -> Reading | Exception:
        """Acknowledge the response that the reader has used, and return the next one.

        Raises:
            queue.Empty: none arrived within `timeout_s`.
        """
        if self._used is not None:
            sequence, requests = self._used
            requests.put(lane_service_pb2.StreamLanesRequest(acknowledged=sequence))
            self._used = None
        arrived = self._arrived.get(timeout=timeout_s)
        if isinstance(arrived, Exception):
            return arrived
        response, requests = arrived
        self._used = response.sequence, requests
        return reading_of(response.frame, response.lost)

    def stop(self) -> None:
        self._stopped.set()
        if self._call is not None:
            self._call.cancel()

    def _receive(self) -> None:
        connection = self._connection
        while not self._stopped.is_set():
            requests: _Requests = queue.SimpleQueue()
            requests.put(self._first)
            call = connection.stub.StreamLanes(
                iter(requests.get, None), metadata=connection.metadata
            )
            self._call = call
            try:
                for response in call:
                    connection.heard()
                    self._arrived.put((response, requests))
            except grpc.RpcError as error:
                if not connection.ended(error):
                    self._arrived.put(error)
                    return
            finally:
                requests.put(None)  # ends the thread that sends the requests of this call
            connection.pause(self._stopped)


class LaneStream:
    """The newest lanes of the chosen cameras, as `Reading`s; it connects again by itself.

    A reader that is slower than its cameras gets the newest frame of each, never a queue of old
    ones.

    Args:
        address: HOST:PORT, or unix:PATH.
        cameras: names; all cameras where it is empty.
        max_hz: readings of each camera in a second at most, 0 for every frame.
        silent_after_s: a reading with State.SILENT comes after so long without another.
        credentials: of TLS; None is plain text.
        token: for the scope `read`, where the device has tokens.

    Raises:
        grpc.RpcError: during the iteration, an error that no other attempt passes, such as
            NOT_FOUND for a camera that is not in the settings, or UNAUTHENTICATED.
    """

    def __init__(
        self,
        address: str,
        cameras: Iterable[str] = (),
        *,
        max_hz: float = 0.0,
        silent_after_s: float = SILENT_AFTER_S,
        credentials: grpc.ChannelCredentials | None = None,
        token: str | None = None,
    ) -> None:
        self._first = lane_service_pb2.StreamLanesRequest(
            cameras=list(cameras), max_hz=max_hz, window=WINDOW
        )
        self._connection = _Connection(address, credentials, token)
        self._silent_after_s = silent_after_s

    def __iter__(self) -> Generator[Reading]:
        receiver = _Receiver(self._connection, self._first)
        try:
            yield from readings(receiver.next, lambda: self._connection.error, self._silent_after_s)
        finally:
            receiver.stop()


class EventStream:
    """Every event once, in order, across restarts of the daemon and of this program.

    Args:
        address: HOST:PORT, or unix:PATH.
        last: a file that keeps the last event that was dealt with; where it is missing, the stream
            begins with the oldest event that the device keeps. An event counts as dealt with when
            the next one is asked for.
        credentials, token: as of `LaneStream`.

    Raises:
        grpc.RpcError: during the iteration, an error that no other attempt passes; OUT_OF_RANGE
            where the device's events were erased: remove the file to begin anew.
    """

    def __init__(
        self,
        address: str,
        last: Path,
        *,
        credentials: grpc.ChannelCredentials | None = None,
        token: str | None = None,
    ) -> None:
        self._last = last
        self._connection = _Connection(address, credentials, token)

    def __iter__(self) -> Generator[events_pb2.Event]:
        connection = self._connection
        while True:
            kept = self._last.read_text() if self._last.exists() else "0"
            after_id, _, log = kept.partition(" ")
            request = lane_service_pb2.StreamEventsRequest(after_id=int(after_id), log=log)
            call = connection.stub.StreamEvents(request, metadata=connection.metadata)
            try:
                for response in call:
                    connection.heard()
                    yield response.event
                    self.keep(response.event)
            except grpc.RpcError as error:
                if not connection.ended(error):
                    raise
            finally:
                call.cancel()
            connection.pause(threading.Event())

    def keep(self, event: events_pb2.Event) -> None:
        """Keep that `event` was dealt with, before the next one is asked for."""
        # Replaced as a whole, so that it is never empty where the power fails.
        new = self._last.with_name(f"{self._last.name}.new")
        new.write_text(f"{event.id} {event.log}")
        new.replace(self._last)
