"""A stream's responses keep their order, its memory is bounded, and its end is notified by all."""

from __future__ import annotations

import sys
import threading
import weakref
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING

import numpy as np
import pytest
from support.waiting import TIMEOUT_S, wait_until
from tritonclient.grpc import service_pb2 as pb

from edge_server.api.admission import ByteBudget
from edge_server.api.grpc.stream import InferStream
from edge_server.errors import Cancelled, InternalError, NotFound, Unavailable
from edge_server.requests import InferResponse
from edge_server.tensors import Tensor

if TYPE_CHECKING:
    from collections.abc import Iterator

    from edge_server.api.grpc.stream import StreamRequest


class Client:
    """Sends requests as they are calls for, and notes that they are."""

    def __init__(self, *data: bytes) -> None:
        self._data = data
        self.noticed = threading.Semaphore(0)

    def __iter__(self) -> Iterator[bytes]:
        for data in self._data:
            self.noticed.release()
            yield data


class Models:
    """Takes requests as a stream gives them: the data is the id; `d…` is decoupled."""

    def __init__(self) -> None:
        self.taken: dict[str, StreamRequest] = {}
        self.received = threading.Condition()

    def submit(self, data: bytes, stream_request: StreamRequest) -> None:
        stream_request.id = data.decode()
        if stream_request.id.startswith("unknown"):
            raise NotFound(f"no {stream_request.id}")
        if stream_request.id.startswith("odd"):
            raise ZeroDivisionError("odd")
        stream_request.decoupled = stream_request.id.startswith("d")
        stream_request.take_place()
        with self.received:
            self.taken[stream_request.id] = stream_request
            self.received.notify_all()

    def wait_for(self, *ids: str) -> list[StreamRequest]:
        with self.received:
            assert self.received.wait_for(lambda: self.taken.keys() >= set(ids), TIMEOUT_S)
        return [self.taken[each] for each in ids]


def response(stream_request: StreamRequest) -> InferResponse:
    return InferResponse("m", "1", stream_request.id, {})


def read(written: bytes) -> tuple[str, str]:
    """The id and the error of a written response."""
    message = pb.ModelStreamInferResponse.FromString(written)
    return message.infer_response.id, message.error_message


@pytest.fixture
def pool() -> Iterator[ThreadPoolExecutor]:
    with ThreadPoolExecutor(1) as made:
        yield made


def test_responses_out_of_order_are_sent_in_order(pool: ThreadPoolExecutor) -> None:
    models = Models()
    stream = InferStream(models.submit)
    written = pool.submit(
        lambda: [read(each) for each in stream.responses(iter([b"1", b"2", b"3"]))]
    )
    for stream_request in reversed(models.wait_for("1", "2", "3")):
        stream_request.respond(response(stream_request), True)
    assert written.result(TIMEOUT_S) == [("1", ""), ("2", ""), ("3", "")]


def test_a_decoupled_models_responses_wait_for_no_other(pool: ThreadPoolExecutor) -> None:
    models = Models()
    stream = InferStream(models.submit)
    responses = stream.responses(iter([b"1", b"d2"]))
    first = pool.submit(next, responses)
    one, two = models.wait_for("1", "d2")
    two.respond(response(two), False)
    assert read(first.result(TIMEOUT_S)) == ("d2", "")
    two.respond(None, True)
    one.respond(response(one), True)
    assert [read(each) for each in responses] == [("1", "")]


def test_errors_are_sent_in_their_turn_and_with_their_id() -> None:
    models = Models()

    def submit(data: bytes, stream_request: StreamRequest) -> None:
        models.submit(data, stream_request)
        stream_request.respond(Cancelled("") if data == b"2" else response(stream_request), True)

    stream = InferStream(submit)
    requests = iter([b"1", b"unknown", b"2", b"odd", b"3"])
    assert [read(each) for each in stream.responses(requests)] == [
        ("1", ""),
        ("unknown", "no unknown"),
        ("2", "Cancelled"),
        ("odd", "ZeroDivisionError: odd"),
        ("3", ""),
    ]


def test_the_first_error_ends_a_stream_that_wants_it_so() -> None:
    stream = InferStream(Models().submit, errors_end_it=True)
    with pytest.raises(NotFound, match="no unknown"):
        list(stream.responses(iter([b"unknown"])))
    assert stream.over


def test_a_model_that_ends_without_a_response_is_an_error() -> None:
    def submit(data: bytes, stream_request: StreamRequest) -> None:
        stream_request.take_place()
        stream_request.respond(None, True)

    (written,) = InferStream(submit).responses(iter([b"1"]))
    assert "ended without a response" in read(written)[1]


def test_no_more_requests_are_read_than_may_wait(pool: ThreadPoolExecutor) -> None:
    models = Models()
    client = Client(*(str(place).encode() for place in range(100)))
    stream = InferStream(models.submit)
    written = pool.submit(lambda: [read(each)[0] for each in stream.responses(iter(client))])
    models.wait_for(*map(str, range(16)))
    for _ in range(17):
        assert client.noticed.acquire(timeout=TIMEOUT_S)
    # One is read and held back; the next is not even calls for.
    assert not client.noticed.acquire(timeout=0.05)
    assert len(models.taken) == 16
    for place in range(100):
        (stream_request,) = models.wait_for(str(place))
        stream_request.respond(response(stream_request), True)
    assert written.result(TIMEOUT_S) == [str(place) for place in range(100)]


def test_a_client_that_reads_nothing_holds_a_model_up_for_a_while_only() -> None:
    models = Models()
    stream = InferStream(models.submit, slow_reader_s=0.05)
    responses = stream.responses(iter([b"d1"]))
    with ThreadPoolExecutor(1) as pool:
        received = pool.submit(next, responses)
        (stream_request,) = models.wait_for("d1")
        for _ in range(20):
            stream_request.respond(response(stream_request), False)
        # It hears of it at once, and does not wait as long for each further response.
        assert stream_request.cancelled
        received.result(TIMEOUT_S)
    with pytest.raises(Unavailable, match="no response was read"):
        list(responses)
    assert stream_request.cancelled


def test_the_end_of_a_stream_cancels_what_still_waits(pool: ThreadPoolExecutor) -> None:
    models = Models()
    stream = InferStream(models.submit)
    written = pool.submit(lambda: list(stream.responses(iter([b"1", b"2"]))))
    one, two = models.wait_for("1", "2")
    notified: list[str] = []
    one.when_cancelled(lambda: notified.append("1"))
    two.when_cancelled(lambda: notified.append("2"))
    one.respond(response(one), True)
    assert not two.cancelled
    stream.end()
    assert two.cancelled
    assert notified == ["2"]
    two.when_cancelled(lambda: notified.append("late"))
    assert notified == ["2", "late"]
    two.respond(InternalError("nobody hears"), True)
    written.result(TIMEOUT_S)


def test_a_closing_stream_responds_to_accepted_requests_and_ends_with_the_reason(
    pool: ThreadPoolExecutor,
) -> None:
    models = Models()
    stays = threading.Event()

    def requests() -> Iterator[bytes]:
        yield b"1"
        stays.wait(TIMEOUT_S)

    stream = InferStream(models.submit)
    responses = stream.responses(requests())
    first = pool.submit(next, responses)
    (stream_request,) = models.wait_for("1")
    stream.close()
    stream_request.respond(response(stream_request), True)
    assert read(first.result(TIMEOUT_S)) == ("1", "")
    with pytest.raises(Unavailable, match="shutting down"):
        next(responses)
    stays.set()


def test_a_request_that_a_closing_stream_no_longer_takes_does_not_end_it_with_ok(
    pool: ThreadPoolExecutor,
) -> None:
    models = Models()
    closed = threading.Event()

    def requests() -> Iterator[bytes]:
        yield b"1"
        closed.wait(TIMEOUT_S)
        yield b"2"

    stream = InferStream(models.submit)
    responses = stream.responses(requests())
    first = pool.submit(next, responses)
    (stream_request,) = models.wait_for("1")
    stream.close()
    readers = [each for each in threading.enumerate() if each.name == "grpc-stream"]
    closed.set()
    for reader in readers:
        reader.join(TIMEOUT_S)
    stream_request.respond(response(stream_request), True)
    assert read(first.result(TIMEOUT_S)) == ("1", "")
    with pytest.raises(Unavailable, match="shutting down"):
        next(responses)


def test_what_comes_after_the_end_is_not_kept(pool: ThreadPoolExecutor) -> None:
    models = Models()
    stream = InferStream(models.submit)
    written = pool.submit(list, stream.responses(iter([b"d1"])))
    (stream_request,) = models.wait_for("d1")
    stream.end()
    written.result(TIMEOUT_S)
    large = np.zeros(1)
    kept = weakref.ref(large)
    stream_request.respond(InferResponse("m", "1", "", {"x": Tensor(large)}), False)
    del large
    assert kept() is None


def test_a_stream_that_waits_keeps_no_request_and_no_response(pool: ThreadPoolExecutor) -> None:
    class Data:
        def __len__(self) -> int:
            return 1

    next_read, go_on = threading.Event(), threading.Event()
    data = [Data()]
    request_lives = weakref.ref(data[0])

    def requests() -> Iterator[bytes]:
        yield data.pop()
        next_read.set()
        assert go_on.wait(TIMEOUT_S)

    kept: list[weakref.ref[np.ndarray]] = []

    def submit(_: bytes, stream_request: StreamRequest) -> None:
        stream_request.take_place()
        values = np.zeros(1)
        kept.append(weakref.ref(values))
        stream_request.respond(InferResponse("m", "1", "", {"x": Tensor(values)}), True)

    stream = InferStream(submit)
    responses = stream.responses(requests())
    next(responses)
    assert next_read.wait(TIMEOUT_S)
    assert request_lives() is None
    waits = pool.submit(next, responses, None)
    wait_until(lambda: kept[0]() is None)
    go_on.set()
    assert waits.result(TIMEOUT_S) is None


def test_a_stream_does_not_end_while_a_last_response_waits_for_room() -> None:
    models = Models()
    stream = InferStream(models.submit)
    responses = stream.responses(iter([b"d1"]))
    with ThreadPoolExecutor(1) as pool:
        first = pool.submit(next, responses)
        (stream_request,) = models.wait_for("d1")
        stream_request.respond(response(stream_request), False)
        first.result(TIMEOUT_S)
        for _ in range(16):
            stream_request.respond(response(stream_request), False)
        entered = threading.Event()
        last = pool.submit(
            lambda: (entered.set(), stream_request.respond(response(stream_request), True))
        )
        assert entered.wait(TIMEOUT_S)
        usual = sys.getswitchinterval()
        sys.setswitchinterval(0.5)  # who waits for room gets no turn until this thread waits
        try:
            received = list(responses)
        finally:
            sys.setswitchinterval(usual)
        last.result(TIMEOUT_S)
    assert len(received) == 17


def test_a_refusal_does_not_keep_all_that_a_client_sent() -> None:
    def submit(data: bytes, stream_request: StreamRequest) -> None:
        raise NotFound(data.decode())

    (written,) = InferStream(submit).responses(iter([b"x" * 100_000]))
    assert len(read(written)[1]) == 4000


def test_responses_that_wait_count_until_they_are_sent(pool: ThreadPoolExecutor) -> None:
    models, budget = Models(), ByteBudget()
    stream = InferStream(models.submit, budget)
    responses = stream.responses(iter([b"d1", b"2"]))
    first = pool.submit(next, responses)
    decoupled, ordered = models.wait_for("d1", "2")
    read_bytes = budget.used_bytes
    large = InferResponse("m", "1", "", {"x": Tensor(np.zeros(10_000, np.uint8))})
    decoupled.respond(large, False)
    decoupled.respond(large, False)
    ordered.respond(large, True)
    first.result(TIMEOUT_S)
    assert budget.used_bytes == read_bytes + 30_000
    next(responses)  # the first one is sent
    assert budget.used_bytes == read_bytes + 20_000
    decoupled.respond(None, True)
    assert len(list(responses)) == 1
    assert budget.used_bytes == 0


def test_a_stream_that_is_cut_off_gives_back_what_its_responses_held(
    pool: ThreadPoolExecutor,
) -> None:
    models, budget = Models(), ByteBudget()
    stream = InferStream(models.submit, budget)
    written = pool.submit(list, stream.responses(iter([b"1", b"2"])))
    first, second = models.wait_for("1", "2")
    large = InferResponse("m", "1", "", {"x": Tensor(np.zeros(10_000, np.uint8))})
    second.respond(large, True)  # it waits for the first one
    stream.end()
    written.result(TIMEOUT_S)
    first.respond(large, True)
    assert budget.used_bytes == 0
