"""DeviceEvents: what cameras and models become is one event each, and no event without a change."""

from __future__ import annotations

from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, cast

from edge_server.cameras.status import CameraState, CameraStatus
from edge_server.daemon.status import DeviceEvents
from edge_server.errors import Reason
from edge_server.inference.registry import IDLE, ModelEntry, ModelState
from edge_server.pipeline.event_log import Event, EventLog

if TYPE_CHECKING:
    from edge_server.inference.registry import LoadedModel

LIVE = CameraStatus(CameraState.LIVE)
LOST = CameraStatus(CameraState.LOST, "refused", "nobody listens")
END = Event("degraded", "instant", "end of a look", "", 0, 0)
DARK = CameraStatus(CameraState.DEGRADED, "dark", "mean brightness 12")


class Seen:
    """A DeviceEvents, and what it put."""

    def __init__(self) -> None:
        self.log = EventLog()
        self.events = DeviceEvents(self.log)

    def cameras(self, **statuses: CameraStatus) -> list[tuple[str, ...]]:
        self.events.see_cameras(statuses)
        return self._new()

    def models(self, *entries: ModelEntry) -> list[tuple[str, ...]]:
        self.events.see_models(entries)
        return self._new()

    def device(self, **reasons: str) -> list[tuple[str, ...]]:
        self.events.see_device(Reason(*each) for each in reasons.items())
        return [(phase, cause) for _, phase, cause in self._new()]

    def _new(self) -> list[tuple[str, ...]]:
        before = self.log.newest
        # With something to write a tick does not wait.
        self.log.put(END)
        self.log._tick(0.0)
        new = self.log.after(before)[:-1]
        return [(each.camera or each.model, each.phase, each.cause) for each in new]


def ready(name: str, version: int, loaded: LoadedModel, reason: str = "") -> ModelEntry:
    return ModelEntry(name, version, ModelState.READY, reason, loaded)


def model() -> LoadedModel:
    return cast("Any", SimpleNamespace())


def test_a_camera_s_fault_begins_and_ends() -> None:
    seen = Seen()
    assert seen.cameras(front=LIVE) == []
    assert seen.cameras(front=LOST) == [("front", "begin", "refused")]
    assert seen.cameras(front=LOST) == []
    assert seen.cameras(front=LIVE) == [("front", "end", "refused")]
    begin, end = (each for each in seen.log.after(0) if each.camera)
    assert end.begin_id == begin.id
    assert begin.text == "nobody listens"


def test_one_fault_that_follows_another_ends_it() -> None:
    seen = Seen()
    seen.cameras(front=LOST)
    assert seen.cameras(front=DARK) == [("front", "end", "refused"), ("front", "begin", "dark")]


def test_the_faults_of_a_camera_end_with_it() -> None:
    seen = Seen()
    seen.cameras(front=LOST, rear=LIVE)
    assert seen.cameras(rear=LIVE) == [("front", "end", "removed")]
    assert seen.cameras() == []


def test_a_camera_that_starts_has_no_fault() -> None:
    assert Seen().cameras(front=CameraStatus(CameraState.STARTING)) == []


def test_a_camera_that_a_reload_stops_has_no_fault_of_its_own() -> None:
    stopped = CameraStatus(CameraState.STOPPED)
    seen = Seen()
    assert seen.cameras(front=LIVE, rear=LOST) == [("rear", "begin", "refused")]
    assert seen.cameras(front=stopped, rear=stopped) == []
    assert seen.cameras(front=LIVE) == [("rear", "end", "removed")]


def test_a_model_that_serves_from_the_start_is_no_event() -> None:
    first = model()
    seen = Seen()
    assert seen.models(ready("lanes", 1, first)) == []
    assert seen.models(ready("lanes", 1, first)) == []


def test_a_new_version_and_the_same_version_anew_are_swaps() -> None:
    seen = Seen()
    seen.models(ready("lanes", 1, model()))
    assert seen.models(ready("lanes", 2, model())) == [("lanes", "instant", "swapped")]
    assert seen.models(ready("lanes", 2, model())) == [("lanes", "instant", "swapped")]
    assert next(each for each in seen.log.after(0) if each.model).model_version == "2"


def test_a_model_that_becomes_idle_or_is_woken_is_no_event_and_a_change_of_it_is() -> None:
    def idle(version: int = 1) -> ModelEntry:
        return ModelEntry("seldom", version, ModelState.UNAVAILABLE, IDLE, model())

    seen = Seen()
    assert seen.models(ready("seldom", 1, model())) == []
    assert seen.models(idle()) == []
    assert seen.models(ready("seldom", 1, model())) == []
    assert seen.models(idle()) == []
    assert seen.models(ready("seldom", 2, model())) == [("seldom", "instant", "swapped")]


def test_a_roll_back_is_one_event_with_its_reason() -> None:
    old, new = model(), model()
    seen = Seen()
    seen.models(ready("lanes", 1, old))
    seen.models(ready("lanes", 2, new))
    back = ready("lanes", 1, old, "rolled back: 3 of 10 requests failed")
    assert seen.models(back) == [("lanes", "instant", "rolled_back")]
    assert seen.models(back) == []
    assert "3 of 10 requests failed" in seen.log.after(0)[-3].text


def test_a_model_that_cannot_serve_is_unavailable_until_it_does() -> None:
    seen = Seen()
    seen.models(ready("lanes", 1, model()))
    loading = ModelEntry("lanes", 2, ModelState.LOADING)
    assert seen.models(loading) == []
    failed = ModelEntry("lanes", 2, ModelState.UNAVAILABLE, "no such file")
    assert seen.models(failed) == [("lanes", "begin", "unavailable")]
    assert seen.models(failed) == []
    assert seen.models(ready("lanes", 3, model())) == [("lanes", "end", "unavailable")]
    begin, end = (each for each in seen.log.after(0) if each.model)
    assert end.begin_id == begin.id


def test_a_removed_model_is_an_event() -> None:
    seen = Seen()
    seen.models(ready("lanes", 1, model()))
    assert seen.models() == [("lanes", "begin", "removed")]


def test_what_degrades_the_device_begins_and_ends_by_its_word() -> None:
    seen = Seen()
    assert seen.device() == []
    assert seen.device(throttled="92 C") == [("begin", "throttled")]
    assert seen.device(throttled="93 C", undervoltage="2 times") == [("begin", "undervoltage")]
    assert seen.device(undervoltage="2 times") == [("end", "throttled")]
