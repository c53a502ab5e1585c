"""StatusReport: a state is published where it changes, and again where that failed."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

from edge_server.board.watch import DeviceReport
from edge_server.cameras.status import CameraState, CameraStatus
from edge_server.daemon.status import LaneRate, StatusReport
from edge_server.inference.registry import ModelEntry, ModelState
from edge_server.lanes.agreement import Disagreement, LaneVerdict
from edge_server.lifecycle.poll import PollControl
from edge_server.pipeline.event_log import EventLog
from edge_server.settings import NetworkSection


class Calls:
    """A publisher that notes which of its methods were called."""

    def __init__(self) -> None:
        self.made: list[str] = []
        self.arguments: dict[str, tuple[tuple[object, ...], dict[str, object]]] = {}
        self.fails = ""

    def __getattr__(self, name: str) -> Any:
        def call(*given: object, **named: object) -> None:
            self.made.append(name)
            self.arguments[name] = given, named
            if name == self.fails:
                raise ValueError(name)

        return call


class Daemon:
    def __init__(self, control: Any = None) -> None:
        self.events = EventLog()
        self.publisher = Calls()
        self.entries = [ModelEntry("a", 1, ModelState.READY)]
        self.camera = SimpleNamespace(
            name="front",
            status=CameraStatus(CameraState.LIVE),
            last_frame_age_s=lambda _now: 0.01,
        )
        self.pipelines: list[Any] = [
            SimpleNamespace(
                camera=self.camera,
                model="lanes",
                failure="",
                fault=("", ""),
                calibration=None,
                networks=(),
            )
        ]
        data_plane: Any = SimpleNamespace(index=lambda *, only_ready: list(self.entries))
        board: Any = SimpleNamespace(check=lambda: None, latest=DeviceReport())
        publisher: Any = self.publisher
        self._report = StatusReport(
            data_plane,
            control,
            self.pipelines,
            publisher,
            board=board,
            rate=LaneRate(lambda: 0),
            reload=None,
            events=self.events,
            free_bytes=dict,
        )

    def look(self) -> list[str]:
        """Report; return which states were published, except those of every few seconds."""
        self._report.report("WATCHDOG=1")
        made, self.publisher.made = self.publisher.made, []
        return [name for name in made if name != "publish_health"]


def test_while_nothing_happens_nothing_is_published() -> None:
    daemon = Daemon()
    assert "publish_camera_status" in daemon.look()
    assert daemon.look() == []


def test_only_what_changes_is_published() -> None:
    daemon = Daemon()
    daemon.look()
    daemon.entries = [ModelEntry("a", 1, ModelState.UNAVAILABLE, "gone")]
    assert daemon.look() == ["publish_models"]
    daemon.camera.status = CameraStatus(CameraState.LOST, "refused")
    assert daemon.look() == ["publish_camera_status", "publish_online"]
    daemon.pipelines[0].failure = "the model fails"
    assert daemon.look() == ["publish_camera_status"]


def test_a_camera_that_comes_back_is_published_again() -> None:
    daemon = Daemon()
    daemon.look()
    [pipeline] = daemon.pipelines
    daemon.pipelines.clear()
    assert daemon.look() == ["clear_camera"]
    daemon.pipelines.append(pipeline)
    assert daemon.look() == ["publish_calibration", "publish_camera_status"]


def test_what_could_not_be_published_is_published_at_the_next_look() -> None:
    daemon = Daemon()
    daemon.publisher.fails = "publish_models"
    daemon.look()
    assert daemon.look() == ["publish_models"]
    daemon.publisher.fails = ""
    assert daemon.look() == ["publish_models"]
    assert daemon.look() == []


class Follows(PollControl):
    """Notes what it is told of candidates."""

    def __init__(self) -> None:
        self.judged: list[tuple[str, str, str]] = []

    @property
    def deployments(self) -> Follows:  # type: ignore[override]  # one fake is both
        return self

    def judge(self, model: str, served: str, text: str) -> None:
        self.judged.append((model, served, text))


def test_a_verdict_is_a_state_an_event_and_known_to_the_store() -> None:
    control = Follows()
    daemon = Daemon(control)
    network = SimpleNamespace(
        name="new",
        section=NetworkSection("candidate", shadow_of="lanes"),
        served="lanes",
        failure="",
        verdict=None,
        disagreement=None,
    )
    daemon.pipelines[0].networks = (network,)
    assert "publish_verdict" in daemon.look()
    for outcome in ("watching", "good", "good", "worse"):
        network.verdict = LaneVerdict(outcome, "because", 25, (), ())
        daemon.look()
    assert daemon.look() == []
    assert control.judged == [
        ("candidate", "lanes", ""),
        ("candidate", "lanes", "watching: because"),
        ("candidate", "lanes", "good: because"),
        ("candidate", "lanes", "worse: because"),
    ]
    network.disagreement = Disagreement(1, "9 of 10 lines")
    daemon.look()
    daemon.look()
    daemon.events._tick(0.0)
    found = [(each.cause, each.camera, each.model) for each in daemon.events.after(0)]
    assert found == [
        ("candidate_good", "front", "candidate"),
        ("candidate_worse", "front", "candidate"),
        ("candidate_differs", "front", "candidate"),
    ]
    daemon.pipelines[0].networks = ()
    assert "publish_verdict" in daemon.look()


def test_a_camera_without_lanes_is_none_that_lacks_them() -> None:
    daemon = Daemon()
    (pipeline,) = daemon.pipelines
    pipeline.model = ""
    daemon.camera.status = CameraStatus(CameraState.LOST, "lost", "unplugged")
    daemon.look()
    sent = daemon.publisher.arguments
    assert sent["publish_online"][0] == ((),)
    assert sent["publish_calibration"][0] == ("front", None, False)
    assert sent["publish_camera_status"][1]["lanes_fail"] is None
