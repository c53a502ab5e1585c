"""The parameters of an inference request and of its tensors, the headers of its call that become
such parameters, and the texts for invalid ones."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

from msgspec.structs import replace

from edge_server.errors import InvalidRequest
from edge_server.requests import NO_PARAMETERS, Parameters, SequencePlace
from edge_server.settings.transport import header_pattern

if TYPE_CHECKING:
    from collections.abc import Iterable

    from edge_server.requests import InferRequest, Parameter


EMPTY_FINAL_RESPONSE = "triton_enable_empty_final_response"

_LONGEST_SEQUENCE_ID = 128

# The protocol's own parameters, and the value fields that each allows.
_KINDS = {
    "sequence_id": ("int64_param", "string_param"),
    "sequence_start": ("bool_param",),
    "sequence_end": ("bool_param",),
    "priority": ("int64_param", "uint64_param"),
    "timeout": ("int64_param",),
    EMPTY_FINAL_RESPONSE: ("bool_param",),
}
_REGION_KINDS = {
    "shared_memory_region": "string_param",
    "shared_memory_offset": "int64_param",
    "shared_memory_byte_size": "int64_param",
}
_CUSTOM_KINDS = frozenset(
    {"int64_param", "bool_param", "string_param", "uint64_param", "double_param"}
)
_MOST_INT64 = 2**63 - 1


class RequestParameters(NamedTuple):
    """The protocol's parameters by name, and the caller's own; see `InferRequest`."""

    priority: int = 0
    timeout_us: int = 0
    sequence: SequencePlace | None = None
    custom: Parameters = NO_PARAMETERS


def read_parameters(parameters: Any) -> RequestParameters:
    """Return the parameters of a request's parameter map; raise InvalidRequest as Triton."""
    own: dict[str, Any] = {}
    custom: dict[str, Parameter] = {}
    for key, value in parameters.items():
        kinds = _KINDS.get(key)
        if kinds is not None:
            own[key] = typed_value(value, f"'{key}' parameter", *kinds)
            continue
        if key.startswith("triton_"):
            raise InvalidRequest(
                "parameter keys starting with 'triton_' are reserved for Triton usage. Only the "
                "following keys starting with 'triton_' are allowed: "
                f"{EMPTY_FINAL_RESPONSE} "
            )
        kind = value.WhichOneof("parameter_choice")
        if kind not in _CUSTOM_KINDS:
            raise InvalidRequest(
                f"invalid value type for '{key}' parameter, expected int64_param, bool_param, or "
                "string_param."
            )
        custom[key] = getattr(value, kind)
    return RequestParameters(
        priority=_natural(own, "priority"),
        timeout_us=_natural(own, "timeout"),
        sequence=_sequence(own),
        custom=custom,
    )


def region_of(tensor: str, parameters: Any) -> tuple[str, int, int] | None:
    """Return region, offset and byte size from a tensor's parameters, None without a region; raise
    InvalidRequest as Triton.
    """
    name, offset, byte_size = (
        typed_value(parameters[key], f"'{key}' parameter for tensor '{tensor}'", kind)
        if key in parameters
        else None
        for key, kind in _REGION_KINDS.items()
    )
    if name is None:
        for key, value in zip(_REGION_KINDS, (name, offset, byte_size), strict=True):
            if value is not None:
                raise InvalidRequest(
                    f"'{key}' can not be specified without 'shared_memory_region' parameter for "
                    f"tensor '{tensor}'"
                )
        return None
    if byte_size is None:
        raise InvalidRequest(
            "'shared_memory_byte_size' must be specified along with 'shared_memory_region' "
            f"parameter for tensor '{tensor}'"
        )
    return name, offset or 0, byte_size


def typed_value(value: Any, where: str, *kinds: str, end: str = ".") -> Any:
    """Return what is set in an `InferParameter` or a parameter of a load.

    Raises: InvalidRequest: none of the fields `kinds` is set.
    """
    kind = value.WhichOneof("parameter_choice")
    if kind not in kinds:
        raise InvalidRequest(f"invalid value type for {where}, expected {' or '.join(kinds)}{end}")
    return getattr(value, kind)


def write_parameter(message: Any, value: Parameter) -> None:
    """Set an `InferParameter` to `value`, in the field for its type."""
    # A bool is an int to Python.
    if isinstance(value, bool):
        message.bool_param = value
    elif isinstance(value, int):
        if value > _MOST_INT64:
            message.uint64_param = value
        else:
            message.int64_param = value
    elif isinstance(value, float):
        message.double_param = value
    else:
        message.string_param = value


def _natural(own: dict[str, Any], key: str) -> int:
    value: int = own.get(key, 0)
    if value < 0:
        raise InvalidRequest(f"invalid value for '{key}', expected value >= 0.")
    return value


def _sequence(own: dict[str, Any]) -> SequencePlace | None:
    if not own.keys() & {"sequence_id", "sequence_start", "sequence_end"}:
        return None
    sequence_id = own.get("sequence_id", 0)
    if isinstance(sequence_id, int):
        # int64 carries the 64 bits of an id that the sequence batcher treats as unsigned.
        sequence_id %= 2**64
    elif len(sequence_id) > _LONGEST_SEQUENCE_ID:
        raise InvalidRequest(
            f"'sequence_id' has {len(sequence_id)} characters, at most {_LONGEST_SEQUENCE_ID} are "
            "allowed"
        )
    return SequencePlace(
        sequence_id, own.get("sequence_start", False), own.get("sequence_end", False)
    )


_RESERVED = frozenset(
    {
        "sequence_id",
        "sequence_start",
        "sequence_end",
        "priority",
        "timeout",
        "headers",
        "binary_data_output",
    }
)
# They have tokens of this daemon, which no model and no trace shall have.
_NEVER = frozenset({"authorization", "cookie"})
# The search for a name's match must end soon, whatever name a client makes up.
_LONGEST_NAME = 128


class HeaderForwarding:
    """Adds the headers whose name has a match of `pattern`, somewhere in it (Triton's rule).

    A header counts more than a parameter of the same name: a proxy in front of the server may have
    set it.

    Args:
        pattern: see `header_pattern`; empty forwards none.
        secret: names of headers that are not forwarded, beside those that may have tokens.
    """

    def __init__(self, pattern: str = "", secret: Iterable[str] = ()) -> None:
        self._secret = _NEVER.union(secret)
        self._pattern = header_pattern(pattern) if pattern else None

    def add(
        self, request: InferRequest, headers: Iterable[tuple[str, str | bytes]]
    ) -> InferRequest:
        """Return `request` with the parameters of the call's `headers`.

        Raises:
            InvalidRequest: a header's name is too long for a search; a forwarded header has a
                reserved name, or is no text.
        """
        if self._pattern is None:
            return request
        found = {name: value for name, value in headers if self._matches(name)}
        if not found:
            return request
        forwarded = {name: _text(name, value) for name, value in found.items()}
        return replace(request, parameters={**request.parameters, **forwarded})

    def _matches(self, name: str) -> bool:
        if len(name) > _LONGEST_NAME:
            raise InvalidRequest(
                f"Header '{name[:16]}…' has a name of {len(name)} characters; where headers are "
                f"forwarded it has {_LONGEST_NAME} at most."
            )
        if self._pattern is None or name.lower() in self._secret:
            return False
        return self._pattern.search(name) is not None


def _text(name: str, value: str | bytes) -> str:
    if name in _RESERVED or name.startswith("triton_"):
        raise InvalidRequest(
            f"Header '{name}' is reserved for Triton usage and cannot be forwarded."
        )
    if isinstance(value, str):
        return value
    try:
        return value.decode()
    except UnicodeDecodeError as error:
        raise InvalidRequest(
            f"Header '{name}' is not UTF-8 text and cannot be forwarded."
        ) from error
