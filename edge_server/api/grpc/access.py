"""AccessRules: which calls each listener allows, checked in one place for every method."""

from __future__ import annotations

import hmac
from dataclasses import dataclass
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, NoReturn

import grpc
from google.protobuf.message import DecodeError
from tritonclient.grpc import service_pb2 as pb

from edge_server.api.grpc.methods import LONGEST_QUESTION_BYTES
from edge_server.api.grpc.traffic import Traffic

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, Sequence

    from edge_server.settings import Grpc, Restriction

_TRITON = "/inference.GRPCInferenceService/"

# Triton's words for groups of methods (`--grpc-restricted-protocol`).
PROTOCOLS: Mapping[str, tuple[str, ...]] = MappingProxyType(
    {
        "health": (
            f"{_TRITON}ServerLive",
            f"{_TRITON}ServerReady",
            f"{_TRITON}ModelReady",
            "/grpc.health.v1.Health/Check",
            "/grpc.health.v1.Health/Watch",
        ),
        "metadata": (f"{_TRITON}ServerMetadata", f"{_TRITON}ModelMetadata"),
        "inference": (f"{_TRITON}ModelInfer", f"{_TRITON}ModelStreamInfer"),
        "shared-memory": tuple(
            f"{_TRITON}{kind}SharedMemory{what}"
            for kind in ("System", "Cuda")
            for what in ("Status", "Register", "Unregister")
        ),
        "model-config": (f"{_TRITON}ModelConfig",),
        "model-repository": tuple(
            f"{_TRITON}Repository{what}" for what in ("Index", "ModelLoad", "ModelUnload")
        ),
        "statistics": (f"{_TRITON}ModelStatistics",),
        "trace": (f"{_TRITON}TraceSetting",),
        "logging": (f"{_TRITON}LogSettings",),
    }
)

# Methods that change nothing for other clients. Every other method is a control call, so that a
# new method stays closed until it is added here.
OPEN = frozenset(
    {
        *PROTOCOLS["health"],
        *PROTOCOLS["metadata"],
        *PROTOCOLS["inference"],
        *PROTOCOLS["model-config"],
        *PROTOCOLS["statistics"],
        f"{_TRITON}SystemSharedMemoryStatus",
        f"{_TRITON}CudaSharedMemoryStatus",
        f"{_TRITON}RepositoryIndex",
    }
)

# Control calls only if the request names a setting; without one the call only reads the settings.
UPDATES: Mapping[str, Callable[[bytes], Any]] = MappingProxyType(
    {
        f"{_TRITON}TraceSetting": pb.TraceSettingRequest.FromString,
        f"{_TRITON}LogSettings": pb.LogSettingsRequest.FromString,
    }
)


@dataclass(frozen=True)
class AccessRules:
    """The calls that one listener allows.

    Attributes:
        control_refusal: the reason why it refuses control calls; empty where it allows them.
        restrictions: method → header and value that a call must carry.
    """

    control_refusal: str
    restrictions: Mapping[str, Restriction]

    @classmethod
    def of(cls, settings: Grpc, *, unix: bool) -> AccessRules:
        """Return the rules of the TCP side, or of the Unix socket."""
        refusal = ""
        if settings.control == "off":
            refusal = 'is a control call, and those are off (grpc.control = "off")'
        elif settings.control == "unix" and not unix:
            refusal = f"is a control call; those are answered on the Unix socket {settings.socket}"
        restrictions = {
            method: each
            for each in settings.restricted
            for protocol in each.protocols
            for method in PROTOCOLS[protocol]
        }
        return cls(refusal, restrictions)

    @property
    def refuse_any(self) -> bool:
        """Whether the rules refuse any call at all."""
        return bool(self.control_refusal or self.restrictions)

    def refusal(self, method: str, metadata: Mapping[str, str | bytes]) -> str:
        """Return why a call of `method` with these headers is refused; empty if it is allowed."""
        restriction = self.restrictions.get(method)
        if restriction is not None:
            told = metadata.get(restriction.header, b"")
            told = told.encode() if isinstance(told, str) else told
            if not hmac.compare_digest(told, restriction.value.encode()):
                return f"This protocol is restricted, expecting header '{restriction.header}'"
        if self.control_refusal and method not in OPEN and method not in UPDATES:
            return f"{method.rpartition('/')[2]} {self.control_refusal}"
        return ""

    def update_refusal(self, method: str, request: bytes) -> str:
        """Return the same where only the request shows whether the method changes a setting."""
        if not self.control_refusal or len(request) > LONGEST_QUESTION_BYTES:
            return ""  # the method refuses a request of that length
        try:
            changes = bool(UPDATES[method](request).settings)
        except DecodeError:
            return ""  # such a request changes nothing; its method returns the error
        return f"{method.rpartition('/')[2]} {self.control_refusal}" if changes else ""


class AccessCheck(grpc.ServerInterceptor):
    """Refuses, before any other check, every call that the rules of its listener do not allow.

    A refusal is UNAVAILABLE, as Triton's own for restricted protocols.

    Args:
        traffic: see `unary`.
    """

    def __init__(self, rules: AccessRules, traffic: Traffic | None = None) -> None:
        self._rules = rules
        self._traffic = traffic or Traffic()

    def intercept_service(
        self,
        continuation: Callable[[grpc.HandlerCallDetails], grpc.RpcMethodHandler[Any, Any] | None],
        handler_call_details: grpc.HandlerCallDetails,
    ) -> grpc.RpcMethodHandler[Any, Any] | None:
        handler = continuation(handler_call_details)
        if handler is None:
            return None
        method = handler_call_details.method
        refusal = self._rules.refusal(method, _first(handler_call_details.invocation_metadata))
        if refusal:
            return _refusing(handler, refusal)
        behaviour = handler.stream_unary
        if method not in UPDATES or behaviour is None:
            return handler

        def answer(requests: Iterator[bytes], context: grpc.ServicerContext) -> Any:
            request = self._traffic.read(requests, context)
            refusal = self._rules.update_refusal(method, request)
            if refusal:
                context.abort(grpc.StatusCode.UNAVAILABLE, refusal)
            return behaviour(iter((request,)), context)

        return grpc.stream_unary_rpc_method_handler(answer)


def _first(metadata: Sequence[tuple[str, str | bytes]] | None) -> dict[str, str | bytes]:
    return dict(reversed(metadata or ()))


def _refusing(
    handler: grpc.RpcMethodHandler[Any, Any], text: str
) -> grpc.RpcMethodHandler[Any, Any]:
    """Return a handler of the same kind that refuses every call."""

    def refuse(_: Any, context: grpc.ServicerContext) -> NoReturn:
        context.abort(grpc.StatusCode.UNAVAILABLE, text)

    if handler.request_streaming and handler.response_streaming:
        return grpc.stream_stream_rpc_method_handler(refuse)
    if handler.request_streaming:
        return grpc.stream_unary_rpc_method_handler(refuse)
    if handler.response_streaming:
        return grpc.unary_stream_rpc_method_handler(refuse)
    return grpc.unary_unary_rpc_method_handler(refuse)
