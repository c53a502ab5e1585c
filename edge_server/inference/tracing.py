"""Chooses the requests to trace, keeps their timestamps, and writes Triton's trace file."""

from __future__ import annotations

import errno
import itertools
import json
import logging
import math
import os
import stat
import threading
import time
from collections import deque
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, Generic, TypeVar
from weakref import WeakKeyDictionary

from edge_server.errors import InvalidRequest
from edge_server.process.disk import error_of_place
from edge_server.process.threads import Worker

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence

    from edge_server.inference.otlp import FrameTrace, Parent, SpanSender

    # The metadata of a call, or the headers of an HTTP request; read only where they are needed.
    Headers = Callable[[], Iterable[tuple[str, str | bytes]]]

log = logging.getLogger(__name__)

T = TypeVar("T")

# Limit per request: a decoupled member of an ensemble may start steps without end.
_MOST_TRACES = 1000
# Limit of a traced request id, which may otherwise be as long as a message.
_LONGEST_ID = 1024


class TraceQueue(Generic[T]):
    """Traces that wait, `most` of them, to be exported on a thread of their own: no request waits
    for a disk or a collector. The worker has no supervisor: one that hangs costs traces and nothing
    else. What comes within `gather_s` is exported together; a crash costs as much."""

    def __init__(self, name: str, gather_s: float, most: int, most_at_once: int) -> None:
        self.dropped = 0
        self._gather_s = gather_s
        self._most = most
        self._most_at_once = most_at_once
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

    def flush(self) -> None:
        """Export what waits, until an export fails."""
        while (items := self._take()) and self.export(items):
            pass

    def end(self) -> None:
        self.flush()

    def export(self, items: Sequence[T]) -> bool:
        raise NotImplementedError

    def _enqueue(self, item: T, size: int) -> bool:
        """Queue `item` and return at once; False where too many would wait."""
        with self._news:
            if self._closed or self._waiting_size + size > self._most:
                return False
            self._waiting_size += size
            self._waiting.append((size, item))
            if len(self._waiting) == 1:
                self._news.notify()
            return True

    def _take(self) -> list[T]:
        items: list[T] = []
        taken = 0
        with self._news:
            while self._waiting and taken < self._most_at_once:
                size, item = self._waiting.popleft()
                taken += size
                items.append(item)
            self._waiting_size -= taken
        return items

    def _tick(self, _now: float) -> None:
        with self._news:
            self._news.wait_for(lambda: self._waiting or self._closed)
            self._news.wait_for(lambda: self._closed, self._gather_s)
        self.flush()


@dataclass(frozen=True)
class TraceRule:
    """The trace settings: one of `rate` requests is traced, `count` (-1: all) in all,
    `log_frequency` (0: all) in one file.
    """

    timestamps: bool = False
    rate: int = 1000
    count: int = -1
    log_frequency: int = 0


NOTHING_GIVEN: Mapping[str, Any] = MappingProxyType({})


class Sampler:
    """Applies one rule to requests, on any thread; its traces share a series of numbered files.
    `given` are the settings among those of the rule that clients have chosen for it."""

    def __init__(self, rule: TraceRule, given: Mapping[str, Any] = NOTHING_GIVEN) -> None:
        self.rule = rule
        self.given = given
        self._lock = threading.Lock()
        self._seen = itertools.count(1)
        self._left = rule.count

    @property
    def rule_now(self) -> TraceRule:
        return replace(self.rule, count=self._left)

    def take(self) -> bool:
        """Whether the next request is traced: the last of every `rate`."""
        rate = self.rule.rate
        if not (self.rule.timestamps and rate and self._left) or next(self._seen) % rate:
            return False
        with self._lock:
            if self._left > 0:
                self._left -= 1
                return True
            return self._left < 0


class TracedRequest:
    """One sampled request with its nested requests; reported once, when all of them are over, to
    `when_over`, on the thread that ended the last trace. `sampler` chose it for the trace file."""

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
    """See `edge_server.requests.Trace`; `parent_id` is that of the trace around it, or 0."""

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


class Tracer:
    """Traces one of every `rate` requests, by the rule of all models and those of single models, to
    the trace file, to the collector as spans, or to both. `on` where any request may be traced now.

    As in Triton: a setting not given for a model is that of all models, but the model has its own
    count; a setting not given for all models keeps its value from the start. A rule that changes
    counts its requests anew. Every method may be called from any thread."""

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
        self._of_all = Sampler(self._at_start)
        self._of_models: Mapping[str, Sampler] = {}
        self.on = self._any(self._at_start.timestamps)

    def _any(self, timestamps: bool) -> bool:
        return self._sender is not None or (timestamps and self._writer is not None)

    @property
    def file_name(self) -> str:
        """The trace file; empty where nothing is traced."""
        return "" if self._writer is None else self._writer.file_name

    def rule(self, model_name: str) -> TraceRule:
        """The rule for that model, with its remaining count; empty is that of all models."""
        return self.sampler(model_name).rule_now

    def sampler(self, model_name: str) -> Sampler:
        """The sampler of that model; empty is that of all models without one of their own."""
        return self._of_models.get(model_name, self._of_all)

    def sample(
        self, model_name: str, request_id: str, headers: Headers | None = None
    ) -> ModelTrace | None:
        """The trace of this request to that model; None where the request is not traced. A
        `traceparent` in `headers` decides whether spans are sent, and they become a part of its
        trace."""
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
            self._of_all = Sampler(rule)
            self._of_models = {}
            self.on = self._any(rule.timestamps)

    def change(self, model_name: str, changes: Mapping[str, Any]) -> None:
        """Apply new settings of a model, or of all if its name is empty, by the names of
        `TraceRule`; None removes one. Raises InvalidRequest where no request can be traced with
        them (Triton's text)."""
        with self._lock:
            of_all, of_models = self._of_all, dict(self._of_models)
            if model_name:
                own = of_models.pop(model_name, None)
                changed = _changed(own, of_all.rule_now, changes)
                if changed.given:
                    of_models[model_name] = changed
            else:
                of_all = _changed(of_all, self._at_start, changes)
                below = of_all.rule_now
                of_models = {name: _changed(own, below, {}) for name, own in of_models.items()}
            self._of_all, self._of_models = of_all, of_models
            self.on = self._any(any(s.rule.timestamps for s in (of_all, *of_models.values())))


def _changed(sampler: Sampler | None, below: TraceRule, changes: Mapping[str, Any]) -> Sampler:
    """`sampler` after `changes`, with the settings of `below` where it has none."""
    given = {} if sampler is None else dict(sampler.given)
    if sampler is not None and "count" in given:
        given["count"] = sampler.rule_now.count
    given = {name: value for name, value in {**given, **changes}.items() if value is not None}
    rule = replace(below, **given)
    if rule.timestamps and rule.rate == 0:
        raise InvalidRequest(
            "Attempting to set invalid trace setting :sample rate must be non-zero"
        )
    if sampler is None or sampler.rule_now != rule:
        return Sampler(rule, given)
    sampler.given = given
    return sampler


# Limit of all files together; no person clears the disk of an appliance.
MOST_BYTES = 64 * 1024 * 1024
# The disk space of the smallest file.
_BLOCK_BYTES = 4096
# The limit of traces that wait to be written: requests beyond it are dropped and counted.
MOST_WAITING = 10_000
_GATHER_S = 0.1

_FLAGS = os.O_WRONLY | os.O_CREAT | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
_HEAD, _BETWEEN, _TAIL = b"[\n", b",\n", b"\n]\n"


class TraceFile:
    """Appends traces to `path`, or to `path.0`, `path.1`, … where a limited number share a file.
    Each is a whole JSON array after every write, so that any end of the process costs only the
    unwritten traces. Files of an earlier run stay until the first trace for the same file; all
    count towards the limit. Not thread-safe. Raises Unavailable where `path` is not writable."""

    def __init__(self, path: str, most_bytes: int = MOST_BYTES) -> None:
        # As clients are told; the working directory may change later.
        self.name = path
        self.path = Path(path).absolute()
        self.full = False
        self._most_bytes = most_bytes
        # The numbered file of each sampler, and its number of traces.
        self._parts: WeakKeyDictionary[Sampler, tuple[Path, int]] = WeakKeyDictionary()
        self._next_part = 0
        self._begun: set[Path] = set()
        self._failed = False
        try:
            # An empty file is not valid JSON; the first trace creates the file.
            was_there = os.path.lexists(self.path)
            with _opened(self.path):
                if not was_there:
                    self.path.unlink()
            self._sizes = self._find()
        except OSError as error:
            what = "is a link" if error.errno == errno.ELOOP else error.strerror
            raise error_of_place(
                error,
                f"trace.file: {path}: {what}; give a path in a directory that this user may write "
                "to (--trace-config triton,file=FILE)",
            ) from error
        self._used_bytes = sum(map(_on_disk, self._sizes.values()))

    def write(self, sampler: Sampler, elements: bytes) -> bool:
        """Append the elements of one traced request; False where they were not written, which the
        log says once.
        """
        if self.full:
            return False
        path = self._path_for(sampler)
        try:
            self.full = not self._append(path, elements)
        except OSError as error:
            if not self._failed:
                self._failed = True
                log.warning("trace %s: traces are lost: %s", path, error.strerror)
            return False
        if self.full:
            log.warning(
                "trace %s: no more traces: its files have %d MiB; move them away and start again",
                self.path,
                self._most_bytes >> 20,
            )
        return not self.full

    def _find(self) -> dict[Path, int]:
        name = self.path.name
        found = {}
        with os.scandir(self.path.parent) as entries:
            for entry in entries:
                number = entry.name.removeprefix(f"{name}.")
                if entry.name == name or (number != entry.name and number.isdecimal()):
                    found[self.path.with_name(entry.name)] = entry.stat(
                        follow_symlinks=False
                    ).st_size
        return found

    def _path_for(self, sampler: Sampler) -> Path:
        if not sampler.rule.log_frequency:
            return self.path
        path, traces = self._parts.get(sampler, (self.path, sampler.rule.log_frequency))
        if traces == sampler.rule.log_frequency:
            path, traces = self.path.with_name(f"{self.path.name}.{self._next_part}"), 0
            self._next_part += 1
        self._parts[sampler] = (path, traces + 1)
        return path

    def _append(self, path: Path, elements: bytes) -> bool:
        """False, or an OSError: nothing was written, and the file's old content is whole."""
        with _opened(path) as descriptor:
            size = os.fstat(descriptor).st_size
            goes_on = path in self._begun and size == self._sizes[path] > 0
            at = size - len(_TAIL) if goes_on else 0
            data = (_BETWEEN if goes_on else _HEAD) + elements + _TAIL
            more_bytes = _on_disk(at + len(data)) - _on_disk(self._sizes.get(path, 0))
            if self._used_bytes + more_bytes > self._most_bytes:
                if not size:
                    path.unlink()
                return False
            if not goes_on:
                os.ftruncate(descriptor, 0)
                self._begun.add(path)
                self._count(path, 0)
            try:
                _write_all(descriptor, data, at)
            except OSError:
                with suppress(OSError):
                    os.ftruncate(descriptor, at)
                    if goes_on:
                        _write_all(descriptor, _TAIL, at)
                    else:
                        path.unlink()
                raise
            self._count(path, at + len(data))
            return True

    def _count(self, path: Path, size: int) -> None:
        self._used_bytes += _on_disk(size) - _on_disk(self._sizes.get(path, 0))
        self._sizes[path] = size


@contextmanager
def _opened(path: Path) -> Iterator[int]:
    """Raises: OSError: the file cannot be opened, or is no regular file."""
    descriptor = os.open(path, _FLAGS, 0o640)
    try:
        if not stat.S_ISREG(os.fstat(descriptor).st_mode):
            raise OSError(errno.EINVAL, "is no plain file")
        yield descriptor
    finally:
        os.close(descriptor)


def _write_all(descriptor: int, data: bytes, at: int) -> None:
    written = os.pwrite(descriptor, data, at)
    if written < len(data):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


def _on_disk(size: int) -> int:
    return -(-size // _BLOCK_BYTES) * _BLOCK_BYTES


class TraceWriter(TraceQueue["TracedRequest"]):
    """Takes finished traced requests from any thread and writes them in their order."""

    def __init__(self, file: TraceFile) -> None:
        super().__init__("trace", _GATHER_S, MOST_WAITING, MOST_WAITING)
        self._file = file
        self._written = 0

    @property
    def file_name(self) -> str:
        return self._file.name

    @property
    def full(self) -> bool:
        """Whether writing has ended: the writer is stopped or the trace files are full."""
        return self._closed or self._file.full

    def stop(self, timeout_s: float = 1.0) -> None:
        super().stop(timeout_s)
        if self._written or self.dropped:
            log.info(
                "trace %s: %d requests written, %d dropped",
                self._file.path,
                self._written,
                self.dropped,
            )

    def put(self, request: TracedRequest) -> None:
        if not self._enqueue(request, len(request)):
            with self._news:
                self.dropped += 1

    def export(self, items: Sequence[TracedRequest]) -> bool:
        for request in items:
            sampler = request.sampler
            written = sampler is not None and self._file.write(sampler, request.written())
            self._written += written
            with self._news:
                self.dropped += not written
        return True
