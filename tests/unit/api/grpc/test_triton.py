"""Whatever bytes ModelInfer and its stream are given, they response or say a listed error."""

from __future__ import annotations

from typing import TYPE_CHECKING

import grpc
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from support.model_configs import config_of
from tritonclient.grpc import service_pb2 as pb

from edge_server.api.admission import Admission, ByteBudget
from edge_server.api.grpc.methods import STATUS, UnaryCall
from edge_server.api.grpc.triton import TritonServicer
from edge_server.api.shared_memory import SharedMemory
from edge_server.api.triton_calls import TritonCalls
from edge_server.backends.contract import TensorModel
from edge_server.inference.data_plane import DataPlane
from edge_server.inference.registry import ModelEntry, ModelRegistry, ModelState
from edge_server.inference.scheduling import Scheduling

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

CONFIG = """
name: "m" backend: "identity" max_batch_size: 4
instance_group { name: "i" count: 1 }
input { name: "a" data_type: TYPE_UINT8 dims: -1 }
input { name: "t" data_type: TYPE_STRING dims: 1 }
output { name: "b" data_type: TYPE_UINT8 dims: -1 }
output { name: "u" data_type: TYPE_STRING dims: 1 }
"""

# How long drawing takes is the machine's affair.
QUICK = settings(suppress_health_check=[HealthCheck.too_slow], deadline=None)


class Context:
    """A call whose client waits for ever."""

    def time_remaining(self) -> None:
        return None

    def is_active(self) -> bool:
        return True

    def add_callback(self, callback: Callable[[], None]) -> bool:
        return True

    def invocation_metadata(self) -> tuple[()]:
        return ()


@pytest.fixture(scope="module")
def servicer(tmp_path_factory: pytest.TempPathFactory) -> TritonServicer:
    directory: Path = tmp_path_factory.mktemp("shm")
    (directory / "key").write_bytes(bytes(64))
    regions = SharedMemory(directory)
    regions.register("r", "key", 8, 32)
    config = config_of(CONFIG)
    model = TensorModel(lambda inputs, outputs: {"b": inputs["a"], "u": inputs["t"]})
    registry = ModelRegistry()
    loaded = Scheduling().model(config, 1, model)
    registry.replace("m", [ModelEntry("m", 1, ModelState.READY, loaded=loaded)])
    calls = TritonCalls(DataPlane(registry), "triton", "1", shared_memory=regions)
    return TritonServicer(calls, Admission(2))


INT64 = st.one_of(st.integers(-2, 40), st.integers(-(2**63), 2**63 - 1))
PARAMETERS = st.dictionaries(
    st.sampled_from(
        [
            "sequence_id",
            "sequence_start",
            "priority",
            "timeout",
            "classification",
            "shared_memory_region",
            "shared_memory_offset",
            "shared_memory_byte_size",
            "triton_enable_empty_final_response",
            "triton_x",
            "own",
        ]
    ),
    st.one_of(
        INT64.map(lambda n: pb.InferParameter(int64_param=n)),
        st.sampled_from(["r", "x", ""]).map(lambda s: pb.InferParameter(string_param=s)),
        st.booleans().map(lambda b: pb.InferParameter(bool_param=b)),
        st.floats().map(lambda f: pb.InferParameter(double_param=f)),
        st.just(pb.InferParameter()),
    ),
    max_size=3,
)


@st.composite
def requests(draw: st.DrawFn) -> bytes:
    """Nearly right requests, some of them damaged."""
    request = pb.ModelInferRequest(
        model_name=draw(st.sampled_from(["m", "m", "m", "n"])),
        model_version=draw(st.sampled_from(["", "1", "2", "x"])),
    )

    def fill(parameters: object) -> None:
        for key, value in draw(PARAMETERS).items():
            parameters[key].CopyFrom(value)

    fill(request.parameters)
    for name, datatype in (("a", "UINT8"), ("t", "BYTES")):
        shape = draw(st.one_of(st.just([1, 1]), st.lists(INT64, max_size=3)))
        tensor = request.inputs.add(name=name, datatype=datatype, shape=shape)
        fill(tensor.parameters)
        if draw(st.integers(0, 4)) == 0:
            tensor.contents.uint_contents.append(draw(st.integers(0, 300)))
    for name in draw(st.lists(st.sampled_from(["b", "u", "v"]), max_size=3)):
        fill(request.outputs.add(name=name).parameters)
    request.raw_input_contents.extend(
        draw(
            st.one_of(
                st.just([b"1", b"\x01\x00\x00\x00x"]), st.lists(st.binary(max_size=9), max_size=3)
            )
        )
    )
    data = bytearray(request.SerializeToString())
    for place, byte in draw(
        st.lists(st.tuples(st.integers(0, len(data) - 1), st.integers(0, 255)), max_size=2)
    ):
        data[place] = byte
    return bytes(data)


@settings(QUICK)
@given(requests())
def test_any_request_gets_a_response_or_a_listed_status(
    servicer: TritonServicer, data: bytes
) -> None:
    try:
        written = servicer.ModelInfer(data, UnaryCall(Context(), ByteBudget()))
    except tuple(STATUS) as error:
        # The request is at fault: what the server would not have foreseen is another status.
        assert STATUS[type(error)] in {  # noqa: PT017 - most examples are refused, some are not
            grpc.StatusCode.INVALID_ARGUMENT,
            grpc.StatusCode.NOT_FOUND,
            grpc.StatusCode.UNAVAILABLE,
            grpc.StatusCode.UNIMPLEMENTED,
        }
    else:
        response = pb.ModelInferResponse.FromString(written)
        assert response.model_name == "m"
        assert {each.name for each in response.outputs} <= {"b", "u"}


@settings(QUICK)
@given(st.lists(requests(), max_size=4))
def test_a_stream_responds_to_each_request_once(
    servicer: TritonServicer, several: list[bytes]
) -> None:
    responses = [
        pb.ModelStreamInferResponse.FromString(written)
        for written in servicer.ModelStreamInfer(iter(several), Context())
    ]
    assert len(responses) == len(several)
    for response in responses:
        # An unforeseen one would have the name of its type.
        assert "Error: " not in response.error_message


@pytest.mark.parametrize("streamed", [False, True])
def test_a_request_runs_on_the_version_whose_configuration_it_was_read_with(
    streamed: bool,
) -> None:
    config = config_of(CONFIG)
    model = TensorModel(lambda inputs, outputs: {"b": inputs["a"], "u": inputs["t"]})
    registry = ModelRegistry()

    def publish(version: int) -> None:
        loaded = Scheduling().model(config, version, model)
        registry.replace("m", [ModelEntry("m", version, ModelState.READY, loaded=loaded)])

    class Swaps(Context):
        """A call whose deadline is read while another version takes over."""

        def time_remaining(self) -> None:
            publish(2)

    publish(1)
    servicer = TritonServicer(TritonCalls(DataPlane(registry), "triton", "1"), Admission(2))
    request = pb.ModelInferRequest(model_name="m", raw_input_contents=[b"1", b"\1\0\0\0x"])
    for name, datatype in (("a", "UINT8"), ("t", "BYTES")):
        request.inputs.add(name=name, datatype=datatype, shape=[1, 1])
    data = request.SerializeToString()
    if streamed:
        (written,) = servicer.ModelStreamInfer(iter([data]), Swaps())
        response = pb.ModelStreamInferResponse.FromString(written).infer_response
    else:
        response = pb.ModelInferResponse.FromString(
            servicer.ModelInfer(data, UnaryCall(Swaps(), ByteBudget()))
        )
    assert response.model_version == "1"
    assert registry.snapshot.ready_versions("m") == [2]
    assert registry.wait_closed(30.0)
