"""Sources: the parts of the daemon that supply the metrics' numbers. Imports no prometheus_client,
which loads at the first scrape."""

from __future__ import annotations

import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

from edge_server.board.resources import BoardMemory, read_memory

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from edge_server.api.calls import RequestMetrics
    from edge_server.board.watch import BoardWatch
    from edge_server.inference.otlp import SpanSender
    from edge_server.inference.registry import ModelEntry
    from edge_server.lifecycle.poll import PollControl
    from edge_server.pipeline.lane_feed import LaneLatency
    from edge_server.pipeline.lane_pipeline import LanePipeline
    from edge_server.pipeline.recorder.recorder import Recorder
    from edge_server.process.histogram import Distribution
    from edge_server.repository.channel import ChannelFollower


class Broker(Protocol):
    """The state of the connection to the broker; it is not `on` where nothing is published."""

    @property
    def on(self) -> bool: ...

    @property
    def connected(self) -> bool: ...

    @property
    def state(self) -> str: ...

    @property
    def dropped(self) -> int: ...

    @property
    def waiting(self) -> int: ...

    @property
    def published(self) -> int: ...

    @property
    def losses(self) -> int: ...

    @property
    def taken_over(self) -> int: ...

    @property
    def contested(self) -> bool: ...

    @property
    def latency(self) -> Mapping[tuple[str, ...], Distribution]: ...


class SettingsState(Protocol):
    """What became of the last reload of the settings."""

    @property
    def fault(self) -> str: ...

    @property
    def restart_needed(self) -> Sequence[str]: ...


@dataclass(frozen=True)
class Sources:
    """The parts of the daemon that the metrics read at each scrape; None is off, without metrics.

    Attributes:
        models: every known model version at this moment.
        pipelines: of the present cameras; elements come and go.
        free_bytes: returns directory → free space of those that the daemon writes to.
        gpu: Triton's metrics of the GPU are on.
        events: returns (kind, cause) → number of events.
        started_s: when the daemon was constructed; `time.monotonic`.
    """

    version: str
    models: Callable[[], Sequence[ModelEntry]]
    pipelines: Sequence[LanePipeline]
    latency: LaneLatency
    broker: Broker | None = None
    processors: ProcessorUse | None = None
    repository: PollControl | None = None
    board: BoardWatch | None = None
    free_bytes: Callable[[], Mapping[str, int]] = dict
    gpu: bool = True
    settings: SettingsState | None = None
    recorder: Recorder | None = None
    requests: RequestMetrics | None = None
    events: Callable[[], Mapping[tuple[str, str], int]] = dict
    ready: Callable[[], bool] | None = None
    spans: SpanSender | None = None
    channels: Sequence[ChannelFollower] = ()
    started_s: float = field(default_factory=time.monotonic)


class ProcessorUse:
    """The kernel's counters of processors and memory.

    Args:
        root: the directory above the kernel's `proc`.
    """

    def __init__(self, root: Path = Path("/")) -> None:
        self._root = root
        self._before = self._ticks()

    def utilization(self) -> float | None:
        """Return the share of busy time since the last call, 0..1; None if unknown."""
        before, self._before = self._before, self._ticks()
        if before is None or self._before is None:
            return None
        total = self._before[0] - before[0]
        return min(1.0, max(0.0, (self._before[1] - before[1]) / total)) if total > 0 else 0.0

    def memory(self) -> BoardMemory:
        return read_memory(self._root)

    def _ticks(self) -> tuple[int, int] | None:
        """Return total and busy ticks since boot; proc(5): idle and iowait are fields 4 and 5."""
        try:
            first = (self._root / "proc/stat").read_text(encoding="ascii").splitlines()[0]
            ticks = [int(text) for text in first.removeprefix("cpu").split()[:8]]
            return sum(ticks), sum(ticks) - ticks[3] - ticks[4]
        except (OSError, ValueError, LookupError):
            return None
