"""CallCancellation: whether the caller of a gRPC call is still connected."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable

    import grpc


class CallCancellation:
    """A unary call's `Cancellation`: the request is cancelled once its call is over."""

    __slots__ = ("_context",)

    def __init__(self, context: grpc.ServicerContext) -> None:
        self._context = context

    @property
    def cancelled(self) -> bool:
        return not self._context.is_active()

    def when_cancelled(self, callback: Callable[[], None]) -> None:
        if not self._context.add_callback(callback):
            callback()
