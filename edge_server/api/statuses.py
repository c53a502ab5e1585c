"""The one table from errors to statuses, of gRPC and of HTTP."""

from __future__ import annotations

from types import MappingProxyType
from typing import TYPE_CHECKING, NamedTuple

from edge_server import errors

if TYPE_CHECKING:
    from collections.abc import Mapping


class Status(NamedTuple):
    """The name of gRPC's status code, and the code of HTTP (Triton's)."""

    grpc: str
    http: int


STATUS: Mapping[type[errors.EdgeServerError], Status] = MappingProxyType(
    {
        errors.InvalidRequest: Status("INVALID_ARGUMENT", 400),
        errors.ModelConfigError: Status("INVALID_ARGUMENT", 400),
        errors.ModelLoadError: Status("INVALID_ARGUMENT", 400),
        errors.NotFound: Status("NOT_FOUND", 404),
        errors.Unavailable: Status("UNAVAILABLE", 503),
        errors.Unsupported: Status("UNIMPLEMENTED", 501),
        errors.AlreadyExists: Status("ALREADY_EXISTS", 400),
        errors.OutOfRange: Status("OUT_OF_RANGE", 400),
        errors.Unauthenticated: Status("UNAUTHENTICATED", 401),
        errors.PermissionDenied: Status("PERMISSION_DENIED", 403),
        errors.LimitReached: Status("RESOURCE_EXHAUSTED", 429),
        errors.Cancelled: Status("CANCELLED", 400),
        errors.DeadlineExceeded: Status("DEADLINE_EXCEEDED", 504),
        errors.InternalError: Status("INTERNAL", 500),
        errors.UnknownError: Status("UNKNOWN", 400),
    }
)


def http_status(error: errors.EdgeServerError) -> int:
    """Return the status of `error`; one without an entry is 500."""
    status = STATUS.get(type(error))
    return 500 if status is None else status.http
