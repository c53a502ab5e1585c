"""The tracer: chooses the requests to trace, keeps their timestamps, and has them written."""

from __future__ import annotations

import itertools
import json
import math
import threading
import time
from collections import deque
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, Any, Generic, TypeVar

from edge_server.errors import InvalidRequest
from edge_server.process.worker import Worker

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence

    from edge_server.inference.otlp import FrameTrace, Parent, SpanSender
    from edge_server.inference.trace_file import TraceWriter

    # The metadata of a call, or the headers of an HTTP request; read only where they are needed.
    Headers = Callable[[], Iterable[tuple[str, str | bytes]]]

T = TypeVar("T")

# Limit per request: a decoupled member of an ensemble may start steps without end.
_MOST_TRACES = 1000
# Limit of a traced request id, which may otherwise be as long as a message.
_LONGEST_ID = 1024


class TraceQueue(Generic[T]):
    """Traces that wait, up to a limit, to be exported on a thread of their own.

    No request waits for a disk or a collector. The worker has no supervisor: one that hangs costs
    traces and nothing else.

    Args:
        gather_s: what comes within that time is exported together; a crash costs as much.

    Attributes:
        dropped: the number of traces that were not exported.
    """

    def __init__(self, name: str, gather_s: float) -> None:
        self.dropped = 0
        self._gather_s = gather_s
        self._news = threading.Condition()
        self._waiting: deque[tuple[int, T]] = deque()
        self._waiting_size = 0
        self._closed = False
        self._worker = Worker(name, self._tick, deadline_s=math.inf, on_end=self.end)

    def start(self) -> None:
        self._worker.start()

    def stop(self, timeout_s: float = 1.0) -> None:
        """Export what waits, as far as there is time; accept no more."""
        with self._news:
            self._closed = True
            self._news.notify()
        self._worker.stop(timeout_s)

    def write(self, now: float) -> None:
        """Export what waits at `now` (`time.monotonic()`), or wait a bounded time."""
        raise NotImplementedError

    def end(self) -> None:
        raise NotImplementedError

    def _enqueue(self, item: T, size: int, most: int) -> bool:
        """Queue `item` and return at once; False where more than `most` would wait."""
        with self._news:
            if self._closed or self._waiting_size + size > most:
                return False
            self._waiting_size += size
            self._waiting.append((size, item))
            if len(self._waiting) == 1:
                self._news.notify()
            return True

    def _next(self) -> T | None:
        with self._news:
            if not self._waiting:
                return None
            size, item = self._waiting.popleft()
            self._waiting_size -= size
            return item

    def _clear(self) -> int:
        with self._news:
            size, self._waiting_size = self._waiting_size, 0
            self._waiting.clear()
            return size

    def _tick(self, now: float) -> None:
        with self._news:
            self._news.wait_for(lambda: self._waiting or self._closed)
            self._news.wait_for(lambda: self._closed, self._gather_s)
        self.write(now)


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
        return len(self._traces)

    @property
    def traces(self) -> Sequence[ModelTrace]:
        return self._traces

    def trace(self, model_name: str, request_id: str, parent_id: int = 0) -> ModelTrace | None:
        """The trace of one nested request; None above the limit."""
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
        lines = [line for trace in self._traces for line in trace.written()]
        return ",\n".join(lines).encode()


class ModelTrace:
    """See `edge_server.requests.Trace`.

    Attributes:
        parent_id: of the trace around it; 0 for the first of a request.
        moments: name and `time.monotonic_ns`, in the order in which they were recorded.
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


@dataclass(frozen=True)
class _Group:
    given: Mapping[str, Any]
    sampler: Sampler


class Tracer:
    """Traces one of every `rate` requests, by the rule of all models and those of single models.

    As in Triton: a setting not given for a model is that of all models, but the model has its own
    count; a setting not given for all models keeps its value from the start. A rule that changes
    counts its requests anew. Every method may be called from any thread.

    Args:
        writer: None keeps and reports the rules, and writes no traces.
        sender: sends spans of requests, which it chooses itself, and of frames; None sends none.

    Attributes:
        on: whether any request may be traced at this moment.
    """

    def __init__(
        self,
        at_start: TraceRule | None = None,
        writer: TraceWriter | None = None,
        sender: SpanSender | None = None,
    ) -> None:
        self._at_start = at_start or TraceRule()
        self._writer = writer
        self._sender = sender
        self._ids = itertools.count(1)
        self._lock = threading.Lock()
        self._of_all = _Group({}, Sampler(self._at_start))
        self._of_models: Mapping[str, _Group] = {}
        self.on = self._any(self._at_start.timestamps)

    def _any(self, timestamps: bool) -> bool:
        return self._sender is not None or (timestamps and self._writer is not None)

    @property
    def traces(self) -> bool:
        """Whether requests can be traced at all, once a rule says so."""
        return self._writer is not None or self._sender is not None

    @property
    def file_name(self) -> str:
        """The trace file; empty where nothing is traced."""
        return "" if self._writer is None else self._writer.file_name

    def rule(self, model_name: str) -> TraceRule:
        """The rule for that model, with its remaining count; empty is that of all models."""
        return self.sampler(model_name).rule_now

    def sampler(self, model_name: str) -> Sampler:
        """The sampler of that model; empty is that of all models without one of their own."""
        return self._of_models.get(model_name, self._of_all).sampler

    def sample(
        self, model_name: str, request_id: str, headers: Headers | None = None
    ) -> ModelTrace | None:
        """The trace of this request to that model; None where the request is not traced.

        Args:
            headers: returns those of the request, in lower case: the client's `traceparent` decides
                whether spans are sent, and they become a part of its trace.
        """
        sampler = self._file_sampler(model_name)
        if self._sender is not None:
            chosen, parent = self._sender.choose(headers)
            if chosen:
                report = partial(self._report, parent)
                return TracedRequest(sampler, self._ids, report).trace(model_name, request_id)
        if sampler is None or self._writer is None:
            return None
        return TracedRequest(sampler, self._ids, self._writer.put).trace(model_name, request_id)

    def _file_sampler(self, model_name: str) -> Sampler | None:
        """The sampler that has just taken a request for the file; None where it is not taken."""
        writer = self._writer
        if writer is None or writer.full:
            self.on = self._sender is not None
            return None
        sampler = self.sampler(model_name)
        return sampler if sampler.take() else None

    def _report(self, parent: Parent | None, request: TracedRequest) -> None:
        if request.sampler is not None and self._writer is not None:
            self._writer.put(request)
        if self._sender is not None:
            self._sender.put_request(request, parent)

    def frame(self, camera: str, frame_id: int, capture_ns: int) -> FrameTrace | None:
        if self._sender is None or not self._sender.choose(None)[0]:
            return None
        about: dict[str, str | int] = {"edge.camera": camera, "edge.frame_id": frame_id}
        return self._sender.frame(capture_ns, about)

    def of_frame(self, model_name: str, parent: Parent) -> ModelTrace | None:
        """The trace of a traced frame's request; `parent` is the stage that it belongs to."""
        sender = self._sender
        if sender is None:
            return None

        report = partial(sender.put_request, parent=parent, is_server=False)
        return TracedRequest(None, self._ids, report).trace(model_name, "")

    def begin_anew(self, rule: TraceRule) -> None:
        """Apply `rule` as if it were that of the start: clients' settings are gone."""
        with self._lock:
            self._at_start = rule
            self._of_all = _Group({}, Sampler(rule))
            self._of_models = {}
            self.on = self._any(rule.timestamps)

    def change(self, model_name: str, changes: Mapping[str, Any]) -> None:
        """Apply new settings, all or none.

        Args:
            model_name: empty is all models.
            changes: by the names of `TraceRule`; None removes the setting.

        Raises: InvalidRequest: no request can be traced with these settings (Triton's text).
        """
        with self._lock:
            of_all, of_models = self._of_all, dict(self._of_models)
            if model_name:
                own = of_models.pop(model_name, None)
                changed = _changed(own, of_all.sampler.rule_now, changes)
                if changed.given:
                    of_models[model_name] = changed
            else:
                of_all = _changed(of_all, self._at_start, changes)
                below = of_all.sampler.rule_now
                of_models = {name: _changed(own, below, {}) for name, own in of_models.items()}
            self._of_all, self._of_models = of_all, of_models
            groups = (of_all, *of_models.values())
            self.on = self._any(any(group.sampler.rule.timestamps for group in groups))


def _changed(group: _Group | None, below: TraceRule, changes: Mapping[str, Any]) -> _Group:
    """`group` after `changes`, with the settings of `below` where `group` has none."""
    given = {} if group is None else dict(group.given)
    if group is not None and "count" in given:
        given["count"] = group.sampler.rule_now.count
    given = {name: value for name, value in {**given, **changes}.items() if value is not None}
    rule = replace(below, **given)
    if rule.timestamps and rule.rate == 0:
        raise InvalidRequest(
            "Attempting to set invalid trace setting :sample rate must be non-zero"
        )
    if group is not None and group.sampler.rule_now == rule:
        return _Group(given, group.sampler)
    return _Group(given, Sampler(rule))
