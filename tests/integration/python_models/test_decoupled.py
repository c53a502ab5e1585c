"""Responses that come after execute returned: of senders, decoupled models and coroutines."""

from __future__ import annotations

import threading
from typing import Any

import numpy as np
import pytest
from support.callers import Caller
from support.waiting import TIMEOUT_S

from edge_server.requests import InferRequest
from edge_server.tensors import Tensor

Serve = Any
DECOUPLED = "model_transaction_policy { decoupled: true }"


def test_a_response_sender_responds_after_execute_returned(serve: Serve) -> None:
    served = serve(
        m="""
        def execute(self, requests):
            (r,) = requests
            threading.Thread(target=self.later, args=(r.get_response_sender(), x(r))).start()
            return [None]
        def later(self, sender, values):
            time.sleep(0.01)
            sender.send(y(values + 1), pb_utils.TRITONSERVER_RESPONSE_COMPLETE_FINAL)
        """
    )
    assert served.values("m", 1) == [2]


@pytest.mark.parametrize(
    ("calls", "text"),
    [
        ("s.send(y([1]), 8)", "Unable to send response. Unsupported flag provided."),
        (
            "s.send()",
            "Inference Response object must be provided when the response flags is set to zero.",
        ),
        (
            "s.send(flags=1)",
            "Unable to send response. Non-decoupled model cannot send complete final before "
            "sending a response.",
        ),
        (
            "s.send(y([1])), s.send(y([1]))",
            "Unable to send response. Non-decoupled model cannot send more than one response.",
        ),
        (
            "s.send(y([1]), 1), s.send(flags=1)",
            "Unable to send response. Response sender has been closed.",
        ),
        (
            "s.send(y([1]), 1), s.send(y([1]))",
            "Unable to send response. Non-decoupled model cannot send more than one response.",
        ),
    ],
)
def test_a_response_sender_refuses_in_tritons_words(
    serve: Serve, calls: str, text: str, caplog: pytest.LogCaptureFixture
) -> None:
    served = serve(
        m=f"""
        def execute(self, requests):
            s = requests[0].get_response_sender()
            try:
                {calls}
            except pb_utils.TritonModelException as error:
                pb_utils.Logger.log_error(f"said: {{error}}")
                raise
        """
    )
    served.submit("m", 1).all()
    assert f"said: {text}\n" in caplog.text


def test_a_decoupled_model_responds_as_often_as_it_likes_and_later(serve: Serve) -> None:
    served = serve(
        m=(
            DECOUPLED,
            """
            def execute(self, requests):
                for r in requests:
                    arguments = (r.get_response_sender(), x(r))
                    threading.Thread(target=self.count, args=arguments).start()
            def count(self, sender, values):
                for value in values:
                    sender.send(y([value]))
                sender.send(flags=pb_utils.TRITONSERVER_RESPONSE_COMPLETE_FINAL)
            """,
        )
    )
    many = [served.submit("m", *range(n)) for n in range(20)]
    assert [answers.values() for answers in many] == [[[i] for i in range(n)] for n in range(20)]


def test_a_decoupled_model_must_return_none(serve: Serve) -> None:
    served = serve(m=(DECOUPLED, "def execute(self, requests):\n    return []"))
    assert str(served.submit("m", 1).last()) == (
        "Failed to process the request(s) for model 'm_0', message: Python model 'm_0' is using "
        "the decoupled mode and the execute function must return None."
    )


def test_a_decoupled_model_without_a_response_ends(serve: Serve) -> None:
    served = serve(m=(DECOUPLED, "def execute(self, requests):\n    pass"))
    assert served.submit("m", 1).all() == [None]


def test_coroutines_run_on_one_loop_and_decoupled_ones_side_by_side(serve: Serve) -> None:
    served = serve(
        plain="""
        async def execute(self, requests):
            import asyncio
            await asyncio.sleep(0)
            self.loops = getattr(self, "loops", set()) | {id(asyncio.get_running_loop())}
            return [y([len(self.loops)]) for r in requests]
        """,
        many=(
            DECOUPLED,
            """
            waiting = []
            async def execute(self, requests):
                import asyncio
                (r,) = requests
                if not self.waiting:
                    self.waiting.append(asyncio.Event())
                    await self.waiting[0].wait()
                self.waiting[0].set()
                r.get_response_sender().send(y(x(r)), 1)
            """,
        ),
        fails=(DECOUPLED, "async def execute(self, requests):\n    raise KeyError('gone')"),
        cancels=(
            DECOUPLED,
            """
            async def execute(self, requests):
                import asyncio
                raise asyncio.CancelledError
            """,
        ),
    )
    assert [served.values("plain", 1) for _ in range(2)] == [[1], [1]]
    first = served.submit("many", 1)
    assert served.submit("many", 2).values() == [[2]]
    assert first.values() == [[1]]
    assert "message: KeyError: 'gone'\n\nAt:\n" in str(served.submit("fails", 1).last())
    assert "CancelledError" in str(served.submit("cancels", 1).last())


@pytest.mark.parametrize("config", ["", DECOUPLED])
def test_a_coroutine_that_exits_costs_its_own_request(serve: Serve, config: str) -> None:
    served = serve(
        m=(
            config,
            """
            async def execute(self, requests):
                (r,) = requests
                if x(r)[0]:
                    sys.exit(4)
                r.get_response_sender().send(y([os.getpid()]), 1)
            """,
        )
    )
    before = served.submit("m", 0).values()
    assert "SystemExit: 4" in str(served.submit("m", 1).last())
    assert served.submit("m", 0).values() == before


def test_a_model_sees_that_its_caller_has_gone(serve: Serve) -> None:
    served = serve(
        m=(
            DECOUPLED,
            """
            def execute(self, requests):
                sender = requests[0].get_response_sender()
                threading.Thread(target=self.until_cancelled, args=(requests[0], sender)).start()
            def until_cancelled(self, request, sender):
                sender.send(y([int(request.is_cancelled())]))
                while not sender.is_cancelled():
                    time.sleep(0.001)
                sender.send(y([int(request.is_cancelled())]), 1)
            """,
        )
    )
    caller = Caller()
    answers = served.submit("m", 1, cancellation=caller)
    answers.wait_for(1)
    caller.cancel()
    assert answers.values() == [[0], [1]]


def test_a_stream_of_large_responses_needs_no_more_memory_than_is_looked_at(serve: Serve) -> None:
    served = serve(
        m=(
            DECOUPLED + 'parameters { key: "shared_memory_limit_mib" value { string_value: "4" } }',
            """
            def execute(self, requests):
                sender = requests[0].get_response_sender()
                for _ in range(50):
                    sender.send(y(np.zeros(250_000)))
                sender.send(flags=1)
            """,
        )
    )
    seen = threading.Event()
    sizes: list[int] = []

    def look(answer: Any, final: bool) -> None:
        if answer is not None:
            sizes.append(answer.outputs["y"].array.size)
        if final:
            seen.set()

    request = InferRequest("m", {"x": Tensor(np.zeros(1, np.int32))})
    served.plane.submit(request, look)
    assert seen.wait(TIMEOUT_S)
    assert sizes == [250_000] * 50


def test_a_slow_reader_of_responses_holds_up_nobody_else(serve: Serve) -> None:
    """A client that does not read is between it and the model's thread that answers it."""
    served = serve(
        m=(
            DECOUPLED,
            """
            def execute(self, requests):
                for r in requests:
                    threading.Thread(target=self.count, args=(r,), daemon=True).start()
            def count(self, r):
                sender = r.get_response_sender()
                self.sent = 0
                for value in range(x(r)[0]):
                    sender.send(y([value, self.sent]))
                    self.sent += 1
                sender.send(flags=1)
            """,
        )
    )
    slow = Slow()
    served.plane.submit(InferRequest("m", {"x": Tensor(np.array([1000], np.int32))}), slow)
    assert slow.begun.wait(TIMEOUT_S)
    for _ in range(50):
        assert len(served.submit("m", 1).values()) == 1
    slow.go_on.set()
    assert slow.over.wait(TIMEOUT_S)
    assert [answer[0] for answer in slow.heard] == list(range(1000))


class Slow:
    """A `Respond` that does not return from its first answer until it may."""

    def __init__(self) -> None:
        self.begun, self.go_on, self.over = (threading.Event() for _ in range(3))
        self.heard: list[list[int]] = []

    def __call__(self, answer: Any, final: bool) -> None:
        self.begun.set()
        assert self.go_on.wait(TIMEOUT_S)
        if answer is not None:
            self.heard.append(answer.outputs["y"].array.tolist())
        if final:
            self.over.set()


def test_a_model_waits_for_a_slow_reader_of_its_responses(serve: Serve) -> None:
    served = serve(
        m=(
            DECOUPLED,
            """
            sent = 0
            def execute(self, requests):
                for r in requests:
                    if x(r)[0]:
                        threading.Thread(target=self.count, args=(r,), daemon=True).start()
                    else:
                        r.get_response_sender().send(y([self.sent]), flags=1)
            def count(self, r):
                sender = r.get_response_sender()
                for _ in range(1000):
                    sender.send(y([0]))
                    self.sent += 1
                sender.send(flags=1)
            """,
        )
    )
    slow = Slow()
    served.plane.submit(InferRequest("m", {"x": Tensor(np.array([1], np.int32))}), slow)
    assert slow.begun.wait(TIMEOUT_S)
    seen = [-1]
    while seen[-1] != 64:
        (sent,) = served.submit("m", 0).values()
        assert seen[-1] <= sent[0] <= 64
        seen += sent
    slow.go_on.set()
    assert slow.over.wait(TIMEOUT_S)
    assert len(slow.heard) == 1000
