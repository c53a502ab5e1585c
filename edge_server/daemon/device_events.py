"""DeviceEvents: changes of cameras, models and the device become events, once each."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

from edge_server.cameras.status import CameraState
from edge_server.inference.registry import ModelState
from edge_server.pipeline.events import Event

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

    from edge_server.cameras.status import CameraStatus
    from edge_server.inference.registry import LoadedModel, ModelEntry
    from edge_server.pipeline.event_log import EventLog, Ticket
    from edge_server.pipeline.events import EventPhase
    from edge_server.settings.sections import EventKind

# As `Lifecycle.roll_back` reports it of the version that serves again.
_ROLLED_BACK = "rolled back: "


class DeviceEvents:
    """Compares what cameras, models and the device are with what they were; for one thread.

    The first look at a camera that never had a fault, or at a model that serves, is no event.

    Args:
        log: gives the events their ids.
    """

    def __init__(self, log: EventLog) -> None:
        self._log = log
        self._cameras: dict[str, tuple[str, Ticket]] = {}  # with a fault, by name
        self._models: dict[str, LoadedModel] = {}  # the newest version that serves
        self._reasons: dict[str, str] = {}
        self._unavailable: dict[str, Ticket] = {}
        self._degraded: dict[str, Ticket] = {}

    def see_cameras(self, statuses: Mapping[str, CameraStatus]) -> None:
        """Put what has changed of the present cameras; of those that are gone, their faults end."""
        for name in self._cameras.keys() - statuses.keys():
            self._end_camera(name, "removed", "the camera was removed from the settings")
        for name, status in statuses.items():
            if status.state is CameraState.STOPPED:  # by a reload, which goes on at once
                continue
            fault = ""
            if not (status.state is CameraState.LIVE or status.state is CameraState.STARTING):
                fault = status.reason or status.state.value
            before = self._cameras.get(name)
            if fault == ("" if before is None else before[0]):
                continue
            if before is not None:
                self._end_camera(name, before[0], "the camera has this fault no more")
            if fault:
                event = self._event("begin", fault, status.text, camera=name)
                self._cameras[name] = fault, self._log.put(event)

    def see_device(self, reasons: Iterable[str]) -> None:
        """Put what degrades all lanes: the reasons that begin and end, each as `word: text`."""
        present = {word: text for word, _, text in (each.partition(": ") for each in reasons)}
        for word in self._degraded.keys() - present.keys():
            event = self._event("end", word, "the device is as it should be")
            self._log.put(event, self._degraded.pop(word))
        for word in present.keys() - self._degraded.keys():
            self._degraded[word] = self._log.put(self._event("begin", word, present[word]))

    def see_models(self, entries: Iterable[ModelEntry]) -> None:
        """Put which versions serve now, were rolled back, or cannot serve."""
        by_name: dict[str, list[ModelEntry]] = {}
        for entry in entries:
            by_name.setdefault(entry.name, []).append(entry)
        for name in self._models.keys() - by_name.keys():
            self._lose(name, "removed", "the model was removed from the repository")
        for name, versions in by_name.items():
            ready = [each for each in versions if each.state is ModelState.READY]
            if ready:
                self._serve(max(ready, key=lambda each: each.version))
            elif name in self._models and not any(
                each.state is ModelState.LOADING for each in versions
            ):
                newest = max(versions, key=lambda each: each.version)
                self._lose(name, "unavailable", newest.reason)

    def _serve(self, entry: ModelEntry) -> None:
        name, loaded = entry.name, entry.loaded
        before = self._models.get(name)
        reason_before = self._reasons.get(name, "")
        self._reasons[name] = entry.reason
        if loaded is None:
            return
        self._models[name] = loaded
        if (ticket := self._unavailable.pop(name, None)) is not None:
            self._put_model("end", "unavailable", f"version {entry.version} serves", entry, ticket)
        elif entry.reason.startswith(_ROLLED_BACK) and entry.reason != reason_before:
            why = entry.reason.removeprefix(_ROLLED_BACK)
            text = f"version {entry.version} serves again: {why}"
            self._put_model("instant", "rolled_back", text, entry)
        elif before is not None and before is not loaded:
            self._put_model("instant", "swapped", f"version {entry.version} serves", entry)

    def _lose(self, name: str, cause: str, text: str) -> None:
        del self._models[name]
        self._reasons.pop(name, None)
        event = self._event("begin", cause, text, model=name)
        self._unavailable[name] = self._log.put(event)

    def _put_model(
        self,
        phase: EventPhase,
        cause: str,
        text: str,
        entry: ModelEntry,
        ends: Ticket | None = None,
    ) -> None:
        event = self._event(phase, cause, text, model=entry.name, version=str(entry.version))
        self._log.put(event, ends)

    def _end_camera(self, name: str, cause: str, text: str) -> None:
        _, ticket = self._cameras.pop(name)
        self._log.put(self._event("end", cause, text, camera=name), ticket)

    @staticmethod
    def _event(
        phase: EventPhase,
        cause: str,
        text: str,
        *,
        camera: str = "",
        model: str = "",
        version: str = "",
    ) -> Event:
        kind: EventKind = "degraded"
        if camera or model:
            kind = "camera" if camera else "model"
        return Event(
            kind,
            phase,
            cause,
            text,
            time.monotonic_ns(),
            time.time_ns(),
            camera=camera,
            model=model,
            model_version=version,
        )
