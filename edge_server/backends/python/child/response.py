"""`pb_utils.InferenceResponse`."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from edge_server.backends.python.arena import ArenaFull
from edge_server.backends.python.child.errors import TritonError, TritonModelException
from edge_server.backends.python.child.given import text, whole
from edge_server.backends.python.child.tensor import Tensor
from edge_server.backends.python.codes import Code, shortened
from edge_server.backends.python.messages import ChildError, ChildResponse
from edge_server.backends.python.packing import pack_for_daemon

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from edge_server.backends.python.arena import ArenaWriter
    from edge_server.backends.python.messages import Value


class InferenceResponse:
    """One response: tensors, or an error."""

    def __init__(
        self,
        output_tensors: Sequence[Tensor] = (),
        error: TritonError | None = None,
        parameters: Mapping[str, Value] | None = None,
    ) -> None:
        for tensor in output_tensors:
            if not isinstance(tensor, Tensor):
                raise TypeError(
                    f"output_tensors must be Tensor objects, found type '{type(tensor)}'"
                )
        if error is not None and not isinstance(error, TritonError):
            raise TypeError(f"error must be a TritonError, found type '{type(error)}'")
        self._tensors = list(output_tensors)
        self._error = error
        self._parameters = plain_parameters(parameters or {})

    def output_tensors(self) -> list[Tensor]:
        return self._tensors

    def has_error(self) -> bool:
        return self._error is not None

    def error(self) -> TritonError | None:
        return self._error

    def parameters(self) -> dict[str, Value]:
        return self._parameters

    def answer(self, outbox: ArenaWriter, wanted: frozenset[str]) -> ChildResponse:
        """Return the message to the daemon: the requested tensors, copied into `outbox`."""
        if self._error is not None:
            return ChildResponse(
                failure=ChildError(self._error.code(), shortened(self._error.message()))
            )
        try:
            places = pack_for_daemon(
                [(t.name(), *t.content) for t in self._tensors if t.name() in wanted], outbox
            )
        except ArenaFull as error:
            return ChildResponse(
                failure=ChildError(
                    Code.INTERNAL,
                    f"the outputs: {error}; parameter 'shared_memory_limit_mib' allows more",
                )
            )
        return ChildResponse(places, parameters=self._parameters)


def plain_parameters(parameters: Mapping[Any, Any]) -> dict[str, Value]:
    """Convert parameters to Python's own types: subclasses, like numpy's float64, cannot be
    encoded.

    Raises:
        TritonModelException: a key or a value has a type that cannot be encoded.
    """
    return {_plain_key(key): _plain_value(value) for key, value in parameters.items()}


def _plain_key(key: Any) -> str:
    if not isinstance(key, str):
        raise TritonModelException(
            f"Expect parameters keys to have type str, found type {type(key)}"
        )
    return text(key, "parameters keys")


def _plain_value(value: Any) -> Value:
    if isinstance(value, str):
        return text(value, "parameters values")
    if isinstance(value, bool):
        return value
    if isinstance(value, int):
        return whole(value, "parameters values")
    if isinstance(value, float):
        return float(value)
    raise TritonModelException(
        f"Expect parameters values to have type bool, int, float or str, found type {type(value)}"
    )
