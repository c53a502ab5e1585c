"""A request to load or unload is checked before the models get it."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
from tritonclient.grpc import service_pb2 as pb

from edge_server.api.triton_calls import TritonCalls
from edge_server.errors import EdgeServerError, InvalidRequest, Unavailable, Unsupported
from edge_server.inference.data_plane import DataPlane
from edge_server.inference.registry import ModelRegistry

if TYPE_CHECKING:
    from edge_server.inference.data_plane import LoadOptions
    from edge_server.inference.registry import ModelEntry


class Notes:
    """A ModelControl that notes its calls."""

    loads_on_request = True

    def __init__(self) -> None:
        self.calls: list[object] = []

    def load(self, name: str, options: LoadOptions) -> None:
        self.calls.append((name, options.config, dict(options.files)))

    def unload(self, name: str, *, unload_dependents: bool) -> None:
        self.calls.append((name, unload_dependents))

    def index(self, *, only_ready: bool) -> list[ModelEntry]:
        return []


def calls_of(control: Notes | None) -> TritonCalls:
    return TritonCalls(DataPlane(ModelRegistry()), "triton", "1", control)


def load(name: str = "m", **parameters: dict[str, object]) -> pb.RepositoryModelLoadRequest:
    request = pb.RepositoryModelLoadRequest(model_name=name)
    for key, value in parameters.items():
        request.parameters[key].CopyFrom(pb.ModelRepositoryParameter(**value))
    return request


def test_a_load_passes_configuration_and_files_on() -> None:
    control = Notes()
    calls_of(control).load(load(), None)
    calls_of(control).load(
        load(config={"string_param": "{}"}, **{"file:1/model.onnx": {"bytes_param": b"x"}}), None
    )
    assert control.calls == [("m", None, {}), ("m", "{}", {"1/model.onnx": b"x"})]


def test_an_unload_passes_on_whether_dependents_go_too() -> None:
    control = Notes()
    request = pb.RepositoryModelUnloadRequest(model_name="m")
    calls_of(control).RepositoryModelUnload(request)
    request.parameters["unload_dependents"].bool_param = True
    calls_of(control).RepositoryModelUnload(request)
    assert control.calls == [("m", False), ("m", True)]
    request.parameters["unload_dependents"].int64_param = 1
    with pytest.raises(InvalidRequest, match="'unload_dependents' parameter, expected bool_param"):
        calls_of(control).RepositoryModelUnload(request)


@pytest.mark.parametrize(
    ("request_message", "kind", "says"),
    [
        (
            pb.RepositoryModelLoadRequest(repository_name="r", model_name="m"),
            Unsupported,
            "'repository_name' specification is not supported",
        ),
        (
            load(config={"bytes_param": b"{}"}),
            InvalidRequest,
            "invalid value type for load parameter 'config', expected string_param.",
        ),
        (
            load(**{"file:1/x": {"string_param": ""}}),
            InvalidRequest,
            "invalid value type for load parameter 'file:1/x', expected bytes_param.",
        ),
        (load(x={"bool_param": True}), InvalidRequest, "unrecognized load parameter 'x'."),
    ],
)
def test_a_load_that_makes_no_sense_is_refused_in_the_contracts_words(
    request_message: pb.RepositoryModelLoadRequest, kind: type[EdgeServerError], says: str
) -> None:
    control = Notes()
    with pytest.raises(kind) as caught:
        calls_of(control).load(request_message, None)
    assert str(caught.value) == says
    assert control.calls == []


def test_without_control_nothing_is_loaded_or_unloaded() -> None:
    text = "explicit model load / unload is not allowed if polling is enabled"
    with pytest.raises(Unavailable, match=text):
        calls_of(None).loading()
    with pytest.raises(Unavailable, match=text):
        calls_of(None).RepositoryModelUnload(pb.RepositoryModelUnloadRequest(model_name="m"))
