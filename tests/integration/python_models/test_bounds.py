"""A model that says too much, or lies, costs its own requests and little of the daemon's memory."""

from __future__ import annotations

import gc
import logging
import threading
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from support.waiting import wait_until

from edge_server.errors import InternalError
from edge_server.requests import InferRequest
from edge_server.tensors import Tensor

Serve = Any
TIMEOUT_S = 30.0

# A model that speaks with the daemon as it likes.
LIAR = """
from edge_server.backends.python import messages as M
def say(self, *messages):
    from edge_server.backends.python.link import here
    here.link._channel._longest_sent_bytes = 1 << 40
    for message in messages:
        here.link.send(message)
"""


def memory_bytes() -> int:
    line = next(s for s in Path("/proc/self/status").read_text().splitlines() if "VmHWM" in s)
    return 1024 * int(line.split()[1])


def forget_peak() -> None:
    gc.collect()
    Path("/proc/self/clear_refs").write_text("5")


@pytest.mark.parametrize(
    ("lie", "why"),
    [
        ('self.M.LogLine(20, "x" * (20 << 20))', "a message of 2097"),
        (
            "self.M.Executed(1, 1, '', [self.M.Responded(n, self.M.ChildResponse(), False) "
            "for n in range(300000)])",
            "a message of",
        ),
        (
            "self.M.Responded(1, self.M.ChildResponse([self.M.TensorPlace(f't{n}', 'UINT8', "
            "(200 << 20,), 64, 200 << 20) for n in range(1000)]), True)",
            "bytes of tensors in a memory of",
        ),
        (
            "self.M.Responded(1, self.M.ChildResponse([self.M.TensorPlace('y', 'BYTES', "
            "(1 << 34,), 64, 1 << 20)]), True)",
            "elements of BYTES at once",
        ),
        (
            "self.M.CallModel(self.M.ChildRequest(1, '', [self.M.TensorPlace('y', 'BYTES', "
            "(1 << 34,), 64, 1 << 20)], []), False)",
            "elements of BYTES at once",
        ),
        (
            "self.M.Query(1, self.M.LoadModel('m', '', [self.M.TensorPlace(f't{n}', 'UINT8', "
            "(200 << 20,), 64, 200 << 20) for n in range(1000)]))",
            "bytes of tensors in a memory of",
        ),
    ],
)
def test_a_lie_ends_the_process_and_costs_little_memory(serve: Serve, lie: str, why: str) -> None:
    served = serve(
        m=LIAR + f"def execute(self, requests):\n    self.say({lie})\n    time.sleep(60)"
    )
    forget_peak()
    before = memory_bytes()
    with pytest.raises(InternalError, match=f"it sent an invalid message: .*{why}"):
        served.infer("m", 1)
    assert memory_bytes() - before < 100 << 20


@pytest.mark.parametrize(
    ("lie", "why"),
    [
        ("self.M.Executed(2, -(10**15))", "Expected `int` >= 0"),
        (
            "self.M.Responded(1, self.M.ChildResponse(parameters={'p': 2**63}), True)",
            "Expected `int` <= 9223372036854775807",
        ),
        (
            "self.M.Responded(1, self.M.ChildResponse([self.M.TensorPlace('y', 'NOPE', (1,), 64, "
            "4)]), True)",
            "'NOPE' is not a valid DataType",
        ),
        ("self.M.ChangeMetric(7, 'set', 1.0)", "list index out of range"),
    ],
)
def test_a_lie_about_numbers_is_named_and_no_fault_of_the_server(
    serve: Serve, lie: str, why: str, caplog: pytest.LogCaptureFixture
) -> None:
    served = serve(
        m=LIAR + f"def execute(self, requests):\n    self.say({lie})\n    time.sleep(60)"
    )
    with pytest.raises(InternalError, match=f"it sent an invalid message: .*{why}"):
        served.infer("m", 1)
    assert not [record for record in caplog.records if record.exc_info]


def test_answers_that_wait_for_nobody_are_bounded(serve: Serve) -> None:
    """A decoupled model whose caller is slow, and that does not wait for it."""
    served = serve(
        m=(
            "model_transaction_policy { decoupled: true }",
            LIAR
            + """
def execute(self, requests):
    sender = requests[0].get_response_sender()
    response = self.M.ChildResponse(parameters={"p": "x" * 500000})
    self.say(*[self.M.Responded(sender._number, response, False)] * 2000)
""",
        )
    )
    forget_peak()
    before = memory_bytes()
    slow = threading.Event()
    over = threading.Event()

    def take(answer: object, final: bool) -> None:
        slow.wait(TIMEOUT_S)
        if final:
            over.set()

    served.plane.submit(InferRequest("m", {"x": Tensor(np.ones(1, np.int32))}), take)
    wait_until(
        lambda: "undelivered responses to a request" in served.model("m").not_ready_reason(),
        TIMEOUT_S,
    )
    assert memory_bytes() - before < 300 << 20
    slow.set()
    assert over.wait(TIMEOUT_S)


@pytest.mark.parametrize(
    ("returned", "says"),
    [
        ("[y([1], parameters={'p': 'x' * 2000000})]", "names, texts and parameters of"),
        (
            "[pb_utils.InferenceResponse([pb_utils.Tensor('y', "
            "np.full(1 << 21, b'', np.object_))])]",
            "2097152 elements of BYTES at once; at most 1048576 are taken",
        ),
    ],
)
def test_an_honest_model_that_sends_too_much_gets_an_error_and_lives(
    serve: Serve, returned: str, says: str
) -> None:
    served = serve(
        m=f"""
        def execute(self, requests):
            return {returned} if x(requests[0])[0] else [y([os.getpid()])]
        """
    )
    before = served.values("m", 0)
    for _ in range(3):
        with pytest.raises(InternalError, match=says):
            served.infer("m", 1)
    assert served.values("m", 0) == before


def test_a_sender_that_sends_too_much_responds_with_that_error(serve: Serve) -> None:
    served = serve(
        m=(
            "model_transaction_policy { decoupled: true }",
            """
            def execute(self, requests):
                for r in requests:
                    r.get_response_sender().send(y([1], parameters={"p": "x" * 2000000}))
            """,
        )
    )
    for _ in range(3):
        assert "names, texts and parameters of" in str(served.submit("m", 1).last())


def test_the_text_of_an_error_is_cut(serve: Serve) -> None:
    served = serve(
        m="def execute(self, requests):\n    raise RuntimeError('x' * (100 << 20))",
        never="def initialize(self, args):\n    raise RuntimeError('x' * (100 << 20))\n"
        "def execute(self, requests): pass",
    )
    with pytest.raises(InternalError, match="characters more") as raised:
        served.infer("m", 1)
    assert len(str(raised.value)) < 20_000
    assert len(served.failed[0].reason) < 20_000


def test_a_model_that_floods_the_log_is_cut_off_and_responds(
    serve: Serve, caplog: pytest.LogCaptureFixture
) -> None:
    served = serve(
        m="""
        def execute(self, requests):
            for n in range(20000):
                print("printed", "x" * 100)
                pb_utils.Logger.log_error("logged " + "x" * 100)
            return [y([1])]
        """
    )
    caplog.set_level(logging.INFO)
    assert served.values("m", 1) == [1]
    served.registry.clear()
    assert sum(len(r.getMessage()) for r in caplog.records) < 2 << 20
