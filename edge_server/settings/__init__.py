"""The daemon's own configuration: what can be chosen, and reading it."""

from edge_server.settings.read import Settings, read_settings
from edge_server.settings.sections import (
    CameraSection,
    DeviceSection,
    EventsSection,
    LaneDeparture,
    LogSection,
    Metrics,
    Mqtt,
    Power,
    Python,
    RateLimitResourceSection,
    RecorderSection,
    Repository,
    Serving,
    TraceSection,
    TracingSection,
    Vehicle,
)
from edge_server.settings.transport import Access, Grpc, Http, Restriction, Tls

__all__ = [
    "Access",
    "CameraSection",
    "DeviceSection",
    "EventsSection",
    "Grpc",
    "Http",
    "LaneDeparture",
    "LogSection",
    "Metrics",
    "Mqtt",
    "Power",
    "Python",
    "RateLimitResourceSection",
    "RecorderSection",
    "Repository",
    "Restriction",
    "Serving",
    "Settings",
    "Tls",
    "TraceSection",
    "TracingSection",
    "Vehicle",
    "read_settings",
]
