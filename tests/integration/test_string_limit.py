"""The strings that one request may have are read."""

from __future__ import annotations

from support.model_configs import config_of
from tritonclient.grpc import service_pb2 as pb

from edge_server.api.convert import to_infer_request


def test_a_request_with_as_many_strings_as_are_allowed_is_read() -> None:
    """Its unit test shows that one more is refused."""
    many = 2**20
    request = pb.ModelInferRequest(model_name="m")
    request.inputs.add(name="a", datatype="BYTES", shape=[many])
    text = 'name: "m" input { name: "a" data_type: TYPE_STRING dims: -1 }'
    config = config_of(text)
    read, _ = to_infer_request(request, [memoryview(bytes(4 * many))], config)
    assert read.inputs["a"].shape == (many,)
