"""The tables of the configuration file for serving, traces and metrics."""

from __future__ import annotations

from typing import Annotated, Literal

import msgspec

from edge_server.settings.section import Count, Port, Positive, Section, is_loopback


class RateLimitResourceSection(Section, frozen=True):
    """The amount of one resource; with `device` -1 the amount on each device."""

    name: str
    count: Positive
    device: int = -1


class Serving(Section, frozen=True):
    """`[serving]`: how requests are served.

    Attributes:
        name: the server's name for clients.
        exit_timeout_s: seconds that in-flight requests get when the daemon stops.
        client_shared_memory: clients on this machine may register shared memory.
        rate_limit: whether `rate_limiter` of instance groups is applied.
        rate_limit_resources: the amounts; the default is the most that any model asks for.
        cache_bytes: for responses of models with `response_cache`; 0 disables the cache.
    """

    name: str = "triton"
    exit_timeout_s: Annotated[float, msgspec.Meta(ge=0, le=3600)] = 3.0
    client_shared_memory: bool = False
    rate_limit: Literal["off", "execution_count"] = "off"
    rate_limit_resources: tuple[RateLimitResourceSection, ...] = ()
    cache_bytes: Count = 0


class TraceSection(Section, frozen=True):
    """`[trace]`: Triton's trace settings at the start; clients may change all but the file.

    Attributes:
        level: TIMESTAMPS records when each request was received, queued, computed and answered.
        rate: one of so many requests is traced.
        count: maximum number of traces; -1 is unlimited.
        log_frequency: traces per file before the next file begins, `file.0`, `file.1`, …; 0 is one
            file.
        file: path of the traces, 64 MiB in all; empty disables traces.
    """

    level: tuple[Literal["OFF", "TIMESTAMPS", "TENSORS"], ...] = ("OFF",)
    rate: Positive = 1000
    count: Annotated[int, msgspec.Meta(ge=-1)] = -1
    log_frequency: Count = 0
    file: str = ""

    def __post_init__(self) -> None:
        if "OFF" in self.level and len(self.level) > 1:
            raise ValueError("Expect only one trace level 'OFF' is specified")
        if "TENSORS" in self.level:
            raise ValueError(
                "level TENSORS is not supported: no tensors are written to traces; give "
                "TIMESTAMPS alone"
            )


class Metrics(Section, frozen=True):
    """`[metrics]`: the address that Prometheus scrapes; port 0 takes a free one.

    `insecure` allows another address than the loopback; metrics have no encryption.
    """

    enabled: bool = True
    host: str = "127.0.0.1"
    port: Port = 8002
    insecure: bool = False
    cpu: bool = True

    def __post_init__(self) -> None:
        if self.enabled and not self.insecure and not is_loopback(self.host):
            raise ValueError(
                f"{self.host} is beyond the loopback, where anybody could read in plain text what "
                "this appliance does; say insecure = true (--metrics-insecure) if that is meant"
            )
