"""The daemon's own configuration: what can be chosen, and reading it."""

from edge_server.settings.python import Python
from edge_server.settings.read import read_settings
from edge_server.settings.sections import Camera, Device, Log, Mqtt, Repository, Settings
from edge_server.settings.serving import Metrics, RateLimitResource, Serving, Trace
from edge_server.settings.transport import Grpc, Restriction, Tls

__all__ = [
    "Camera",
    "Device",
    "Grpc",
    "Log",
    "Metrics",
    "Mqtt",
    "Python",
    "RateLimitResource",
    "Repository",
    "Restriction",
    "Serving",
    "Settings",
    "Tls",
    "Trace",
    "read_settings",
]
