"""The tracer: chooses the requests to trace, and has them written when they are over."""

from __future__ import annotations

import itertools
from typing import TYPE_CHECKING

from edge_server.inference.tracing.sampling import Sampling, TraceRule
from edge_server.inference.tracing.traced_request import TracedRequest

if TYPE_CHECKING:
    from edge_server.inference.tracing.sampling import Changes
    from edge_server.inference.tracing.trace_writer import TraceWriter
    from edge_server.inference.tracing.traced_request import ModelTrace


class Tracer:
    """Traces requests by its rules; every method may be called from any thread.

    Args:
        at_start: the rule of all models until it is changed.
        writer: None keeps and reports the rules, and traces nothing.

    Attributes:
        on: whether any request may be traced at this moment.
    """

    def __init__(
        self, at_start: TraceRule | None = None, writer: TraceWriter | None = None
    ) -> None:
        self._sampling = Sampling(at_start or TraceRule())
        self._writer = writer
        self._ids = itertools.count(1)
        self.on = writer is not None and self._sampling.any_on

    @property
    def file_name(self) -> str:
        """The trace file; empty where nothing is traced."""
        return "" if self._writer is None else self._writer.file_name

    def change(self, model_name: str, changes: Changes) -> None:
        """See `Sampling.change`."""
        self._sampling.change(model_name, changes)
        self.on = self._writer is not None and self._sampling.any_on

    def rule(self, model_name: str) -> TraceRule:
        """The rule for that model, with its remaining count; empty is that of all models."""
        return self._sampling.sampler(model_name).rule_now

    def sample(self, model_name: str, request_id: str) -> ModelTrace | None:
        """The trace of this request to that model; None where the request is not traced."""
        writer = self._writer
        if writer is None or writer.full:
            self.on = False
            return None
        sampler = self._sampling.sampler(model_name)
        if not sampler.take():
            return None
        return TracedRequest(sampler, self._ids, writer.put).trace(model_name, request_id)
