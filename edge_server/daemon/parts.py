"""Parts of the daemon, made as the settings have them; those of models are in `model_parts`."""

from __future__ import annotations

import os
from contextlib import suppress
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING

from edge_server.board.installation import missing
from edge_server.board.resources import nearest_directory
from edge_server.daemon.model_parts import store_directory
from edge_server.errors import SettingsError
from edge_server.lanes.departure import DepartureRule
from edge_server.pipeline.event_log import EventLog
from edge_server.pipeline.road_events import RoadEvents
from edge_server.pipeline.road_follower import LaneLocator, RoadFollower
from edge_server.process.disk import free_bytes, state_directory

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from edge_server.board.identity import Identity
    from edge_server.cameras.calibration import Calibration
    from edge_server.inference.otlp import SpanSender
    from edge_server.pipeline.recorder.recorder import Recorder
    from edge_server.pipeline.vehicle import VehicleInputs
    from edge_server.settings import Settings


def event_log(settings: Settings) -> EventLog:
    """Return the log of events.

    Raises:
        SettingsError, Unavailable: its file cannot be made.
    """
    file, kept = settings.events.file, settings.events.kept
    if file is not None:
        return EventLog(Path(file), kept=kept)
    # Daemons that a person starts may share the user's directory.
    of_systemd = "STATE_DIRECTORY" in os.environ
    return EventLog(state_directory() / "events.db" if of_systemd else None, kept=kept)


def check_recorder(settings: Settings) -> None:
    """Check the settings of the recorder.

    Raises:
        SettingsError: a library is missing, or a camera that it shall record.
    """
    section = settings.recorder
    unknown = [name for name in section.cameras if name not in settings.cameras]
    if unknown:
        raise SettingsError(f"recorder.cameras: there is no camera {unknown[0]!r}")
    try:
        import_module("edge_server.pipeline.recorder.recorder")
    except ModuleNotFoundError as error:
        raise SettingsError(f"recorder.mode: the library {missing(error)}") from error


def recorder_of(
    settings: Settings,
    identity: Identity,
    events: EventLog,
    calibration: Callable[[str], Calibration | None],
) -> Recorder | None:
    """Return the recorder; None where it is off.

    Raises:
        SettingsError, Unavailable: a library is missing, or the directory cannot be used.
    """
    section = settings.recorder
    if section.mode == "off":
        return None
    check_recorder(settings)
    from edge_server.pipeline.recorder.recorder import Recorder  # noqa: PLC0415 -- optional
    from edge_server.pipeline.recorder.recording_files import RecordingFiles  # noqa: PLC0415 -- likewise

    files = RecordingFiles(
        Path(section.directory) if section.directory else state_directory() / "recordings",
        identity.boot_id,
        most_bytes=section.max_bytes,
        reserve_bytes=settings.repository.disk_reserve_bytes,
    )
    return Recorder(section, files, identity, events, calibration)


def road_follower(
    settings: Settings, calibration: Calibration, vehicle: VehicleInputs, events: EventLog
) -> RoadFollower:
    """Return what follows the road through the frames of a camera with `calibration`."""
    half_width_m = settings.vehicle.width_m / 2
    departure = settings.lane_departure
    rule = None
    if departure.enabled:
        rule = DepartureRule(
            half_width_m, departure.time_to_line_s, slowest_mps=departure.min_speed_mps
        )
    locator = LaneLocator(calibration)
    return RoadFollower(locator, vehicle, RoadEvents(events, rule), half_width_m)


def directories_of(settings: Settings) -> list[Path]:
    """Return the directories that the daemon writes to."""
    found = [state_directory()]
    if settings.repository.mode == "poll":
        found.append(store_directory(settings.repository))
    if settings.recorder.mode != "off" and settings.recorder.directory:
        found.append(Path(settings.recorder.directory).absolute())
    if settings.trace.file:
        found.append(Path(settings.trace.file).absolute().parent)
    return found


def free_space(directories: Sequence[Path]) -> dict[str, int]:
    """Return the free space of each directory, or of where it would be made."""
    found = {}
    for directory in directories:
        with suppress(OSError):
            found[str(directory)] = free_bytes(nearest_directory(directory))
    return found


def span_sender(settings: Settings, identity: Identity) -> SpanSender | None:
    """Return the sender of spans to a collector; None where tracing is off.

    Raises:
        SettingsError: OpenTelemetry's SDK or its exporter is not installed.
    """
    tracing = settings.tracing
    if not tracing.enabled:
        return None
    try:
        from edge_server.inference import otlp  # noqa: PLC0415 - only where tracing is on
    except ModuleNotFoundError as error:
        raise SettingsError(
            "tracing.enabled: OpenTelemetry's exporter is not installed; install it (pip "
            "install 'edge-server[tracing]'), or set enabled = false"
        ) from error
    about = {
        "service.name": "edge-server",
        "service.version": identity.version,
        "service.instance.id": identity.device,
    }
    share = 1 / settings.trace.rate if tracing.sample is None else tracing.sample
    return otlp.SpanSender(tracing, share, about)
