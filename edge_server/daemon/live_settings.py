"""What becomes of each setting that differs at a reload: a part applies it, or it needs a restart.

`TABLE` is the one place that says so; every setting is in it.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, Final

import msgspec

from edge_server.settings.mistakes import without_logins

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from edge_server.settings import Settings

RESTART: Final = "restart"
# Settings of a unit of its own, which reads the file when it starts.
POWER: Final = "edge-server-power.service"
# The certificates of a listener can be changed while it stays as it is in the other respects.
_CERTIFICATES = ("grpc.tls.enabled", "grpc.tls.mutual")

# Section → setting → the part that applies it, RESTART or POWER. `*` is the whole section: its part
# takes it as one value.
_SECTIONS: Mapping[str, Mapping[str, str]] = {
    "device": {"id": RESTART, "clock": RESTART},  # topics and client id are made of the id
    "repository": dict.fromkeys(
        (
            *("paths", "mode", "poll_s", "settle_s", "store", "store_max_bytes"),
            *("disk_reserve_bytes", "memory_reserve_bytes", "probation_requests", "probation_s"),
            "incompatible_member",
            *("signatures", "signature_keys", "load", "exit_on_error", "strict_readiness"),
            *("auto_complete", "default_max_batch_size", "load_threads", "load_retries"),
            "config_name",
        ),
        RESTART,
    ),
    "serving": {
        "name": RESTART,
        "exit_timeout_s": "stop",
        "client_shared_memory": RESTART,
        "rate_limit": RESTART,
        "rate_limit_resources": RESTART,
        "cache_bytes": RESTART,
    },
    # A process of a model that runs has been closed off already.
    "python": dict.fromkeys(
        ("sandbox", "readable", "writable", "private", "unix_sockets", "interpreters"), RESTART
    ),
    "grpc": {
        "max_pending_bytes": "grpc",
        "message_timeout_ms": "grpc",
        # gRPC takes these when a server is made, and a new server would end every connection.
        **dict.fromkeys(
            (
                *("enabled", "host", "port", "insecure", "socket", "control", "restricted"),
                *("max_message_bytes", "max_connections", "max_streams", "max_infer_streams"),
                "max_decompressed_bytes",
                "max_metadata_bytes",
                *("handshake_timeout_ms", "idle_timeout_ms", "max_connection_age_ms"),
                *("max_connection_age_grace_ms", "keepalive_time_ms", "keepalive_timeout_ms"),
                *("keepalive_without_calls", "max_pings_without_data"),
                *("min_ping_interval_without_data_ms", "max_ping_strikes"),
                *("max_lane_streams", "reflection", "forward_headers"),
            ),
            RESTART,
        ),
    },
    "grpc.tls": {
        "enabled": RESTART,
        "mutual": RESTART,
        "certificate": "grpc",
        "key": "grpc",
        "client_ca": "grpc",
    },
    "http": dict.fromkeys(
        (
            *("enabled", "host", "port", "insecure", "max_body_bytes", "max_pending_bytes"),
            *("restricted", "forward_headers", "host_names"),
            *("message_timeout_ms", "idle_timeout_ms", "max_connections", "max_header_bytes"),
        ),
        RESTART,
    ),
    # What is in the file applies at once.
    "access": {"tokens_file": RESTART},
    "http.tls": dict.fromkeys(("enabled", "mutual", "certificate", "key", "client_ca"), RESTART),
    "metrics": dict.fromkeys(
        (
            *("enabled", "host", "port", "insecure", "cpu", "gpu", "counter_latencies"),
            *("summary_latencies", "summary_quantiles", "histogram_latencies"),
        ),
        RESTART,
    ),
    "trace": {
        **dict.fromkeys(("level", "rate", "count", "log_frequency"), "trace"),
        "file": RESTART,
    },
    "tracing": dict.fromkeys(("enabled", "endpoint", "sample", "resource", "ca_file"), RESTART),
    "mqtt": {"*": "broker"},
    "cameras": {"*": "cameras"},
    "power": {"mode": POWER, "clocks": POWER},
    # A camera's follower of the road is made with them.
    "vehicle": {"width_m": RESTART},
    "lane_departure": dict.fromkeys(("enabled", "time_to_line_s", "min_speed_mps"), RESTART),
    "events": {"file": RESTART, "kept": RESTART},
    "recorder": dict.fromkeys(
        (
            *("mode", "directory", "cameras", "events", "before_s", "after_s", "file_s"),
            *("max_bytes", "memory_bytes", "jpeg_quality", "width"),
        ),
        RESTART,
    ),
    "log": {
        **dict.fromkeys(("verbose", "info", "warning", "error", "format"), "log"),
        "file": RESTART,
    },
}

TABLE: Mapping[str, str] = MappingProxyType(
    {
        (section if key == "*" else f"{section}.{key}"): part
        for section, keys in _SECTIONS.items()
        for key, part in keys.items()
    }
)


@dataclass(frozen=True)
class Difference:
    """A setting that differs.

    Attributes:
        name: `grpc.port`; of a section that one part takes as a whole, the section.
        part: the part that applies it; RESTART or POWER if none does.
        old, new: for people, without secrets.
    """

    name: str
    part: str
    old: str
    new: str

    def __str__(self) -> str:
        return f"{self.name}: {self.old} -> {self.new}"


def differences(running: Settings, wanted: Settings) -> list[Difference]:
    """Return the settings of `wanted` that differ from `running`, in the order of the sections."""
    found = {name: (old, new) for name, old, new in _pairs(running, wanted, "") if old != new}
    stays = not any(name in found for name in _CERTIFICATES)
    return [
        Difference(
            name,
            TABLE[name] if stays or not name.startswith("grpc.tls.") else RESTART,
            shown(name, old),
            shown(name, new),
        )
        for name, (old, new) in found.items()
    ]


def _pairs(one: Any, other: Any, name: str) -> Iterator[tuple[str, Any, Any]]:
    """Yield name, old and new value of every entry of `TABLE`; of others, those that no entry of
    the table is part of."""
    if name in TABLE or not isinstance(one, msgspec.Struct):
        yield name, one, other
        return
    for field in one.__struct_fields__:
        below = f"{name}.{field}".lstrip(".")
        yield from _pairs(getattr(one, field), getattr(other, field), below)


def shown(name: str, value: Any) -> str:
    """Return the value of a setting for people, without secrets."""
    return without_logins(json.dumps(_without_secrets(name, msgspec.to_builtins(value))))


def _without_secrets(name: str, value: Any) -> Any:
    """The values of restricted headers are passwords; every other secret is in a file."""
    if name in ("grpc.restricted", "http.restricted"):
        return [{**each, "value": "…"} for each in value]
    return value
