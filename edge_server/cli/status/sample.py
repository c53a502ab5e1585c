"""What the daemon reports at one moment: over gRPC, and by its metrics."""

from __future__ import annotations

import time
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from edge_server.api.grpc.client import DaemonClient
from edge_server.api.http.scrape import scrape
from edge_server.cli.running_daemon import REMEDY
from edge_server.errors import EdgeServerError, SettingsError, Unavailable

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from types import TracebackType

    from edge_server.api.http.scrape import Scrape
    from edge_server.settings import Settings


@dataclass(frozen=True)
class DaemonSample:
    """What the daemon reported; what it did not report is empty, and `faults` says why.

    Attributes:
        at_s: `time.monotonic`.
        metrics: None where they cannot be read.
        index: `ModelIndex` messages.
        statistics: `ModelStatistics` messages.
        backends: model → its backend, of those that are loaded.
        cameras: `Camera` messages of LaneService.
        lanes: camera → its newest `LaneFrame` message; None before the first frame.
        faults: a text for each thing that could not be read.
    """

    at_s: float
    ready: bool | None = None
    metrics: Scrape | None = None
    index: Sequence[Any] | None = None
    statistics: Sequence[Any] = ()
    backends: Mapping[str, str] = field(default_factory=dict)
    cameras: Sequence[Any] | None = None
    lanes: Mapping[str, Any | None] = field(default_factory=dict)
    faults: tuple[str, ...] = ()


class DaemonSampler:
    """Reads samples over one connection, which is made again after a restart of the daemon."""

    def __init__(self, settings: Settings) -> None:
        self._settings = settings
        self._client: DaemonClient | None = None
        self._no_client = ""
        try:
            self._client = DaemonClient(settings.grpc)
        except SettingsError as error:
            # The metrics say much without it.
            self._no_client = str(error)
        self._backends: dict[tuple[str, str], str] = {}

    def __enter__(self) -> DaemonSampler:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if self._client is not None:
            self._client.__exit__(kind, error, trace)

    def sample(self) -> DaemonSample:
        """Return what the daemon reports now.

        Raises:
            Unavailable: it responds neither over gRPC nor with metrics; the text has the remedy.
        """
        faults = []
        metrics = None
        found: dict[str, Any] = {}
        client = self._client
        section = self._settings.metrics
        if section.enabled and section.port:
            try:
                metrics = scrape(section.host, section.port)
            except Unavailable as error:
                faults.append(str(error))
        else:
            faults.append("metrics are off: set enabled = true and a port in [metrics]")
        if client is None:
            faults.append(self._no_client)
        else:
            try:
                found["ready"] = client.is_ready()  # needs no token
                found |= self._over_grpc(client)
            except EdgeServerError as error:
                faults.append(f"gRPC at {client.target}: {error}")
        if metrics is None and not found:
            raise Unavailable("\n".join([*faults, REMEDY]))
        return DaemonSample(time.monotonic(), metrics=metrics, faults=tuple(faults), **found)

    def _over_grpc(self, client: DaemonClient) -> dict[str, Any]:
        index = client.index()
        loaded = [(each.name, each.version) for each in index if each.state == "READY"]
        self._backends = {
            key: self._backends.get(key) or _backend(client.config(key[0])) for key in loaded
        }
        cameras = client.cameras()
        return {
            "index": index,
            "statistics": client.statistics(),
            "backends": {name: backend for (name, _), backend in self._backends.items()},
            "cameras": cameras,
            "lanes": {each.name: client.latest_lanes(each.name) for each in cameras},
        }


def _backend(config: Any) -> str:
    return str(config.backend or config.platform)
