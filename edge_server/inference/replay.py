"""Where a canary replays requests: the predecessor of the new version, and its responses."""

from __future__ import annotations

import logging
import threading
import time
from contextlib import suppress
from dataclasses import replace as with_fields
from enum import Enum
from typing import TYPE_CHECKING

from msgspec.structs import replace

from edge_server.backends.contract import interrupt, not_counted, on_host
from edge_server.errors import Cancelled, DeadlineExceeded, EdgeServerError, Unavailable
from edge_server.inference.data_plane import ENDS_S, MODEL_STUCK_S
from edge_server.inference.request_check import check_request
from edge_server.inference.schedulers import ResponseFuture, innermost
from edge_server.inference.snapshot import ModelEntry, ModelState, Snapshot
from edge_server.model_config.fields import FRAMEWORK_BACKENDS
from edge_server.model_config.interface import interface_break
from edge_server.requests import InferResponse
from edge_server.tensors import Tensor, is_finite

if TYPE_CHECKING:
    from collections.abc import Sequence

    from edge_server.inference.snapshot import LoadedModel
    from edge_server.requests import InferRequest, ResponseCallback

log = logging.getLogger(__name__)

# A cancelled, late or refused request reveals nothing about the version, and many of them must not
# hide the failures of others.
WITHOUT_VERDICT = (Cancelled, DeadlineExceeded, Unavailable)
# Backends whose models only calculate: running a request twice does no harm.
_CALCULATE = FRAMEWORK_BACKENDS | {
    *("onnxruntime", "tensorrt", "image_preprocess", "lane_decode", "identity")
}
# The deadline of a replay in the predecessor's queue.
_DEADLINE_S = 10.0


class Fault(Enum):
    """The possible faults of a response."""

    FAILED = "failed"
    NOT_FINITE = "not finite"


class ReplayTarget:
    """Runs copies of requests on the version before the new one; only one thread at a time.

    Nobody but the caller gets the responses, and no statistics count them.

    Attributes:
        calculates: the models only calculate, so that any request may run again.
        batch_size: of the largest batch that a run may make of several requests.
        others_used: the predecessor has sent a request to another model, which was refused; so its
            own responses are unknown.
    """

    @staticmethod
    def of(
        new: LoadedModel, predecessor: LoadedModel, members: Sequence[LoadedModel]
    ) -> ReplayTarget | None:
        """Return None where `new` and `predecessor` cannot be compared request by request: one of
        them, or of the ensemble's members, keeps state or is decoupled, or the interface has
        changed.

        The models are shared until `close`.
        """
        configs = [new.config, predecessor.config, *(member.config for member in members)]
        if any(c.sequence_batching is not None or c.decoupled for c in configs):
            return None
        known = {member.name for member in members}
        steps = [step for config in configs[1:] for step in config.steps]
        if not known.issuperset(step.model_name for step in steps):
            return None
        if interface_break(predecessor.config, new.config):
            return None
        shared = [model.shared(model.config) for model in (predecessor, *members)]
        result = ReplayTarget([model for model in shared if model is not None])
        if None in shared:
            result.close()
            return None
        result.calculates = all(c.is_ensemble or c.backend in _CALCULATE for c in configs[1:])
        batches = [c.max_batch_size for c in configs if c.dynamic_batching]
        result.batch_size = max([1, *batches])
        return result

    def __init__(self, models: Sequence[LoadedModel]) -> None:
        self._models = models
        self._snapshot = _MembersOnly(models[1:])
        self.calculates = False
        self.batch_size = 1

    @property
    def others_used(self) -> bool:
        return self._snapshot.others_used

    def not_ready_reason(self) -> str:
        """Why the predecessor cannot respond at this moment; empty where it can."""
        return next((text for model in self._models if (text := model.not_ready_reason())), "")

    def response(self, request: InferRequest) -> InferResponse | EdgeServerError:
        """Run a copied request. A model is closed after its runs, so one that hangs is waited for;
        it is ended where its backend can do that."""
        predecessor = self._models[0]
        watch = threading.Timer(MODEL_STUCK_S, self._end_runs, [time.monotonic()])
        watch.daemon = True
        with suppress(RuntimeError):  # the system has no thread left
            watch.start()
        future = ResponseFuture()
        queued = replace(request, deadline=time.monotonic() + _DEADLINE_S)
        try:
            check_request(predecessor.config, queued)
            innermost(predecessor.scheduler).submit(queued, self._snapshot, future)
            return future.wait(request)
        except EdgeServerError as error:
            return error
        finally:
            watch.cancel()

    def _end_runs(self, began: float) -> None:
        for model in self._models:
            interrupt(model.model, began + ENDS_S)

    def close(self) -> None:
        for model in self._models:
            try:
                model.close()
            except Exception:
                log.exception("model %s: closing version %d failed", model.name, model.version)


class _MembersOnly(Snapshot):
    """The snapshot of a copied request: the members of an ensemble, and no other model."""

    def __init__(self, members: Sequence[LoadedModel]) -> None:
        entries = {}
        for member in members:
            key = (member.name, member.version)
            loaded = with_fields(member, scheduler=innermost(member.scheduler))
            entries[key] = ModelEntry(*key, ModelState.READY, loaded=loaded)
        super().__init__(entries)
        self._members = {member.name for member in members}
        self.others_used = False

    def find(self, name: str, version: str = "") -> LoadedModel:
        if name in self._members:
            return super().find(name, version)
        self.others_used = True
        raise Unavailable(f"model '{name}' is not used again for a comparison")

    def model_ready(self, name: str, version: str) -> bool:
        """True, so that the model sends its request to this snapshot and nowhere else."""
        del version
        self.others_used |= name not in self._members
        return True


def copied(request: InferRequest) -> InferRequest:
    """The request to run again, without the caller's deadline and cancellation; its inputs stay
    constant after the caller gets the response.

    Raises:
        EdgeServerError: the device that holds an input failed.
    """
    return replace(
        request,
        inputs={
            name: on_host(tensor, not_counted) if tensor.on_device else Tensor(tensor.array.copy())
            for name, tensor in request.inputs.items()
        },
        model_version="",
        deadline=None,
        urgent=False,
        timeout_us=0,
        cancellation=None,
        trace=None,
        on_device=False,
        replayed=True,
    )


def has_non_finite(response: ResponseCallback) -> bool:
    """Whether a response, on the host, holds infinity or NaN; False for an error."""
    return isinstance(response, InferResponse) and not all(
        map(is_finite, response.outputs.values())
    )


def all_finite(request: InferRequest) -> bool:
    """Whether the inputs of `request` hold neither infinity nor NaN; False where a failed device
    holds them."""
    try:
        return all(is_finite(on_host(tensor, not_counted)) for tensor in request.inputs.values())
    except EdgeServerError:
        return False
