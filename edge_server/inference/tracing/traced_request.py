"""Which requests are traced, and the timestamps of a traced request and its nested requests."""

from __future__ import annotations

import itertools
import json
import threading
import time
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence


# Limit per request: a decoupled member of an ensemble may start steps without end.
_MOST_TRACES = 1000
# Limit of a traced request id, which may otherwise be as long as a message.
_LONGEST_ID = 1024


@dataclass(frozen=True)
class TraceRule:
    """The trace settings.

    Attributes:
        timestamps: whether any request is traced.
        rate: one of so many requests is traced; 0 is allowed only without timestamps.
        count: traces left; -1 is unlimited.
        log_frequency: traces in a file before the next is begun; 0 is one file.
    """

    timestamps: bool = False
    rate: int = 1000
    count: int = -1
    log_frequency: int = 0


class Sampler:
    """Applies one rule to requests, on any thread.

    Traces of one sampler share a series of numbered files.
    """

    def __init__(self, rule: TraceRule) -> None:
        self.rule = rule
        self._lock = threading.Lock()
        self._seen = itertools.count(1)
        self._left = rule.count

    @property
    def rule_now(self) -> TraceRule:
        """The rule, with its remaining count."""
        return replace(self.rule, count=self._left)

    def take(self) -> bool:
        """Whether the next request is traced: the last of every `rate`."""
        if not self.rule.timestamps or self._left == 0 or next(self._seen) % self.rule.rate:
            return False
        with self._lock:
            if self._left > 0:
                self._left -= 1
                return True
            return self._left < 0


class TracedRequest:
    """One sampled request with its nested requests; reported once, when all of them are over.

    Args:
        sampler: the sampler that chose the request for the trace file; None where none did.
        ids: gives each trace its number.
        when_over: called with this request, on the thread that ended the last trace.
    """

    def __init__(
        self,
        sampler: Sampler | None,
        ids: Iterator[int],
        when_over: Callable[[TracedRequest], None],
    ) -> None:
        self.sampler = sampler
        self.ids = ids
        self._when_over = when_over
        self._lock = threading.Lock()
        self._traces: list[ModelTrace] = []
        self._made = 0
        self._open = 0
        self._over = False

    def __len__(self) -> int:
        """The number of traces."""
        return len(self._traces)

    @property
    def traces(self) -> Sequence[ModelTrace]:
        """In the order in which they began."""
        return self._traces

    def trace(self, model_name: str, request_id: str, parent_id: int = 0) -> ModelTrace | None:
        """Make the trace of one nested request; None above the limit."""
        self._made += 1
        if self._made > _MOST_TRACES:
            return None
        return ModelTrace(self, next(self.ids), model_name, request_id[:_LONGEST_ID], parent_id)

    def hold(self, trace: ModelTrace | None = None) -> None:
        """Keep the request open until as many `release` calls; `trace` has begun."""
        with self._lock:
            self._open += 1
            if trace is not None:
                self._traces.append(trace)

    def release(self) -> None:
        with self._lock:
            self._open -= 1
            if self._open or self._over or not self._traces:
                return
            # Traces that begin later belong to a request that has failed.
            self._over = True
        self._when_over(self)

    def written(self) -> bytes:
        """The elements of Triton's JSON array, one per line."""
        lines = [line for trace in self._traces for line in trace.written()]
        return ",\n".join(lines).encode()


class ModelTrace:
    """See `edge_server.requests.Trace`.

    Attributes:
        request: the traced request around this trace.
        id: counts the traces of this process.
        parent_id: of the trace around it; 0 for the first of a request.
        moments: name and `time.monotonic_ns`, in the order in which they were recorded.
        error: why the request failed; empty where it did not.
    """

    def __init__(
        self, request: TracedRequest, own_id: int, model_name: str, request_id: str, parent_id: int
    ) -> None:
        self.request = request
        self.id = own_id
        self.model_name = model_name
        self.model_version = 0
        self.request_id = request_id
        self.parent_id = parent_id
        self.moments: list[tuple[str, int]] = []
        self.error = ""
        self._responded = False
        self._ended = False

    def begin(self, model_version: int) -> None:
        self.model_version = model_version
        self.request.hold(self)
        self.mark("REQUEST_START")

    def responded(self, *, final: bool, error: str = "") -> None:
        self.error = error or self.error
        if not self._responded and not self.parent_id:
            self.mark("INFER_RESPONSE_COMPLETE")
        self._responded = True
        if final:
            self.end()

    def mark(self, name: str, at_ns: int | None = None) -> None:
        self.moments.append((name, time.monotonic_ns() if at_ns is None else at_ns))

    def end(self, error: str = "") -> None:
        self.error = error or self.error
        if not self._ended:
            self._ended = True
            self.mark("REQUEST_END")
            self.request.release()

    def child(self, model_name: str, request_id: str) -> ModelTrace | None:
        return self.request.trace(model_name, request_id, self.id)

    def written(self) -> tuple[str, str]:
        """The trace's identity, and its timestamps in order, as JSON."""
        about: dict[str, object] = {
            "id": self.id,
            "model_name": self.model_name,
            "model_version": self.model_version,
        }
        if self.request_id:
            about["request_id"] = self.request_id
        if self.parent_id:
            about["parent_id"] = self.parent_id
        moments = sorted(self.moments, key=lambda moment: moment[1])
        timestamps = [{"name": name, "ns": at_ns} for name, at_ns in moments]
        return _json(about), _json({"id": self.id, "timestamps": timestamps})


def _json(value: object) -> str:
    return json.dumps(value, separators=(",", ":"))
