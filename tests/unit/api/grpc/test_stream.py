"""A stream's answers keep their order, its memory is bounded, and its end is heard by all."""

from __future__ import annotations

import sys
import threading
import time
import weakref
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING

import numpy as np
import pytest
from tritonclient.grpc import service_pb2 as pb

from edge_server.api.grpc.stream import InferStream
from edge_server.errors import Cancelled, InternalError, NotFound, Unavailable
from edge_server.requests import InferResponse
from edge_server.tensors import Tensor

if TYPE_CHECKING:
    from collections.abc import Iterator

    from edge_server.api.grpc.stream import StreamRequest

PATIENCE_S = 10.0


class Client:
    """Sends requests as they are asked for, and notes that they are."""

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
        self.told = threading.Condition()

    def submit(self, data: bytes, stream_request: StreamRequest) -> None:
        stream_request.id = data.decode()
        if stream_request.id.startswith("unknown"):
            raise NotFound(f"no {stream_request.id}")
        if stream_request.id.startswith("odd"):
            raise ZeroDivisionError("odd")
        stream_request.decoupled = stream_request.id.startswith("d")
        stream_request.take_place()
        with self.told:
            self.taken[stream_request.id] = stream_request
            self.told.notify_all()

    def wait_for(self, *ids: str) -> list[StreamRequest]:
        with self.told:
            assert self.told.wait_for(lambda: self.taken.keys() >= set(ids), PATIENCE_S)
        return [self.taken[each] for each in ids]


def answer(stream_request: StreamRequest) -> InferResponse:
    return InferResponse("m", "1", stream_request.id, {})


def read(written: bytes) -> tuple[str, str]:
    """The id and the error of a written answer."""
    message = pb.ModelStreamInferResponse.FromString(written)
    return message.infer_response.id, message.error_message


@pytest.fixture
def pool() -> Iterator[ThreadPoolExecutor]:
    with ThreadPoolExecutor(1) as made:
        yield made


def test_answers_that_come_out_of_order_are_told_in_order(pool: ThreadPoolExecutor) -> None:
    models = Models()
    stream = InferStream(models.submit)
    said = pool.submit(lambda: [read(each) for each in stream.responses(iter([b"1", b"2", b"3"]))])
    for stream_request in reversed(models.wait_for("1", "2", "3")):
        stream_request.respond(answer(stream_request), True)
    assert said.result(PATIENCE_S) == [("1", ""), ("2", ""), ("3", "")]


def test_a_decoupled_models_answers_wait_for_nobody(pool: ThreadPoolExecutor) -> None:
    models = Models()
    stream = InferStream(models.submit)
    answers = stream.responses(iter([b"1", b"d2"]))
    first = pool.submit(next, answers)
    one, two = models.wait_for("1", "d2")
    two.respond(answer(two), False)
    assert read(first.result(PATIENCE_S)) == ("d2", "")
    two.respond(None, True)
    one.respond(answer(one), True)
    assert [read(each) for each in answers] == [("1", "")]


def test_errors_are_told_in_their_turn_and_with_their_id() -> None:
    models = Models()

    def submit(data: bytes, stream_request: StreamRequest) -> None:
        models.submit(data, stream_request)
        stream_request.respond(Cancelled("") if data == b"2" else answer(stream_request), True)

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


def test_a_model_that_ends_without_an_answer_is_an_error() -> None:
    def submit(data: bytes, stream_request: StreamRequest) -> None:
        stream_request.take_place()
        stream_request.respond(None, True)

    (said,) = InferStream(submit).responses(iter([b"1"]))
    assert "ended without an answer" in read(said)[1]


def test_no_more_requests_are_read_than_may_wait(pool: ThreadPoolExecutor) -> None:
    models = Models()
    client = Client(*(str(place).encode() for place in range(100)))
    stream = InferStream(models.submit)
    said = pool.submit(lambda: [read(each)[0] for each in stream.responses(iter(client))])
    models.wait_for(*map(str, range(16)))
    for _ in range(17):
        assert client.noticed.acquire(timeout=PATIENCE_S)
    # One is read and held back; the next is not even asked for.
    assert not client.noticed.acquire(timeout=0.05)
    assert len(models.taken) == 16
    for place in range(100):
        (stream_request,) = models.wait_for(str(place))
        stream_request.respond(answer(stream_request), True)
    assert said.result(PATIENCE_S) == [str(place) for place in range(100)]


def test_a_client_that_reads_nothing_holds_a_model_up_for_a_while_only() -> None:
    models = Models()
    stream = InferStream(models.submit, slow_reader_s=0.05)
    answers = stream.responses(iter([b"d1"]))
    with ThreadPoolExecutor(1) as pool:
        told = pool.submit(next, answers)
        (stream_request,) = models.wait_for("d1")
        for _ in range(20):
            stream_request.respond(answer(stream_request), False)
        # It hears of it at once, and does not wait as long for each further answer.
        assert stream_request.cancelled
        told.result(PATIENCE_S)
    with pytest.raises(Unavailable, match="no answer was read"):
        list(answers)
    assert stream_request.cancelled


def test_the_end_of_a_stream_is_heard_by_what_still_waits(pool: ThreadPoolExecutor) -> None:
    models = Models()
    stream = InferStream(models.submit)
    said = pool.submit(lambda: list(stream.responses(iter([b"1", b"2"]))))
    one, two = models.wait_for("1", "2")
    heard: list[str] = []
    one.when_cancelled(lambda: heard.append("1"))
    two.when_cancelled(lambda: heard.append("2"))
    one.respond(answer(one), True)
    assert not two.cancelled
    stream.end()
    assert two.cancelled
    assert heard == ["2"]
    two.when_cancelled(lambda: heard.append("late"))
    assert heard == ["2", "late"]
    two.respond(InternalError("nobody hears"), True)
    said.result(PATIENCE_S)


def test_a_closing_stream_answers_what_it_took_and_then_says_why(
    pool: ThreadPoolExecutor,
) -> None:
    models = Models()
    stays = threading.Event()

    def requests() -> Iterator[bytes]:
        yield b"1"
        stays.wait(PATIENCE_S)

    stream = InferStream(models.submit)
    answers = stream.responses(requests())
    first = pool.submit(next, answers)
    (stream_request,) = models.wait_for("1")
    stream.close()
    stream_request.respond(answer(stream_request), True)
    assert read(first.result(PATIENCE_S)) == ("1", "")
    with pytest.raises(Unavailable, match="shutting down"):
        next(answers)
    stays.set()


def test_what_comes_after_the_end_is_not_kept(pool: ThreadPoolExecutor) -> None:
    models = Models()
    stream = InferStream(models.submit)
    said = pool.submit(list, stream.responses(iter([b"d1"])))
    (stream_request,) = models.wait_for("d1")
    stream.end()
    said.result(PATIENCE_S)
    large = np.zeros(1)
    kept = weakref.ref(large)
    stream_request.respond(InferResponse("m", "1", "", {"x": Tensor(large)}), False)
    del large
    assert kept() is None


def test_a_stream_that_waits_keeps_no_request_and_no_response(pool: ThreadPoolExecutor) -> None:
    class Data:
        def __len__(self) -> int:
            return 1

    asks_again, go_on = threading.Event(), threading.Event()
    data = [Data()]
    request_lives = weakref.ref(data[0])

    def requests() -> Iterator[bytes]:
        yield data.pop()  # type: ignore[misc]
        asks_again.set()
        assert go_on.wait(PATIENCE_S)

    responses: list[weakref.ref[np.ndarray]] = []

    def submit(_: bytes, stream_request: StreamRequest) -> None:
        stream_request.take_place()
        values = np.zeros(1)
        responses.append(weakref.ref(values))
        stream_request.respond(InferResponse("m", "1", "", {"x": Tensor(values)}), True)

    stream = InferStream(submit)
    answers = stream.responses(requests())
    next(answers)
    assert asks_again.wait(PATIENCE_S)
    assert request_lives() is None
    waits = pool.submit(next, answers, None)
    until = time.monotonic() + PATIENCE_S
    while responses[0]() is not None and time.monotonic() < until:
        time.sleep(0.01)
    assert responses[0]() is None
    go_on.set()
    assert waits.result(PATIENCE_S) is None


def test_a_stream_does_not_end_while_a_last_answer_waits_for_room() -> None:
    models = Models()
    stream = InferStream(models.submit)
    answers = stream.responses(iter([b"d1"]))
    with ThreadPoolExecutor(1) as pool:
        first = pool.submit(next, answers)
        (stream_request,) = models.wait_for("d1")
        stream_request.respond(answer(stream_request), False)
        first.result(PATIENCE_S)
        for _ in range(16):
            stream_request.respond(answer(stream_request), False)
        entered = threading.Event()
        last = pool.submit(
            lambda: (entered.set(), stream_request.respond(answer(stream_request), True))
        )
        assert entered.wait(PATIENCE_S)
        usual = sys.getswitchinterval()
        sys.setswitchinterval(0.5)  # who waits for room gets no turn until this thread waits
        try:
            told = list(answers)
        finally:
            sys.setswitchinterval(usual)
        last.result(PATIENCE_S)
    assert len(told) == 17


def test_a_refusal_does_not_keep_all_that_a_client_sent() -> None:
    def submit(data: bytes, stream_request: StreamRequest) -> None:
        raise NotFound(data.decode())

    (said,) = InferStream(submit).responses(iter([b"x" * 100_000]))
    assert len(read(said)[1]) == 4000
