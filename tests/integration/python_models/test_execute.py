"""Requests through a model's own process: what it sees, what it answers, what it may not."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
from support.waiting import wait_until

from edge_server.backends.contract import ExecuteRequest
from edge_server.errors import EdgeServerError, InternalError, NotFound, UnknownError
from edge_server.requests import InferRequest, SequencePlace
from edge_server.tensors import Tensor

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

Serve = Any


def text_of(infer: Callable[[], object]) -> str:
    with pytest.raises(EdgeServerError) as raised:
        infer()
    assert type(raised.value) is InternalError
    return str(raised.value)


def test_initialize_gets_tritons_arguments_and_finalize_is_called(
    serve: Serve, tmp_path: Any, caplog: pytest.LogCaptureFixture
) -> None:
    served = serve(
        m="""
        def initialize(self, args):
            self.args = args
            config = json.loads(args["model_config"])
            assert pb_utils.get_input_config_by_name(config, "x")["dims"] == [-1]
            assert pb_utils.get_output_config_by_name(config, "nothing") is None
            assert not pb_utils.using_decoupled_model_transaction_policy(config)
            assert pb_utils.get_model_dir() == os.path.dirname(os.path.abspath(__file__))
            assert all(type(value) is str for value in args.values())
        def execute(self, requests):
            answer = {k: v for k, v in self.args.items() if k != "model_config"}
            return [y(x(r), parameters=answer) for r in requests]
        def finalize(self):
            print("all is well")
        """
    )
    directory = tmp_path / "models" / "m"
    assert served.infer("m", 1).parameters == {
        "model_name": "m",
        "model_version": "1",
        "model_instance_name": "m_0",
        "model_instance_kind": "CPU",
        "model_instance_device_id": "0",
        "model_repository": str(directory),
    }
    with caplog.at_level(logging.INFO):
        served.registry.clear()
    assert "model m: all is well" in caplog.text


def test_a_model_sees_all_that_a_request_carries(serve: Serve) -> None:
    served = serve(
        m="""
        def execute(self, requests):
            (r,) = requests
            return [y(x(r), parameters={
                "id": r.request_id(), "correlation": r.correlation_id(), "flags": r.flags(),
                "timeout": r.timeout(), "parameters": r.parameters(),
                "names": ",".join(r.requested_output_names()), "cancelled": r.is_cancelled(),
                "model": f"{r.model_name()} {r.model_version()}",
            })]
        """
    )
    said = served.infer(
        "m",
        1,
        id="seven",
        timeout_us=50,
        sequence=SequencePlace("cam", start=True, end=True),
        parameters={"gain": 1.5, "on": True},
    ).parameters
    assert said == {
        "id": "seven",
        "correlation": "cam",
        "flags": 3,
        "timeout": 50,
        "parameters": '{"gain": 1.5, "on": true}',
        "names": "y",
        "cancelled": False,
        "model": "m 1",
    }


def test_the_parameters_of_a_response_are_json_to_the_model(serve: Serve) -> None:
    served = serve(
        m="""
        def execute(self, requests):
            made = y(1, parameters={"gain": 1.5, "on": True})
            return [y(1, parameters={"said": made.parameters()})]
        """
    )
    assert served.infer("m", 1).parameters == {"said": '{"gain": 1.5, "on": true}'}


def test_an_input_is_the_models_to_keep_and_to_change(serve: Serve) -> None:
    served = serve(
        m="""
        kept = None
        def execute(self, requests):
            values = x(requests[0])
            before = [] if self.kept is None else self.kept
            self.kept = values
            answer = y(before)
            values += 100
            return [answer]
        """
    )
    assert served.values("m", 1, 2) == []
    assert served.values("m", 3, 4) == [101, 102]
    assert served.values("m", 5, 6) == [103, 104]


def test_siblings_and_both_spellings_of_an_import_work(serve: Serve, tmp_path: Any) -> None:
    version = tmp_path / "models" / "m" / "1"
    version.mkdir(parents=True)
    (version / "sibling.py").write_text("FACTOR = 3\n")
    (version / "other.py").write_text("OFFSET = 1\n")
    served = serve(
        m="""
        import c_python_backend_utils
        import sibling
        from . import other
        def execute(self, requests):
            assert self.c_python_backend_utils.Tensor is pb_utils.Tensor
            return [y(x(r) * self.sibling.FACTOR + self.other.OFFSET) for r in requests]
        """
    )
    assert served.values("m", 1, 2) == [4, 7]
    assert sorted(path.name for path in version.iterdir()) == ["model.py", "other.py", "sibling.py"]


def test_the_process_is_light_and_inherits_nothing(serve: Serve) -> None:
    served = serve(
        m="""
        def execute(self, requests):
            heavy = {"grpc", "onnxruntime", "cv2", "google.protobuf", "tritonclient"}
            fds = {os.readlink(f"/proc/self/fd/{n}") for n in os.listdir("/proc/self/fd")
                   if os.path.exists(f"/proc/self/fd/{n}")}
            return [y([], parameters={
                "heavy": ",".join(sorted(heavy & set(sys.modules))),
                "files": ",".join(sorted(f for f in fds if f.startswith("/") and
                                         not f.startswith(("/dev/", "/proc", "/memfd", "/tmp")))),
            })]
        """
    )
    assert served.infer("m", 1).parameters == {"heavy": "", "files": ""}


def test_an_exception_reaches_the_caller_as_triton_prints_it(serve: Serve, tmp_path: Any) -> None:
    served = serve(
        m="""
        def execute(self, requests):
            self.inner()
        def inner(self):
            raise ValueError("bad frame")
        """
    )
    path = tmp_path / "models" / "m" / "1" / "model.py"
    assert text_of(lambda: served.infer("m", 1)) == (
        "Failed to process the request(s) for model 'm_0', message: ValueError: bad frame\n\nAt:\n"
        f"  {path}(16): inner\n  {path}(14): execute\n"
    )
    assert "bad frame" in text_of(lambda: served.infer("m", 1))


@pytest.mark.parametrize(
    ("flags", "then"), [(0, "s.send(y([2]))"), (0, "return [y([2])]"), (1, "return [y([2])]")]
)
def test_the_first_response_counts_and_the_second_is_an_error_in_the_log(
    serve: Serve, flags: int, then: str, caplog: pytest.LogCaptureFixture
) -> None:
    served = serve(
        m=f"""
        def execute(self, requests):
            s = requests[0].get_response_sender()
            s.send(y([1]), {flags})
            {then}
        """
    )
    assert served.values("m", 1) == [1]
    said = "Non-decoupled model cannot send more than one response."
    wait_until(lambda: said in caplog.text)


@pytest.mark.parametrize(
    ("returned", "text"),
    [
        ("y([1])", "Expected a list in the execute return, found type '<class 'edge_server."),
        (
            "[]",
            "Number of InferenceResponse objects do not match the number of InferenceRequest "
            "objects. InferenceRequest(s) size is:1, and InferenceResponse(s) size is:0\n",
        ),
        (
            "[7]",
            "Expected an 'InferenceResponse' object in the execute function return list, found "
            "type '<class 'int'>'.",
        ),
        (
            "pb_utils.Tensor('', np.zeros(1))",
            "TritonModelException: Tensor name cannot be an empty",
        ),
        ("sys.exit(3)", "SystemExit: 3"),
    ],
)
def test_a_wrong_return_is_an_error_in_tritons_words(
    serve: Serve, returned: str, text: str
) -> None:
    served = serve(m=f"def execute(self, requests):\n    return {returned}")
    prefix = "Failed to process the request(s) for model 'm_0', message: "
    assert text_of(lambda: served.infer("m", 1)).startswith(prefix + text)


def test_an_error_of_one_response_is_that_requests_alone_with_its_code(serve: Serve) -> None:
    served = serve(
        m=(
            "max_batch_size: 8",
            """
            def execute(self, requests):
                return [
                    y(x(r)) if x(r)[0, 0] else
                    pb_utils.InferenceResponse(
                        error=pb_utils.TritonError("no such road", pb_utils.TritonError.NOT_FOUND))
                    for r in requests]
            """,
        )
    )
    heard: list[list[Any]] = [[], []]
    requests = [
        ExecuteRequest(
            {"x": Tensor(np.array([[value]], np.int32))},
            frozenset({"y"}),
            lambda answer, final, parameters=None, mine=mine: mine.append(answer),
            InferRequest("m", {}),
            served.registry.snapshot,
        )
        for value, mine in zip((1, 0), heard, strict=True)
    ]
    served.model("m").instances[0].execute(requests)
    assert heard[0][0]["y"].array.tolist() == [[1]]
    assert isinstance(heard[1][0], NotFound)
    assert str(heard[1][0]) == "no such road"


def test_a_request_that_execute_forgets_is_an_error(serve: Serve) -> None:
    served = serve(m="def execute(self, requests):\n    return None")
    assert text_of(lambda: served.infer("m", 1)) == "model 'm' ended without a response"


def test_tensors_that_do_not_fit_are_an_error_that_names_the_remedy(serve: Serve) -> None:
    served = serve(
        m=(
            'parameters { key: "shared_memory_limit_mib" value { string_value: "1" } }',
            "def execute(self, requests):\n    return [y(np.zeros(x(requests[0])[0]))]",
        )
    )
    assert "parameter 'shared_memory_limit_mib' allows more" in text_of(
        lambda: served.infer("m", *range(300_000))
    )
    served.values("m", 1000)


def test_log_lines_go_to_the_daemons_log(serve: Serve, caplog: pytest.LogCaptureFixture) -> None:
    served = serve(
        m="""
        def execute(self, requests):
            pb_utils.Logger.log_warn("dark road")
            pb_utils.Logger.log("odd", pb_utils.Logger.ERROR)
            return [y(x(r)) for r in requests]
        """
    )
    served.infer("m", 1)
    assert [(r.levelname, r.getMessage()) for r in caplog.records] == [
        ("WARNING", "model m: dark road"),
        ("ERROR", "model m: odd"),
    ]


def test_metrics_are_kept_by_the_daemon(serve: Serve) -> None:
    served = serve(
        m="""
        def initialize(self, args):
            self.family = pb_utils.MetricFamily("frames", "seen", pb_utils.MetricFamily.COUNTER)
            self.frames = self.family.Metric(labels={"camera": "front"})
        def execute(self, requests):
            self.frames.increment(2)
            return [y([self.frames.value()]) for r in requests]
        """
    )
    assert served.values("m", 1) == [2]
    assert served.values("m", 1) == [4]
    (metric,) = served.model("m").metrics()
    assert (metric.name, metric.labels, metric.value) == ("frames", {"camera": "front"}, 4.0)


@pytest.mark.parametrize(
    ("returned", "text"),
    [
        ("[y(x(r), parameters={'a': 2**63})]", "must fit 64 bits"),
        ("[y(x(r), parameters={chr(0xDCFF): 1})]", "UnicodeEncodeError"),
        ("[pb_utils.InferenceResponse(error=pb_utils.TritonError(5))]", "message must be a str"),
        ("pb_utils.InferenceRequest(model_name='m')", "TypeError: InferenceRequest requires"),
        (
            "pb_utils.InferenceResponse([None])",
            "TritonModelException: Output tensor for inference response should not be empty.",
        ),
        ("pb_utils.InferenceResponse(output_tensors=None)", "TypeError"),
        ("pb_utils.Tensor(None, np.zeros(1))", "TypeError: name must be a str"),
        ("pb_utils.Tensor('y', None)", "TypeError: Tensor 'y': expected a numpy array"),
        ("pb_utils.Tensor('', np.zeros(1))", "TritonModelException: Tensor name cannot be an"),
        (
            "pb_utils.Tensor.from_dlpack('', None)",
            "TritonModelException: Tensor name cannot be an empty string.",
        ),
        (
            "pb_utils.Tensor.from_dlpack('y', None)",
            "TritonModelException: Provided tensor is not supported.",
        ),
        ("pb_utils.Logger.log('line', 1)", "TypeError: level must be a level of Logger"),
        ("pb_utils.Logger.log('line', None)", "TypeError: level must be a level of Logger"),
        ("pb_utils.Logger.log_info(None)", "TypeError: message must be a str"),
        ("FRAMES.Metric({'version': 1})", "label's value must be a str"),
        (
            "FRAMES.Metric(['version'])",
            "TritonModelException: Failed to create metric. Labels must",
        ),
        ("FRAMES.Metric().increment(None)", "TypeError"),
        ("pb_utils.MetricFamily('a', 'b')", "TypeError: a metric is of no kind None"),
        ("pb_utils.MetricFamily('a', 'b', 'sum')", "of no kind 'sum'"),
        ("pb_utils.MetricFamily('frames', '', 'gauge')", "'frames' is a counter already, no gauge"),
        ("pb_utils.MetricFamily('dropped', '', 'counter').Metric().value()", "has been deleted"),
        ("pb_utils.is_model_ready('m', 1)", "model_version must be a str"),
        ("1 / 0", "ZeroDivisionError"),
    ],
)
def test_what_cannot_be_sent_is_an_error_where_it_was_made_and_costs_no_process(
    serve: Serve, returned: str, text: str
) -> None:
    served = serve(
        m=f"""
        def initialize(self, args):
            global FRAMES
            FRAMES = pb_utils.MetricFamily("frames", "", pb_utils.MetricFamily.COUNTER)
        def execute(self, requests):
            (r,) = requests
            return {returned} if x(r)[0] else [y([os.getpid()])]
        """
    )
    before = served.values("m", 0)
    assert text in text_of(lambda: served.infer("m", 1))
    assert served.values("m", 0) == before


def test_an_exception_that_cannot_be_printed_costs_no_process(serve: Serve) -> None:
    served = serve(
        m="""
        def execute(self, requests):
            class Silent(Exception):
                def __str__(self):
                    raise RuntimeError
            n = x(requests[0])[0]
            if n:
                raise (Silent if n == 1 else OSError)(chr(0xDCFF))
            return [y([os.getpid()])]
        """
    )
    before = served.values("m", 0)
    assert "message: Silent: <Silent that cannot be printed: RuntimeError>" in text_of(
        lambda: served.infer("m", 1)
    )
    assert r"message: OSError: \xff" in text_of(lambda: served.infer("m", 2))
    assert served.values("m", 0) == before


def test_parameters_of_types_that_are_made_from_pythons_own_travel(serve: Serve) -> None:
    served = serve(
        m="""
        def execute(self, requests):
            import enum
            class Text(str):
                def __str__(self):
                    return "another"
            class Number(enum.IntEnum):
                ONE = 1
            parameters = {"t": Text("ab"), "n": Number.ONE, "f": np.float64(0.5), "b": True}
            return [y([1], parameters=parameters)]
        """
    )
    assert served.infer("m", 1).parameters == {"t": "ab", "n": 1, "f": 0.5, "b": True}


def test_a_model_without_a_configuration_loads(serve: Serve, tmp_path: Path) -> None:
    version = tmp_path / "models" / "bare" / "1"
    version.mkdir(parents=True)
    source = "class TritonPythonModel:\n    def execute(self, requests):\n        return []\n"
    (version / "model.py").write_text(source)
    served = serve(m="def execute(self, requests):\n    return [y(x(r)) for r in requests]")
    assert served.failed == []
    assert served.plane.model_ready("bare", "")


def test_a_model_has_no_arguments_and_its_own_code_of_failure_arrives(
    serve: Serve, caplog: pytest.LogCaptureFixture
) -> None:
    served = serve(
        m="""
        def execute(self, requests):
            assert sys.argv == [""]
            error = pb_utils.TritonError("no idea", pb_utils.TritonError.UNKNOWN)
            return [pb_utils.InferenceResponse(error=error) for _ in requests]
        """,
        late=(
            "model_transaction_policy { decoupled: true }",
            """
        def execute(self, requests):
            for r in requests:
                r.get_response_sender().send(y(1), flags=1)
            raise RuntimeError("after the end")
            """,
        ),
        odd="""
        def is_ready(self):
            return 1
        def execute(self, requests):
            return [y(1)]
        """,
    )
    with pytest.raises(UnknownError, match="no idea"):
        served.infer("m", 1)
    assert served.submit("late", 1).values() == [1]
    assert served.model("odd").not_ready_reason() == "instance 'odd_0': is_ready returned False"
    served.registry.clear()
    assert "RuntimeError: after the end" in caplog.text
