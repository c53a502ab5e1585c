"""AccessRules: which calls each listener allows, checked in one place for every method."""

from __future__ import annotations

import hmac
from dataclasses import dataclass
from types import MappingProxyType
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

    from edge_server.api.tokens import Scope, Tokens
    from edge_server.errors import PermissionDenied, Unauthenticated
    from edge_server.settings import Grpc, Http, Restriction

TRITON = "/inference.GRPCInferenceService/"
_LANES = "/edge.lanes.v1.LaneService/"
REFLECTION = tuple(
    f"/grpc.reflection.{version}.ServerReflection/ServerReflectionInfo"
    for version in ("v1", "v1alpha")
)

# Over HTTP only, and read like the rest.
METRICS = "/metrics"

# Triton's words for groups of methods (`--grpc-restricted-protocol`), and `lanes`.
PROTOCOLS: Mapping[str, tuple[str, ...]] = MappingProxyType(
    {
        "health": (
            f"{TRITON}ServerLive",
            f"{TRITON}ServerReady",
            f"{TRITON}ModelReady",
            "/grpc.health.v1.Health/Check",
            "/grpc.health.v1.Health/Watch",
        ),
        "metadata": (f"{TRITON}ServerMetadata", f"{TRITON}ModelMetadata"),
        "inference": (f"{TRITON}ModelInfer", f"{TRITON}ModelStreamInfer"),
        "shared-memory": tuple(
            f"{TRITON}{kind}SharedMemory{what}"
            for kind in ("System", "Cuda")
            for what in ("Status", "Register", "Unregister")
        ),
        "model-config": (f"{TRITON}ModelConfig",),
        "model-repository": tuple(
            f"{TRITON}Repository{what}" for what in ("Index", "ModelLoad", "ModelUnload")
        ),
        "statistics": (f"{TRITON}ModelStatistics",),
        "trace": (f"{TRITON}TraceSetting",),
        "logging": (f"{TRITON}LogSettings",),
        "lanes": tuple(
            f"{_LANES}{name}"
            for name in (
                *("StreamLanes", "GetLatestLanes", "StreamEvents", "ListCameras"),
                *("SetVehicleState", "Record"),
            )
        ),
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
        f"{TRITON}SystemSharedMemoryStatus",
        f"{TRITON}CudaSharedMemoryStatus",
        f"{TRITON}RepositoryIndex",
        *REFLECTION,
        *PROTOCOLS["lanes"],
        METRICS,
    }
    - {f"{_LANES}SetVehicleState", f"{_LANES}Record"}
)

# Control calls only if the request names a setting; without one the call only reads the settings.
UPDATES = frozenset({f"{TRITON}TraceSetting", f"{TRITON}LogSettings"})


@dataclass(frozen=True)
class AccessRules:
    """The calls that one listener allows.

    Attributes:
        control_refusal: the reason why it refuses control calls; empty where it allows them.
        restrictions: method → header and value that a call must carry.
        tokens: None where nobody needs one.
        what: is restricted, in Triton's text.
    """

    control_refusal: str
    restrictions: Mapping[str, Restriction]
    tokens: Tokens | None = None
    what: str = "protocol"

    @classmethod
    def of(cls, settings: Grpc, *, unix: bool, tokens: Tokens | None = None) -> AccessRules:
        """Return the rules of gRPC's TCP side, or of the Unix socket, whose files' permissions say
        who may call: it needs no tokens."""
        return cls(
            _control_refusal(settings, unix=unix),
            _restrictions(settings.restricted),
            None if unix else tokens,
        )

    @classmethod
    def of_http(cls, settings: Http, grpc: Grpc, tokens: Tokens | None = None) -> AccessRules:
        """Return the rules of HTTP, which serves control calls where gRPC's TCP side does."""
        return cls(
            _control_refusal(grpc, unix=False), _restrictions(settings.restricted), tokens, "API"
        )

    @property
    def refuse_any(self) -> bool:
        """Whether the rules refuse any call at all."""
        return bool(self.control_refusal or self.restrictions or self.tokens)

    def refusal(self, method: str, metadata: Iterable[tuple[str, str | bytes]]) -> str:
        """Return why a call of `method` with these headers is refused; empty if it is allowed."""
        restriction = self.restrictions.get(method)
        if restriction is not None:
            given = next((value for key, value in metadata if key == restriction.header), b"")
            given = given.encode() if isinstance(given, str) else given
            if not hmac.compare_digest(given, restriction.value.encode()):
                return f"This {self.what} is restricted, expecting header '{restriction.header}'"
        return "" if method in OPEN or method in UPDATES else self._control_refusal_of(method)

    def update_refusal(self, method: str) -> str:
        """Return the same of a call whose request changes settings; empty if it is allowed or if
        the method has none."""
        return self._control_refusal_of(method) if method in UPDATES else ""

    def token_refusal(
        self, method: str, metadata: Iterable[tuple[str, str | bytes]], *, updates: bool = False
    ) -> Unauthenticated | PermissionDenied | None:
        """Return why a call of `method` needs another token; None where it is allowed.

        Args:
            updates: the call is one of `UPDATES`, and changes settings.
        """
        if self.tokens is None:
            return None
        return self.tokens.refusal("control" if updates else _scope_of(method), metadata)

    def _control_refusal_of(self, method: str) -> str:
        name = method.rpartition("/")[2]
        return f"{name} {self.control_refusal}" if self.control_refusal else ""


def _control_refusal(settings: Grpc, *, unix: bool) -> str:
    if settings.control == "off":
        return 'is a control call, and those are off (grpc.control = "off")'
    if settings.control == "unix" and not unix:
        return f"is a control call; those are served on the Unix socket {settings.socket}"
    return ""


def _restrictions(restricted: Iterable[Restriction]) -> Mapping[str, Restriction]:
    return {
        method: each
        for each in restricted
        for protocol in each.protocols
        for method in PROTOCOLS[protocol]
    }


def _scope_of(method: str) -> Scope | None:
    """Return the scope that a call of `method` needs; a health check needs none."""
    if method in PROTOCOLS["health"]:
        return None
    if method in PROTOCOLS["inference"]:
        return "infer"
    return "read" if method in OPEN or method in UPDATES else "control"
