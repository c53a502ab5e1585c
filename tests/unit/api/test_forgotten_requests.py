"""Once a call has its error, nothing keeps its request: neither the region nor the tensors."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import weakref
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, NoReturn

import pytest
from starlette.requests import Request

from edge_server.api.access import AccessRules
from edge_server.api.admission import ByteBudget
from edge_server.api.calls import CallThreads
from edge_server.api.grpc.methods import unary
from edge_server.api.http.call import HttpCall
from edge_server.api.http.rest.infer import GeneratedResponses
from edge_server.api.http.rest.routes import rest_routes
from edge_server.api.triton_calls import TritonCalls
from edge_server.errors import InternalError, forget_frames

if TYPE_CHECKING:
    from collections.abc import Iterator


class Region:
    """What a request holds."""


class Model:
    """Fails as a scheduler does, whose frame holds both the request and the error."""

    def __init__(self) -> None:
        self.held: weakref.ref[Region] | None = None

    def infer(self) -> NoReturn:
        region = Region()
        self.held = weakref.ref(region)
        error = InternalError("no")
        try:
            self._of(region, {})
        except KeyError as cause:
            raise error from cause
        raise error

    def _of(self, region: Region, regions: dict[str, Region]) -> Region:
        return regions[repr(region)]

    def has_let_go(self) -> bool:
        return self.held is not None and self.held() is None


@pytest.fixture
def model() -> Iterator[Model]:
    gc.disable()
    yield Model()
    gc.enable()


def test_of_grpc(model: Model) -> None:
    seen = []

    class Context:
        def abort(self, code: Any, text: str) -> NoReturn:
            seen.append((code.name, text))
            raise RuntimeError

    handler: Any = unary(lambda _request, _context: model.infer(), "/path")
    with pytest.raises(RuntimeError):
        handler.stream_unary(iter([b"request"]), Context())
    assert seen == [("INTERNAL", "no")]
    assert model.has_let_go()


def test_of_http(model: Model) -> None:
    api: Any = SimpleNamespace(
        calls=TritonCalls(SimpleNamespace(lease=model.infer), "triton", "1"),
        rules=AccessRules("", {}),
        gate=contextlib.nullcontext(),
        threads=CallThreads(1, "http"),
    )
    endpoint: Any = next(
        route.endpoint  # type: ignore[attr-defined]  # every route of the table has one
        for route in rest_routes(api)
        if getattr(route, "path", "") == "/v2/models/{model}/infer"
    )
    scope: dict[str, Any] = {
        "type": "http",
        "method": "POST",
        "path": "/v2/models/m/infer",
        "path_params": {"model": "m"},
        "headers": [],
        "state": {"call": HttpCall(0, 1, ByteBudget())},
    }

    async def receive() -> dict[str, Any]:
        return {"type": "http.request", "body": b""}

    asyncio.run(endpoint(Request(scope, receive)))
    api.threads.shutdown()
    assert model.has_let_go()


def test_of_generate(model: Model) -> None:
    loop = asyncio.new_event_loop()
    try:
        model.infer()
    except InternalError as error:
        GeneratedResponses(loop, HttpCall(0, 1, ByteBudget())).respond(error, final=True)
    loop.close()
    assert model.has_let_go()


def test_of_an_error_that_is_the_cause_of_its_own_cause() -> None:
    first, second = InternalError("first"), InternalError("second")
    first.__cause__, second.__cause__ = second, first
    with pytest.raises(InternalError) as raised:
        raise first
    forget_frames(raised.value)
    assert first.__traceback__ is None
