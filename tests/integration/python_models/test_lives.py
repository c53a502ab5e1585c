"""A model that crashes, hangs or lies costs the requests it was running, and comes back."""

from __future__ import annotations

import gc
import re
import threading
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from support.processes import is_running
from support.waiting import wait_until

from edge_server.backends.python import session
from edge_server.errors import DeadlineExceeded, InternalError, Unavailable
from edge_server.inference.registry import ModelState
from edge_server.requests import InferRequest, SequencePlace
from edge_server.settings import Python
from edge_server.tensors import Tensor

Serve = Any

# What the first value asks for.
WILLING = """
def execute(self, requests):
    (r,) = requests
    act = x(r)[0]
    if act == 1:
        os.kill(os.getpid(), signal.SIGSEGV)
    if act == 2:
        while True:
            pass
    if act == 3:
        os._exit(5)
    if act == 4:
        time.sleep(1.3)
    return [y([os.getpid()])]
"""
SEGV, HANG, EXIT, SLOW, FINE = 1, 2, 3, 4, 0


@pytest.fixture
def hold(tmp_path: Path) -> Path:
    """A file; while it is there no process of `serve_willing` comes back."""
    (tmp_path / "held").mkdir()
    return tmp_path / "held" / "hold"


@pytest.fixture
def serve_willing(serve_with: Serve, hold: Path) -> Serve:
    """Serves `m`, which is WILLING, with more of config.pbtxt."""
    waits = f"""
def initialize(self, args):
    while os.path.exists({str(hold)!r}):
        time.sleep(0.01)
"""
    python = Python(readable=(str(hold.parent),))
    return lambda config="": serve_with(python, m=(config, waits + WILLING))


def soon() -> float:
    """Enough for the request to be in execution by then."""
    return time.monotonic() + 1.0


def open_files() -> int:
    return len(list(Path("/proc/self/fd").iterdir()))


@pytest.mark.parametrize(
    ("act", "why"), [(SEGV, "it died of SIGSEGV"), (EXIT, "it exited with code 5")]
)
def test_a_crash_is_that_requests_error_and_the_model_comes_back(
    serve_willing: Serve, hold: Path, act: int, why: str
) -> None:
    served = serve_willing()
    (first,) = served.values("m", FINE)
    hold.touch()
    with pytest.raises(InternalError) as raised:
        served.infer("m", act)
    assert str(raised.value) == f"Stub process 'm_0' is not healthy. Reason: {why}"
    assert not served.plane.model_ready("m", "")
    with pytest.raises(Unavailable, match=rf"^Stub process 'm_0' is not healthy. Reason: {why}"):
        served.infer("m", FINE)
    hold.unlink()
    served.wait_until_ready("m")
    assert served.values("m", FINE) != [first]


def test_a_busy_loop_ends_with_its_callers_deadline(serve_willing: Serve, hold: Path) -> None:
    served = serve_willing()
    hold.touch()
    with pytest.raises(DeadlineExceeded):
        served.infer("m", HANG, deadline=soon())
    assert (
        "it was killed: 'execute' did not return within 1.0 s"
        in served.model("m").not_ready_reason()
    )
    assert not served.plane.model_ready("m", "")
    hold.unlink()
    served.wait_until_ready("m")
    served.values("m", FINE)


def test_a_caller_in_a_hurry_does_not_cost_the_others_a_slow_process(
    serve: Serve, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(session, "LEAST_EXECUTION_S", 20.0)
    served = serve(m=WILLING)
    (first,) = served.values("m", FINE)
    served.infer("m", SLOW, deadline=soon())
    assert served.values("m", FINE) == [first]


def test_a_caller_in_a_hurry_does_not_cost_those_of_its_batch_their_responses(serve: Serve) -> None:
    served = serve(
        m=(
            # All three at once, as soon as they are there.
            "max_batch_size: 8 dynamic_batching { preferred_batch_size: 3 "
            "max_queue_delay_microseconds: 20000000 }",
            """
            def execute(self, requests):
                time.sleep(3.2)
                return [y([[len(requests)]]) for r in requests]
            """,
        )
    )
    hurried = served.submit("m", [1], deadline=time.monotonic() + 3.0)
    patient = [served.submit("m", [1]), served.submit("m", [1], deadline=time.monotonic() + 20)]
    assert [answers.values() for answers in patient] == [[[[3]]], [[[3]]]]
    assert hurried.values() == [[[3]]]


def test_an_execution_without_a_deadline_has_a_limit(serve: Serve) -> None:
    limit = 'parameters { key: "execution_timeout_s" value { string_value: "0.2" } }'
    served = serve(m=(limit, WILLING))
    with pytest.raises(InternalError, match=r"within 0\.2 s; parameter 'execution_timeout_s'"):
        served.infer("m", HANG)


def test_what_computes_goes_on_and_what_uses_no_processor_hangs(
    serve: Serve, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, seconds in (("IDLE_S", 0.6), ("_LOOK_S", 0.2), ("_WORK_S", 0.01)):
        monkeypatch.setattr(session, name, seconds)
    served = serve(
        m="""
        def execute(self, requests):
            until = time.process_time() + 1.5
            while time.process_time() < until:
                pass
            return [y([1])]
        """,
        hangs="""
        def execute(self, requests):
            time.sleep(600)
        """,
    )
    assert served.infer("m", 1).outputs["y"].array.tolist() == [1]
    with pytest.raises(InternalError, match=r"used no processor time for .* 'execution_timeout_s'"):
        served.infer("hangs", 1)


def test_an_initialize_that_fails_fails_the_load(serve: Serve) -> None:
    served = serve(
        m="""
        def initialize(self, args):
            raise RuntimeError("no weights")
        def execute(self, requests): pass
        """,
        empty="pass",
        exits="def initialize(self, args):\n    os._exit(3)",
    )
    reasons = {entry.name: entry.reason for entry in served.failed}
    assert "'m_0' does not start: RuntimeError: no weights\n\nAt:\n" in reasons["m"]
    assert "class TritonPythonModel has no method 'execute'" in reasons["empty"]
    assert "'exits_0' does not start: it exited with code 3" in reasons["exits"]
    assert {entry.state for entry in served.failed} == {ModelState.UNAVAILABLE}


@pytest.mark.parametrize(
    "body",
    [
        "time.sleep(600)",
        pytest.param("while True: print('still here')", marks=pytest.mark.long),
    ],
)
def test_an_initialize_that_hangs_is_ended(serve: Serve, body: str) -> None:
    limit = 'parameters { key: "initialize_timeout_s" value { string_value: "4" } }'
    served = serve(m=(limit, f"def initialize(self, args):\n    {body}"))
    assert (
        "'initialize' did not return within 4 s; parameter 'initialize_timeout_s' allows more"
        in served.failed[0].reason
    )


def test_pauses_grow_while_initialize_fails(serve: Serve, tmp_path: Path) -> None:
    marker = tmp_path / "broken"
    served = serve(
        m=f"""
        def initialize(self, args):
            if os.path.exists({str(marker)!r}):
                raise RuntimeError("still broken")
        def execute(self, requests):
            os._exit(1)
        """
    )
    marker.touch()
    with pytest.raises(InternalError):
        served.infer("m", 1)
    wait_until(lambda: "still broken" in served.model("m").not_ready_reason())
    marker.unlink()
    served.wait_until_ready("m")


def test_every_stream_gets_its_last_response_when_the_process_dies(serve: Serve) -> None:
    served = serve(
        m=(
            "model_transaction_policy { decoupled: true }",
            """
            kept = []
            def execute(self, requests):
                sender = requests[0].get_response_sender()
                sender.send(y([1]))
                self.kept.append(sender)
                if len(self.kept) == 3:
                    os.kill(os.getpid(), signal.SIGKILL)
            """,
        )
    )
    many = [served.submit("m", 1) for _ in range(3)]
    for answers in many:
        assert "died of SIGKILL" in str(answers.last())


def test_is_ready_is_called(serve: Serve, tmp_path: Path) -> None:
    marker = tmp_path / "fine"
    served = serve(
        m=f"""
        def execute(self, requests): pass
        async def is_ready(self):
            return os.path.exists({str(marker)!r})
        """
    )
    assert served.model("m").not_ready_reason() == "instance 'm_0': is_ready returned False"
    assert not served.plane.model_ready("m", "")
    marker.touch()
    assert served.plane.model_ready("m", "")


def test_while_one_instance_is_down_another_does_its_work(serve_willing: Serve, hold: Path) -> None:
    served = serve_willing("instance_group { count: 2 kind: KIND_CPU }")
    hold.touch()
    with pytest.raises(InternalError):
        served.infer("m", SEGV)
    assert served.plane.model_ready("m", "")
    (first,) = served.values("m", FINE)
    assert served.values("m", FINE) == [first]
    hold.unlink()


def test_a_sequence_is_never_given_to_another_instance(serve_willing: Serve, hold: Path) -> None:
    # What a model keeps of a sequence is in one process.
    sequences = "sequence_batching { max_sequence_idle_microseconds: 1000000 }"
    served = serve_willing("instance_group { count: 2 kind: KIND_CPU } " + sequences)
    hold.touch()
    with pytest.raises(InternalError):
        served.infer("m", SEGV, sequence=SequencePlace(1, start=True))
    model = served.model("m")
    down = next(instance for instance in model.instances if not instance.up)
    assert model.lend(down, 0.0) is None
    hold.unlink()


def test_nothing_is_left_behind_when_a_model_is_closed(serve: Serve) -> None:
    served = serve(warm=WILLING)
    served.registry.clear()
    del served
    gc.collect()
    files, threads = open_files(), threading.active_count()
    served = serve(
        m=(
            "instance_group { count: 4 kind: KIND_CPU }",
            """
            def execute(self, requests):
                if len(x(requests[0])) == 1:
                    os._exit(1)
                return [y(x(r)) for r in requests]
            """,
        )
    )
    large = Tensor(np.zeros(1_000_000, np.int32))
    for _ in range(3):
        served.plane.infer(InferRequest("m", {"x": large}))
    with pytest.raises(InternalError):
        served.infer("m", 1)
    served.registry.clear()
    del served
    gc.collect()
    wait_until(lambda: (open_files(), threading.active_count()) == (files, threads))


def test_a_model_that_does_not_finalize_is_ended_and_that_is_logged(
    serve: Serve, caplog: pytest.LogCaptureFixture
) -> None:
    served = serve(
        m="""
        def execute(self, requests):
            return [y([os.getpid()])]
        def finalize(self):
            while True:
                pass
        """
    )
    (pid,) = served.values("m", 1)
    served.registry.clear()
    assert not is_running(pid)
    assert "instance m_0 was killed: 'finalize' did not return within 2 s" in caplog.text


def test_what_a_model_has_started_ends_with_it(serve: Serve) -> None:
    served = serve(
        m="""
        def execute(self, requests):
            import subprocess
            return [y([subprocess.Popen(["sleep", "600"]).pid])]
        """
    )
    (pid,) = served.values("m", 1)
    served.registry.clear()
    wait_until(lambda: not is_running(pid))


def test_a_process_that_sends_an_invalid_message_is_ended_at_once_and_the_reason_is_named(
    serve: Serve,
) -> None:
    served = serve(
        m="""
        def execute(self, requests):
            import socket
            for fd in map(int, os.listdir("/proc/self/fd")):
                try:
                    socket.socket(fileno=os.dup(fd)).send(b"\\1\\0\\0\\0\\xc1")
                except OSError:
                    pass
            time.sleep(60)
        """
    )
    with pytest.raises(InternalError, match="it sent an invalid message: not a message"):
        served.infer("m", 1)


def test_a_model_that_starts_well_and_dies_soon_is_started_less_and_less_often(
    serve: Serve, caplog: pytest.LogCaptureFixture
) -> None:
    dies = """
def initialize(self, args):
    threading.Timer(0.2, os._exit, (7,)).start()
def execute(self, requests):
    return [y([1]) for _ in requests]
"""
    serve(m=f"import threading{dies}")
    again = re.compile(r"is down, again in ([\d.]+) s")
    wait_until(lambda: len(again.findall(caplog.text)) >= 6, otherwise=lambda: caplog.text)
    delays = again.findall(caplog.text)
    assert float(delays[0]) <= 0.1
    assert float(delays[5]) >= 1.0
