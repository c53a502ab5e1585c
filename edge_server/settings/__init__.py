"""The daemon's own configuration: what can be chosen, and reading it."""

from edge_server.settings.python import Python
from edge_server.settings.read import read_settings
from edge_server.settings.sections import (
    CameraSection,
    DeviceSection,
    LogSection,
    Mqtt,
    Repository,
    Settings,
)
from edge_server.settings.serving import Metrics, RateLimitResourceSection, Serving, TraceSection
from edge_server.settings.transport import Grpc, Restriction, Tls

__all__ = [
    "CameraSection",
    "DeviceSection",
    "Grpc",
    "LogSection",
    "Metrics",
    "Mqtt",
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
