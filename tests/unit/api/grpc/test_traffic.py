"""A message that does not come ends its call, and messages on their way do not fill the memory."""

from __future__ import annotations

import gzip
import threading
import time
import zlib
from contextlib import suppress
from typing import TYPE_CHECKING, NoReturn

import pytest
from support.waiting import TIMEOUT_S, wait_until

from edge_server.api.admission import MIB, ByteBudget
from edge_server.api.grpc.methods import unary
from edge_server.api.grpc.traffic import COMPRESSED, SLOW_READER_S, Traffic
from edge_server.errors import InvalidRequest, Unavailable, Unsupported

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    import grpc


class Call:
    """A call whose message never comes, until it is cancelled."""

    def __init__(self, traffic: Traffic) -> None:
        self.cancelled = threading.Event()
        reading = threading.Event()
        self._thread = threading.Thread(target=self._read, args=(traffic, reading))
        self._thread.start()
        assert reading.wait(TIMEOUT_S)

    def _read(self, traffic: Traffic, reading: threading.Event) -> None:
        def requests() -> Iterator[bytes]:
            reading.set()
            assert self.cancelled.wait(TIMEOUT_S)
            yield b"too late"

        traffic.read(requests(), self)

    def cancel(self) -> None:
        self.cancelled.set()

    def close(self) -> None:
        self.cancel()
        self._thread.join()


class Reader:
    """A call that has its response, and whose client does not take it."""

    def __init__(self) -> None:
        self.cancelled = False
        self.refused = ""
        self._when_over: list[Callable[[], None]] = []

    def add_callback(self, callback: Callable[[], None]) -> bool:
        self._when_over.append(callback)
        return True

    def abort(self, code: grpc.StatusCode, text: str) -> NoReturn:
        self.refused = f"{code.name}: {text}"
        raise RuntimeError

    def cancel(self) -> None:
        self.cancelled = True
        for callback in self._when_over:
            callback()


class Memory:
    """Of a process; the test sets how much, and gives some of it back."""

    def __init__(self) -> None:
        self.bytes = 1000 * MIB
        self.given_back = 0

    def __call__(self) -> int:
        return self.bytes

    def give_back(self) -> None:
        self.bytes -= 20 * MIB
        self.given_back += 1


@pytest.fixture
def memory() -> Memory:
    return Memory()


class Waiting:
    """How many calls wait for a thread; the test sets it."""

    def __init__(self) -> None:
        self.calls = 0

    def __call__(self) -> int:
        return self.calls


@pytest.fixture
def waiting() -> Waiting:
    return Waiting()


@pytest.fixture
def traffic(memory: Memory, waiting: Waiting) -> Traffic:
    """With room for two of the longest messages; it looks when it ticks."""
    return Traffic(
        ByteBudget(8 * MIB),
        3.0,
        4 * MIB,
        waiting=waiting,
        resident=memory,
        give_back=memory.give_back,
    )


def test_a_message_that_does_not_come_in_time_ends_its_call(traffic: Traffic) -> None:
    call = Call(traffic)
    now = time.monotonic()
    traffic.tick(now + 1)
    assert not call.cancelled.is_set()
    traffic.tick(now + 3.1)
    assert call.cancelled.is_set()
    call.close()
    traffic.tick(now + 100)  # nothing is left of it


def test_it_has_less_time_while_calls_wait_for_its_thread(
    traffic: Traffic, waiting: Waiting
) -> None:
    call = Call(traffic)
    traffic.tick(time.monotonic() + 1)
    assert not call.cancelled.is_set()
    waiting.calls = 1
    traffic.tick(time.monotonic() + 1)
    assert call.cancelled.is_set()
    call.close()


def answered(traffic: Traffic, reader: Reader, size_bytes: int) -> bytes:
    """The response of a call with such a response, which `reader` does not take yet."""
    handler = unary(lambda _request, _call: bytes(size_bytes), "/s/m", traffic)
    assert handler.stream_unary is not None
    response: bytes = handler.stream_unary(iter([b""]), reader)
    return response


@pytest.mark.parametrize("size_bytes", [4 * MIB, 60_000])
def test_a_response_counts_until_it_is_read_within_its_time(
    traffic: Traffic, size_bytes: int
) -> None:
    calls = [Reader(), Reader()]
    for call in calls:
        assert answered(traffic, call, size_bytes) == bytes(size_bytes)
    assert traffic.budget.used_bytes == 2 * size_bytes
    calls[0].cancel()  # its client took it
    assert traffic.budget.used_bytes == size_bytes
    traffic.tick(time.monotonic() + 1)
    assert not calls[1].cancelled
    traffic.tick(time.monotonic() + 3.1)
    assert calls[1].cancelled
    assert traffic.budget.used_bytes == 0


def test_responses_for_which_there_is_no_room_are_refused(traffic: Traffic) -> None:
    readers = [Reader() for _ in range(200)]
    for reader in readers:
        with suppress(RuntimeError):
            answered(traffic, reader, 60_000)
    assert sum(not reader.refused for reader in readers) == 8 * MIB // 60_000
    assert traffic.budget.used_bytes <= 8 * MIB


def test_a_streams_response_counts_while_it_is_written_and_has_to_be_read(
    traffic: Traffic,
) -> None:
    stream = Reader()
    with traffic.sending(bytes(4 * MIB), stream):
        assert traffic.budget.room_bytes == 4 * MIB
    assert traffic.budget.room_bytes == 8 * MIB
    traffic.tick(time.monotonic() + 100)
    assert not stream.cancelled
    with traffic.sending(bytes(1), stream):
        traffic.tick(time.monotonic() + SLOW_READER_S - 1)
        assert not stream.cancelled
        traffic.tick(time.monotonic() + SLOW_READER_S + 0.1)
        assert stream.cancelled


def test_what_is_inside_leaves_less_room_for_what_comes(traffic: Traffic, memory: Memory) -> None:
    calls = [Call(traffic) for _ in range(2)]
    now = time.monotonic() + 0.1
    traffic.tick(now - 0.1)
    memory.bytes += 17 * MIB
    traffic.budget.take(4 * MIB)
    traffic.tick(now)
    assert [call.cancelled.is_set() for call in calls] == [False, True]
    for call in calls:
        call.close()


def test_the_youngest_go_when_more_are_on_their_way_than_there_is_memory_for(
    traffic: Traffic, memory: Memory
) -> None:
    calls = [Call(traffic) for _ in range(5)]
    now = time.monotonic() + 0.1
    traffic.tick(now - 0.1)  # none of them is long yet
    memory.bytes += 7 * MIB
    traffic.tick(now)
    assert not any(call.cancelled.is_set() for call in calls)
    memory.bytes += 2 * MIB
    traffic.tick(now)
    assert [call.cancelled.is_set() for call in calls] == [False, False, True, True, True]
    for call in calls:
        call.close()


def test_what_a_late_look_finds_unread_is_not_taken_for_large(
    traffic: Traffic, memory: Memory
) -> None:
    now = time.monotonic()
    traffic.tick(now)
    calls = [Call(traffic) for _ in range(5)]
    memory.bytes += 9 * MIB
    traffic.tick(now + 1)
    assert not any(call.cancelled.is_set() for call in calls)
    memory.bytes += 9 * MIB
    traffic.tick(now + 1.1)
    assert [call.cancelled.is_set() for call in calls] == [False, False, True, True, True]
    for call in calls:
        call.close()


def test_what_counted_messages_take_is_not_taken_for_what_arrives(
    traffic: Traffic, memory: Memory
) -> None:
    calls = [Call(traffic) for _ in range(5)]
    now = time.monotonic() + 0.1
    traffic.tick(now - 0.1)
    traffic.budget.take(8 * MIB)
    memory.bytes += 3 * 8 * MIB
    traffic.tick(now)
    traffic.budget.give(8 * MIB)
    traffic.tick(now + 0.05)  # its memory goes a moment later
    assert not any(call.cancelled.is_set() for call in calls)
    traffic.tick(now + 0.1)
    assert [call.cancelled.is_set() for call in calls] == [False, False, True, True, True]
    for call in calls:
        call.close()


def test_what_else_fills_the_memory_ends_no_call(traffic: Traffic, memory: Memory) -> None:
    calls = [Call(traffic) for _ in range(2)]
    for _ in range(5):
        memory.bytes += 1000 * MIB
        traffic.tick(time.monotonic() + 1)
    assert not any(call.cancelled.is_set() for call in calls)
    for call in calls:
        call.close()


def test_many_calls_are_logged_in_one_line(
    traffic: Traffic, caplog: pytest.LogCaptureFixture
) -> None:
    now = time.monotonic()
    for seconds in (10, 20):
        calls = [Call(traffic) for _ in range(3)]
        traffic.tick(now + seconds)
        for call in calls:
            call.close()
    assert [record.message for record in caplog.records] == [
        "grpc: 3 calls were ended: their messages got stuck (grpc.message_timeout_ms, "
        "grpc.max_pending_bytes), or their tokens are no longer valid"
    ]


def given_back_at(traffic: Traffic, memory: Memory, seconds: range) -> list[int]:
    """The seconds from now on at which memory goes back to the kernel."""
    now, at = time.monotonic(), []
    for second in seconds:
        before = memory.given_back
        traffic.tick(now + second)
        if memory.given_back > before:
            at.append(second)
    return at


def test_memory_goes_back_once_all_is_quiet(traffic: Traffic, memory: Memory) -> None:
    memory.bytes += 30 * MIB
    traffic.budget.take(MIB)
    assert given_back_at(traffic, memory, range(5)) == []
    traffic.budget.give(MIB)
    # 20 MiB go back; of the 10 that are left one half counts as in use.
    assert given_back_at(traffic, memory, range(5, 40)) == [6]
    memory.bytes += 2 * MIB
    assert given_back_at(traffic, memory, range(40, 60)) == []


def test_memory_goes_back_again_where_much_was_still_in_use(
    traffic: Traffic, memory: Memory
) -> None:
    memory.bytes += 100 * MIB
    assert given_back_at(traffic, memory, range(3, 120)) == [3, 14, 25]


def test_what_connections_held_for_a_while_is_no_rest(traffic: Traffic, memory: Memory) -> None:
    memory.bytes += 400 * MIB
    assert len(given_back_at(traffic, memory, range(3, 120))) > 3
    memory.bytes = 1000 * MIB  # they are closed
    traffic.tick(time.monotonic() + 121)
    memory.bytes += 100 * MIB
    assert len(given_back_at(traffic, memory, range(122, 240))) == 3


def test_memory_goes_back_now_and_then_under_load(traffic: Traffic, memory: Memory) -> None:
    memory.bytes += 100 * MIB
    traffic.budget.take(MIB)
    assert given_back_at(traffic, memory, range(25)) == [10, 21]


def test_other_limits_apply_at_once(traffic: Traffic) -> None:
    call = Call(traffic)
    now = time.monotonic()
    traffic.change(MIB, 9.0)
    traffic.tick(now + 8)
    assert not call.cancelled.is_set()
    traffic.change(MIB, 1.0)
    traffic.tick(now + 8)
    assert call.cancelled.is_set()
    call.close()
    traffic.budget.take(MIB)
    with pytest.raises(Unavailable, match=f"and of {MIB} at most"):
        traffic.budget.take(MIB)


def test_a_stream_ends_once_its_token_is_revoked(traffic: Traffic) -> None:
    stream, over = Reader(), Reader()
    reason: list[str] = []
    for each in (stream, over):
        traffic.end_once(each, lambda: reason)
    over.cancel()
    over.cancelled = False
    now = time.monotonic()
    traffic.tick(now + 2)
    assert not stream.cancelled
    reason.append("the token is not valid")
    traffic.tick(now + 4)
    assert (stream.cancelled, over.cancelled) == (True, False)


class Counted:
    """A call that holds so many bytes."""

    cancelled = False

    def __init__(self) -> None:
        self.bytes = 0

    def count(self, size_bytes: int) -> None:
        if self.bytes + size_bytes > MIB:
            raise Unavailable("no room")
        self.bytes += size_bytes

    def when_cancelled(self, callback: object) -> None: ...


@pytest.mark.parametrize(
    ("compress", "encoding"), [(gzip.compress, "gzip"), (zlib.compress, "deflate")]
)
def test_a_compressed_request_is_refused_unless_the_settings_bound_it(
    traffic: Traffic, compress: Callable[[bytes], bytes], encoding: str
) -> None:
    data = b"lanes" * 100_000
    request = compress(data)
    assert request.startswith(COMPRESSED)
    with pytest.raises(
        Unsupported, match=f"compressed with {encoding}.*or set grpc.max_decompressed_bytes"
    ):
        traffic.decompressed(request, Counted())
    bounded = Traffic(longest_decompressed_bytes=2 * MIB)
    call = Counted()
    assert bounded.decompressed(request, call) == data
    assert len(data) - 256 * 1024 < call.bytes <= len(data)
    with pytest.raises(Unavailable, match="no room"):
        bounded.decompressed(compress(bytes(3 * MIB // 2)), Counted())
    less = Traffic(longest_decompressed_bytes=1000)
    with pytest.raises(InvalidRequest, match=r"more than 1000 bytes.*grpc\.max_decompressed_bytes"):
        less.decompressed(request, Counted())
    for damaged in (request[:-5], request[:2] + b"damaged"):
        with pytest.raises(InvalidRequest, match=f"{encoding}"):
            bounded.decompressed(damaged, Counted())


@pytest.mark.parametrize("level", range(-1, 10))
def test_every_header_of_zlib_is_known_as_compressed(level: int) -> None:
    assert zlib.compress(b"lanes", level).startswith(COMPRESSED)


def test_memory_that_no_call_has_taken_goes_back_too(
    traffic: Traffic, memory: Memory, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("edge_server.api.grpc.traffic._MOST_UNREST_S", 0.01)
    monkeypatch.setattr("edge_server.api.grpc.traffic._QUIET_S", 0.0)
    traffic.start()
    memory.bytes += 100 * MIB  # frames that are no call's
    wait_until(lambda: memory.given_back)
    traffic.close()
