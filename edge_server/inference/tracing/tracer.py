"""The tracer: chooses the requests to trace, and has them written when they are over."""

from __future__ import annotations

import itertools
import threading
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, Any

from edge_server.errors import InvalidRequest
from edge_server.inference.tracing.spans import FrameTrace, RequestSpans
from edge_server.inference.tracing.traced_request import Sampler, TracedRequest, TraceRule

if TYPE_CHECKING:
    from collections.abc import Mapping

    from edge_server.inference.tracing.otlp import SpanSender
    from edge_server.inference.tracing.spans import Headers, SpanContext
    from edge_server.inference.tracing.trace_file import TraceWriter
    from edge_server.inference.tracing.traced_request import ModelTrace


@dataclass(frozen=True)
class _Group:
    """The settings given for all models, or for one, and the resulting sampler."""

    given: Mapping[str, Any]
    sampler: Sampler


class Tracer:
    """Traces one of every `rate` requests, by the rule of all models and those of single models.

    As in Triton: a setting not given for a model is that of all models, but the model has its own
    count; a setting not given for all models keeps its value from the start. A rule that changes
    counts its requests anew. Every method may be called from any thread.

    Args:
        at_start: the rule of all models until it is changed.
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

    def _report(self, parent: SpanContext | None, request: TracedRequest) -> None:
        if request.sampler is not None and self._writer is not None:
            self._writer.put(request)
        if self._sender is not None:
            self._sender.put(RequestSpans(request, parent))

    def frame(self, camera: str, frame_id: int, capture_ns: int) -> FrameTrace | None:
        """The trace of this frame; None where it is not traced."""
        if self._sender is None or not self._sender.choose(None)[0]:
            return None
        about: dict[str, str | int] = {"edge.camera": camera, "edge.frame_id": frame_id}
        return FrameTrace(self._sender, capture_ns, about)

    def of_frame(self, model_name: str, parent: SpanContext) -> ModelTrace | None:
        """The trace of a traced frame's request; `parent` is the stage that it belongs to."""
        sender = self._sender
        if sender is None:
            return None

        def report(request: TracedRequest) -> None:
            sender.put(RequestSpans(request, parent, is_server=False))

        return TracedRequest(None, self._ids, report).trace(model_name, "")

    def begin_anew(self, rule: TraceRule) -> None:
        """Apply `rule` as if it were that of the start: clients' settings are gone.

        Args:
            rule: one that requests can be traced with.
        """
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

        Raises:
            InvalidRequest: no request can be traced with these settings (Triton's text).
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
    """`group` after `changes`, with the settings of `below` where `group` has none.

    Raises:
        InvalidRequest: see `Tracer.change`.
    """
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
