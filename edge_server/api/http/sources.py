"""Sources: the parts of the daemon that supply the metrics' numbers."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from edge_server.api.http.lane_latency import LaneLatency
    from edge_server.api.http.processor_use import ProcessorUse
    from edge_server.inference.snapshot import ModelEntry
    from edge_server.pipeline.lane_pipeline import LanePipeline


class Broker(Protocol):
    """The state of the connection to the broker."""

    @property
    def connected(self) -> bool: ...

    @property
    def dropped(self) -> int: ...

    @property
    def waiting(self) -> int: ...


class FollowedRepository(Protocol):
    """The state of the repository poll."""

    def poll_age_s(self, now: float) -> float: ...

    def outcomes(self) -> Mapping[str, int]: ...


@dataclass(frozen=True)
class Sources:
    """The parts of the daemon that the metrics read at each scrape.

    Attributes:
        models: every known model version at this moment.
        broker: None if nothing is published.
        processors: None if their metrics are off.
        repository: None if no repository is polled.
    """

    version: str
    models: Callable[[], Sequence[ModelEntry]]
    pipelines: Sequence[LanePipeline]
    latency: LaneLatency
    broker: Broker | None = None
    processors: ProcessorUse | None = None
    repository: FollowedRepository | None = None
