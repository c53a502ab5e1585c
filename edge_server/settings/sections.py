"""The tables of the configuration file for models, cameras, the broker and the log."""

from __future__ import annotations

import re
import socket
from typing import Annotated, Literal

import msgspec

from edge_server.settings.python import Python
from edge_server.settings.section import Count, Port, Positive, Section, is_loopback
from edge_server.settings.serving import Metrics, Serving, TraceSection
from edge_server.settings.transport import Grpc, Tls

NAME = r"^[a-z0-9_-]{1,64}$"
Name = Annotated[str, msgspec.Meta(pattern=NAME)]


def _host_name() -> str:
    """Return the host's name as a topic may spell it."""
    return re.sub(r"[^a-z0-9_-]+", "-", socket.gethostname().lower())[:64] or "edge"


class DeviceSection(Section, frozen=True):
    """`[device]`: the name of this appliance; its id is part of every topic."""

    id: Name = msgspec.field(default_factory=_host_name)


class Repository(Section, frozen=True):
    """`[repository]`: where the models are, which are loaded, and how faults are handled.

    Attributes:
        mode: `none` loads all models at start and never again; `explicit` loads `load` at start
            and the rest on request; `poll` loads all, and follows every change.
        poll_s: seconds between two scans, in mode `poll`.
        settle_s: a model's files are complete once unchanged for so many seconds, in mode `poll`.
        store: directory of the model copies in mode `poll`, a separate one for each set of
            `paths`; empty is `store` in systemd's state directory, or in the user's. Other modes
            copy to `TMPDIR`.
        store_max_bytes: limit for all copies together, those of other `paths` included.
        memory_reserve_bytes: in mode `poll` no model is loaded that would leave less free memory.
        probation_requests: number of requests for which a replacing model is a canary, for at
            least `probation_s`; if it does worse, the daemon rolls back. 0 disables the canary.
        incompatible_member: for a model that a serving ensemble would no longer fit: `refuse`
            keeps both as they are, `take_down` makes the ensemble unavailable until its members
            fit again.
        signatures: whether models must be signed, in every mode: `require` refuses unsigned
            models, `warn` logs them.
        signature_keys: files of the public keys, of which one must fit.
        load: names to load at start in mode `explicit`; `*` alone is all.
        exit_on_error: a model that cannot be loaded at start ends the daemon.
        strict_readiness: the server is ready only while every model is.
        auto_complete: values missing in a config.pbtxt are derived from the model's files.
        default_max_batch_size: of a model that can batch and declares no limit.
        load_threads: number of models loaded at once.
    """

    paths: tuple[str, ...] = ("models",)
    mode: Literal["none", "explicit", "poll"] = "none"
    poll_s: Annotated[float, msgspec.Meta(gt=0, le=86400)] = 15.0
    settle_s: Annotated[float, msgspec.Meta(ge=0, le=3600)] = 2.0
    store: str = ""
    store_max_bytes: Positive = 8 << 30
    memory_reserve_bytes: Count = 256 << 20
    probation_requests: Count = 200
    probation_s: Annotated[float, msgspec.Meta(ge=0, le=86400)] = 30.0
    incompatible_member: Literal["refuse", "take_down"] = "refuse"
    signatures: Literal["off", "warn", "require"] = "off"
    signature_keys: tuple[str, ...] = ()
    load: tuple[str, ...] = ()
    exit_on_error: bool = True
    strict_readiness: bool = True
    auto_complete: bool = True
    default_max_batch_size: Positive = 4
    load_threads: Positive = 4

    def __post_init__(self) -> None:
        if "*" in self.load and len(self.load) > 1:
            raise ValueError(
                "Wildcard model name '*' must be the ONLY startup model if specified at all."
            )


class Mqtt(Section, frozen=True):
    """`[mqtt]`: the broker; without this table nothing is published.

    Attributes:
        insecure: allows a password to cross a network in plain text.
        ca_file: PEM; the authority that must have signed the broker's certificate; enables TLS.
        cert_file: PEM; this device's own certificate, with its private key in `key_file`.
    """

    host: str
    port: Port = 1883
    username: str | None = None
    password_file: str | None = None
    ca_file: str | None = None
    cert_file: str | None = None
    key_file: str | None = None
    insecure: bool = False

    def __post_init__(self) -> None:
        if bool(self.cert_file) != bool(self.key_file):
            raise ValueError("cert_file and key_file belong together: give both, or neither")
        if self.cert_file and not self.ca_file:
            raise ValueError("cert_file needs ca_file: without it there is no TLS")
        if self.password_file and not (self.ca_file or self.insecure or is_loopback(self.host)):
            raise ValueError(
                f"{self.host} is beyond the loopback, and the password would cross the network in "
                "plain text; encrypt it with ca_file, or say insecure = true if that is meant"
            )


class CameraSection(Section, frozen=True):
    """`[cameras.NAME]`: where frames come from and which model detects lanes in them."""

    uri: str
    model: str = "lane_detection"


class LogSection(Section, frozen=True):
    """`[log]`: which lines are logged and where; `verbose` 1 and more adds debug lines.

    Attributes:
        info: logs normal operation; likewise `warning` and `error`.
        format: `default` is short times for a terminal and priorities for the journal; `json` an
            object for each line, with time, level, logger, thread and text.
        file: lines are appended to this file instead of stderr.
    """

    verbose: Count = 0
    info: bool = True
    warning: bool = True
    error: bool = True
    format: Literal["default", "ISO8601", "json"] = "default"
    file: str | None = None


class Settings(Section, frozen=True):
    """All settings of the daemon."""

    device: DeviceSection = DeviceSection()
    repository: Repository = Repository()
    serving: Serving = Serving()
    python: Python = Python()
    grpc: Grpc = Grpc()
    metrics: Metrics = Metrics()
    trace: TraceSection = TraceSection()
    mqtt: Mqtt | None = None
    cameras: dict[Name, CameraSection] = msgspec.field(default_factory=dict)
    log: LogSection = LogSection()

    def __post_init__(self) -> None:
        port = self.grpc.port
        if self.grpc.enabled and self.metrics.enabled and port and port == self.metrics.port:
            raise ValueError(
                f"grpc.port and metrics.port are both {port}; choose another for one of them "
                "(--grpc-port, --metrics-port)"
            )

    def without_effect(self) -> list[str]:
        """Return a line for each setting that has no effect beside the others."""
        lines = []
        if self.repository.load and self.repository.mode != "explicit":
            lines.append("repository.load: no effect: every model is loaded in mode 'none'")
        if self.serving.rate_limit_resources and self.serving.rate_limit == "off":
            lines.append(
                "serving.rate_limit_resources: no effect: rate_limit is off "
                "(--rate-limit=execution_count)"
            )
        if self.grpc.tls != Tls() and not self.grpc.tls.on:
            lines.append("grpc.tls: no effect: neither enabled nor mutual (--grpc-use-ssl=true)")
        elif self.grpc.tls.client_ca and not self.grpc.tls.mutual:
            lines.append("grpc.tls.client_ca: no effect: mutual is false, no client is asked")
        if self.trace.level != ("OFF",) and not self.trace.file:
            lines.append("trace.level: no effect: no trace.file (--trace-config triton,file=FILE)")
        return lines
