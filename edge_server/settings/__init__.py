"""The daemon's own configuration: what can be chosen, and reading it."""

from edge_server.settings.read import Settings, read_settings
from edge_server.settings.sections import (
    CameraSection,
    DeviceSection,
    LogSection,
    Metrics,
    Mqtt,
    Power,
    Python,
    RateLimitResourceSection,
    Repository,
    Serving,
    TraceSection,
)
from edge_server.settings.transport import Grpc, Restriction, Tls

__all__ = [
    "CameraSection",
    "DeviceSection",
    "Grpc",
    "LogSection",
    "Metrics",
    "Mqtt",
    "Power",
    "Python",
    "RateLimitResourceSection",
    "Repository",
    "Restriction",
    "Serving",
    "Settings",
    "Tls",
    "TraceSection",
    "read_settings",
]
