"""`edge-server check`: everything that `run` would trip over, found without starting anything."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from edge_server.cameras.camera import Camera
from edge_server.errors import EdgeServerError, ModelConfigError, SettingsError
from edge_server.pipeline import LanePipeline
from edge_server.repository.loader import RepositoryLoader
from edge_server.serving.data_plane import DataPlane
from edge_server.serving.registry import ModelRegistry

if TYPE_CHECKING:
    from edge_server.settings import Settings


def check(settings: Settings) -> list[str]:
    """Load every model, prove every camera's model, open every recording; what was found well.

    Raises:
        ModelConfigError: a repository or a model is faulty; one line per fault.
        SettingsError: a camera is; one line per fault.
    """
    registry = ModelRegistry()
    try:
        failed = RepositoryLoader(registry, [Path(p) for p in settings.repository.paths]).load_all()
        if failed:
            raise ModelConfigError("\n".join(entry.reason for entry in failed))
        data_plane = DataPlane(registry)
        lines = [
            f"model {entry.name} version {entry.version}: {entry.state.value}"
            for entry in data_plane.index(only_ready=True)
        ]
        faults: list[str] = []
        for name, chosen in settings.cameras.items():
            camera = Camera(name, chosen.uri)
            try:
                LanePipeline(camera, data_plane, chosen.model, ()).prove()
                camera.open()
                lines.append(f"camera {name}: {chosen.uri}: gives frames to {chosen.model}")
            except EdgeServerError as error:
                faults.append(f"cameras.{name}: {error}")
            finally:
                camera.stop()
        if faults:
            raise SettingsError("\n".join(faults))
        return lines
    finally:
        registry.clear()
