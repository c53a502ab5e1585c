"""A model that asks other models (Triton's BLS), from its own process."""

from __future__ import annotations

import itertools
import threading
import time
from typing import TYPE_CHECKING, Any

import pytest
from support.waiting import TIMEOUT_S, wait_until

from edge_server.backends.python import calls
from edge_server.errors import InternalError, InvalidRequest
from edge_server.settings import Python

if TYPE_CHECKING:
    from pathlib import Path

Serve = Any

DOUBLE = "def execute(self, requests):\n    return [y(x(r) * 2) for r in requests]"
COUNT = (
    "model_transaction_policy { decoupled: true }",
    """
    def execute(self, requests):
        for r in requests:
            sender = r.get_response_sender()
            for value in x(r):
                sender.send(y([value]))
            sender.send(flags=1)
    """,
)
ASK = """
def ask(self, model, values, **more):
    return pb_utils.InferenceRequest(
        model_name=model, requested_output_names=["y"],
        inputs=[pb_utils.Tensor("x", np.array(values, np.int32))], **more)
"""


def test_a_model_runs_another_one(serve: Serve, monkeypatch: pytest.MonkeyPatch) -> None:
    pools: list[calls.NestedCallThreads] = []

    class Noted(calls.NestedCallThreads):
        def __init__(self, name: str) -> None:
            super().__init__(name)
            pools.append(self)

    monkeypatch.setattr(calls, "NestedCallThreads", Noted)
    served = serve(
        double=DOUBLE,
        m=ASK
        + """
def execute(self, requests):
    made = [self.ask("double", x(r)).exec() for r in requests]
    assert not any(m.has_error() for m in made)
    return [y(pb_utils.get_output_tensor_by_name(m, "y").as_numpy() + 1) for m in made]
""",
    )
    for n in range(20):
        assert served.values("m", n, 2) == [2 * n + 1, 5]
        # It may respond before its thread has come to rest.
        wait_until(lambda: all(len(each._idle) == len(each._threads) for each in pools))
    assert [t.name for t in threading.enumerate() if "calls of" in t.name] == ["calls of m_0_0"]


def test_a_model_that_is_idle_is_woken_by_the_call_of_another_one(serve: Serve) -> None:
    served = serve(
        double=('parameters { key: "idle_unload_s" value { string_value: "60" } }', DOUBLE),
        m=ASK
        + """
def execute(self, requests):
    assert pb_utils.is_model_ready("double")
    made = [self.ask("double", x(r)).exec() for r in requests]
    return [y(m.output_tensors()[0].as_numpy()) for m in made]
""",
    )
    assert served.values("m", 1) == [2]
    later = itertools.count(0, 61)

    def idle() -> bool:
        served.loader.idle.unload_idle(time.monotonic() + next(later))
        return served.registry.snapshot.entries["double", 1].is_idle

    # Its call is counted a moment after its response.
    wait_until(idle)
    assert served.registry.wait_closed(TIMEOUT_S)
    assert served.values("m", 2) == [4]


def test_threads_and_coroutines_call_side_by_side(serve: Serve) -> None:
    served = serve(
        double=("instance_group { count: 2 kind: KIND_CPU }", DOUBLE),
        coroutines=ASK
        + """
async def execute(self, requests):
    import asyncio
    made = await asyncio.gather(*(self.ask("double", [n]).async_exec() for n in range(30)))
    return [y([m.output_tensors()[0].as_numpy()[0] for m in made])]
""",
        threads=ASK
        + """
def execute(self, requests):
    from concurrent.futures import ThreadPoolExecutor
    with ThreadPoolExecutor(8) as pool:
        made = list(pool.map(lambda n: self.ask("double", [n]).exec(), range(30)))
    return [y([m.output_tensors()[0].as_numpy()[0] for m in made])]
""",
    )
    wanted = [2 * n for n in range(30)]
    assert served.values("coroutines", 1) == wanted
    assert served.values("threads", 1) == wanted


def test_the_responses_of_a_decoupled_model_come_one_by_one(serve: Serve) -> None:
    served = serve(
        count=COUNT,
        m=ASK
        + """
async def execute(self, requests):
    sync = list(self.ask("count", [1, 2, 3]).exec(decoupled=True))
    awaited = list(await self.ask("count", [4]).async_exec(decoupled=True))
    return [y([t.as_numpy()[0] for m in sync + awaited for t in m.output_tensors()])]
""",
        single=ASK
        + """
def execute(self, requests):
    made = self.ask("count", [1, 2]).exec()
    raise pb_utils.TritonModelException(made.error().message())
""",
    )
    assert served.values("m", 1) == [1, 2, 3, 4]
    with pytest.raises(
        InternalError, match=r"Model count is using the decoupled\. The current BLS"
    ):
        served.infer("single", 1)


def test_a_call_that_fails_is_a_response_with_an_error(serve: Serve) -> None:
    served = serve(
        double=DOUBLE,
        fails="def execute(self, requests):\n    raise ValueError('bad')",
        m=ASK
        + """
def execute(self, requests):
    (r,) = requests
    ask, code = [
        (lambda: self.ask("nobody", [1]), "INTERNAL"),
        (lambda: pb_utils.InferenceRequest("", 0, [], [], "double"), "INVALID_ARG"),
        (lambda: self.ask("fails", [1]), "INTERNAL"),
    ][x(r)[0]]
    made = ask().exec()
    assert made.error().code() == getattr(pb_utils.TritonError, code)
    return [pb_utils.InferenceResponse(error=made.error())]
""",
    )
    for number, (error, text) in enumerate(
        (
            (
                InternalError,
                "Failed for execute the inference request. Model 'nobody' is not ready.",
            ),
            (InvalidRequest, "expected 1 inputs but got 0 inputs"),
            (InternalError, "message: ValueError: bad"),
        )
    ):
        with pytest.raises(error) as raised:
            served.infer("m", number)
        assert text in str(raised.value)


def test_calls_work_in_execute_only(serve: Serve) -> None:
    served = serve(
        double=DOUBLE,
        m=ASK
        + """
def initialize(self, args):
    try:
        self.ask("double", [1]).exec()
    except pb_utils.TritonModelException as error:
        self.said = str(error)
def execute(self, requests):
    raise pb_utils.TritonModelException(self.said)
""",
    )
    with pytest.raises(InternalError, match="BLS is only supported during the 'execute' function"):
        served.infer("m", 1)


def test_a_model_queries_whether_another_is_ready(serve: Serve) -> None:
    served = serve(
        double=DOUBLE,
        m="""
def execute(self, requests):
    return [y([pb_utils.is_model_ready("double"), pb_utils.is_model_ready("double", "1"),
               pb_utils.is_model_ready("double", "2"), pb_utils.is_model_ready("nobody")])]
""",
    )
    assert served.values("m", 1) == [1, 1, 0, 0]


def test_a_call_carries_the_fields_of_its_request(serve: Serve) -> None:
    served = serve(
        says="""
        def execute(self, requests):
            (r,) = requests
            return [y([r.correlation_id(), r.flags(), json.loads(r.parameters())["gain"]])]
        """,
        m=ASK
        + """
def execute(self, requests):
    made = self.ask("says", [1], correlation_id=7, flags=1, parameters={"gain": 3}).exec()
    return [y(made.output_tensors()[0].as_numpy())]
""",
    )
    assert served.values("m", 1) == [7, 1, 3]


def test_calls_that_are_refused_leave_no_memory_in_use(serve: Serve) -> None:
    limit = 'parameters { key: "shared_memory_limit_mib" value { string_value: "4" } }'
    served = serve(
        double=DOUBLE,
        m=(
            limit,
            ASK
            + """
def execute(self, requests):
    large = np.zeros(300_000)
    for _ in range(10):
        assert "not ready" in str(self.ask("nobody", large).exec().error())
    return [y([len(self.ask("double", large).exec().output_tensors()[0].as_numpy())])]
""",
        ),
    )
    assert served.values("m", 1) == [300_000]


def test_bytes_are_names_too(serve: Serve) -> None:
    """An element of a BYTES tensor is the name of a model in Triton's own example."""
    served = serve(
        double=DOUBLE,
        m="""
        def execute(self, requests):
            name = np.array([b"double"], np.object_)
            call = pb_utils.InferenceRequest(
                model_name=name[0], requested_output_names=[b"y"], request_id=b"i",
                model_version=np.int64(1), flags=np.uint8(0), timeout=np.int32(5),
                inputs=[pb_utils.Tensor(b"x", np.array([4], np.int32))])
            return [y(call.exec().output_tensors()[0].as_numpy())]
        """,
    )
    assert served.values("m", 0) == [8]


def test_an_input_is_given_once(serve: Serve) -> None:
    served = serve(
        double=DOUBLE,
        m="""
        def execute(self, requests):
            tensor = pb_utils.Tensor("x", np.array([4], np.int32))
            call = pb_utils.InferenceRequest(
                model_name="double", requested_output_names=["y"], inputs=[tensor, tensor])
            return [y([1], parameters={"error": call.exec().error().message()})]
        """,
    )
    assert served.infer("m", 0).parameters == {
        "error": "[request id: <id_unknown>] input 'x' already exists in request"
    }


def test_streams_of_other_models_are_awaited_side_by_side_and_can_be_read_again(
    serve_with: Serve, tmp_path: Path
) -> None:
    begun = tmp_path / "begun"
    begun.mkdir()
    # Each waits until all have begun.
    together = f"""
            open({str(begun)!r} + f"/{{os.getpid()}}", "w").close()
            while len(os.listdir({str(begun)!r})) < 4:
                time.sleep(0.01)
            for value"""
    waits = (
        COUNT[0] + " instance_group { count: 4 kind: KIND_CPU }",
        COUNT[1].replace("\n            for value", together),
    )
    served = serve_with(
        Python(writable=(str(begun),)),
        count=waits,
        m=ASK
        + """
async def execute(self, requests):
    import asyncio
    made = await asyncio.gather(
        *(self.ask("count", [n, n]).async_exec(decoupled=True) for n in range(4)))
    found = []
    for _ in range(2):
        for stream in made:
            found += [r.output_tensors()[0].as_numpy()[0] for r in stream if r.output_tensors()]
    return [y(found)]
""",
    )
    assert served.values("m", 1) == [0, 0, 1, 1, 2, 2, 3, 3] * 2
