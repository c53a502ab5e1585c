"""Publisher: publishes lanes and state of this device to an MQTT broker."""

from __future__ import annotations

import itertools
import logging
import threading
import time
from collections import defaultdict
from functools import partial
from typing import TYPE_CHECKING, Any

import msgspec

from edge_server.inference.registry import ModelState
from edge_server.mqtt import payloads
from edge_server.mqtt.connection import KEEPALIVE_S
from edge_server.mqtt.link import EventFeed, Feed, Link, contents_of
from edge_server.mqtt.payloads import Topics
from edge_server.pipeline.perception import NetworkFrame

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Iterable, Iterator, Mapping

    from edge_server.board.board import Identity
    from edge_server.board.update import UpdateRecord
    from edge_server.board.watch import DeviceReport
    from edge_server.cameras.calibration import Calibration
    from edge_server.cameras.frame import Frame
    from edge_server.inference.registry import ModelEntry
    from edge_server.lanes.agreement import LaneVerdict
    from edge_server.lanes.types import LaneFrame
    from edge_server.pipeline.event_log import EventLog
    from edge_server.pipeline.vehicle import VehicleInputs
    from edge_server.process.histogram import Distribution
    from edge_server.process.threads import Worker
    from edge_server.repository.channel import ChannelReport
    from edge_server.settings import Mqtt

log = logging.getLogger(__name__)


class Publisher:
    """Publishes lanes, camera and model state of one device; its callers never wait or fail.

    A missing, dead, frozen or slow broker costs dropped lanes, which are counted, and nothing
    else: no caller blocks, and at most `WINDOW` messages and one per topic are held. State is kept
    and published again on every new connection; an unexpected disconnect publishes `offline`.

    A link's worker does all work with the broker, JSON encoding included; the publish methods only
    put values into the outbox. They are safe from any thread.

    Args:
        mqtt: the broker and the credentials for it; None publishes nothing until `change`.
        events: are published at least once, in their order; None publishes none.
        vehicle: gets the vehicle's state where `mqtt.vehicle_state` is on; None takes none.
        now_ns: the clock of a frame's age; `time.monotonic_ns`.

    Raises:
        ValueError: the device's name cannot be part of a topic.
    """

    def __init__(
        self,
        mqtt: Mqtt | None,
        identity: Identity,
        *,
        events: EventLog | None = None,
        vehicle: VehicleInputs | None = None,
        keepalive_s: int = KEEPALIVE_S,
        now_ns: Callable[[], int] = time.monotonic_ns,
    ) -> None:
        self._identity = identity
        self._topics = Topics(identity.device)
        self._feed = Feed(identity, self._topics, keepalive_s, now_ns, vehicle=vehicle)
        if events is not None:
            self._feed.events = feed = EventFeed(events)
            events.when_visible(feed.look)
            events.when_visible(self._ring)
        self._outbox = self._feed.outbox
        self._outbox.put_state(self._topics.status, payloads.status(identity, "starting"))
        self._seq: dict[str, Iterator[int]] = defaultdict(itertools.count)
        # Topics by cameras and their networks; without one of the latter, those of lanes.
        self._live: dict[tuple[str, str], str | None] = {}
        self._models: set[str] = set()  # that have a topic
        # Replaced, never changed: two threads read them.
        self._cameras: dict[str, Calibration | None] = {}
        self._without_lanes: frozenset[str] = frozenset()
        self._serving: dict[str, list[int]] = {}
        self._discovery = ""  # the topic that Home Assistant reads
        self._misnamed: set[str] = set()
        self._introducing = threading.Lock()
        self._lock = threading.Lock()
        self._stopped = False
        self._link = None if mqtt is None else Link(mqtt, self._feed)
        self._introduce()

    @property
    def on(self) -> bool:
        """Whether there is a broker to publish to, reachable or not."""
        return self._link is not None

    @property
    def connected(self) -> bool:
        """Whether the connection to the broker is open, as far as the publisher knows."""
        return (link := self._link) is not None and link.connected

    @property
    def state(self) -> str:
        """The connection to the broker, for people."""
        link, contest = self._link, self._feed.contest
        if link is None:
            return "off"
        if not link.connected:
            return f"away ({link.trouble or 'connecting'})"
        return f"connected ({contest})" if contest else "connected"

    @property
    def published(self) -> int:
        """Number of lane messages written to a broker's connection."""
        return self._feed.published

    @property
    def losses(self) -> int:
        """Number of open connections that ended without being left."""
        return self._feed.losses

    @property
    def contested(self) -> bool:
        """Whether another client publishes as this device; the log says which."""
        return bool(self._feed.contest)

    @property
    def taken_over(self) -> int:
        """Number of those that another client with this device's client id took over."""
        return self._feed.taken_over

    @property
    def latency(self) -> Mapping[tuple[str, ...], Distribution]:
        """Return (camera,) → the age of lanes when they are written to a broker's connection."""
        return self._feed.latency.distributions()

    @property
    def waiting(self) -> int:
        """Number of messages that wait for the broker; never more than the number of topics."""
        return self._outbox.waiting

    @property
    def dropped(self) -> int:
        """Number of lane messages offered and never written: replaced, too old, or cut off."""
        return self._outbox.dropped + self._feed.lost

    def workers(self) -> list[Worker]:
        """Return the thread that publishes, if there is a broker."""
        return [] if (link := self._link) is None else [link.worker]

    def start(self) -> None:
        """Start connecting to the broker; returns at once. `status` is `starting`."""
        if self._link is not None:
            self._link.worker.start()

    def stop(self) -> None:
        """Publish `offline` if a broker is connected, and stop; takes 1 s at most."""
        with self._lock:
            self._stopped = True
            link = self._link
        self._outbox.put_state(self._topics.status, payloads.status(self._identity, "offline"))
        if link is not None:
            link.leave()

    def reopen(self) -> None:
        """Publish with a new thread and connection, every state first. The present thread, which
        hangs or has died, ends as soon as it can.

        Raises: RuntimeError: the system has no thread left.
        """
        with self._lock:
            before = self._link
            if self._stopped or before is None:
                return
            link = Link(before.mqtt, self._feed)
            link.worker.start()
            self._link = link
            before.abandon()

    def change(self, mqtt: Mqtt | None) -> str:
        """Leave the broker so far with `offline`, and publish to that of `mqtt`, every state first.

        A file whose contents have changed is a change like any other. Takes 1 s at most.

        Args:
            mqtt: the broker; None publishes nothing more.

        Returns:
            What happens, in words; empty if nothing changes.
        """
        contents = () if mqtt is None else contents_of(mqtt)
        with self._lock:
            before = self._link
            if self._stopped or (mqtt is None and before is None):
                return ""
            if mqtt is not None and before is not None and before.is_of(mqtt, contents):
                return ""
            self._link = link = None if mqtt is None else Link(mqtt, self._feed, contents)
            if before is not None:
                before.leave(payloads.status(self._identity, "offline"))
                self._feed.contest = ""  # the new link finds it again
            self._introduce()
            if link is None:
                return "off" if before is None else f"off, {before.address} is left"
            link.worker.start()
        if before is None:
            return f"on, at {link.address}"
        if before.address == link.address:
            return f"logs in to {link.address} again"
        return f"moves from {before.address} to {link.address}"

    def publish_online(self, no_lanes: Collection[str] = (), **more: Any) -> None:
        """Publish that the device serves, until `stop`.

        Retained topics of an earlier run's models and cameras that no longer exist are cleared.
        """
        payload = payloads.status(self._identity, "online", no_lanes=sorted(no_lanes), **more)
        self._put_state(self._topics.status, payload)
        self._feed.online = True

    def publish_health(self, report: DeviceReport, free_bytes: Mapping[str, int]) -> None:
        """Publish the health of the board; see `payloads.health`."""
        mono_ns, epoch_ns = time.monotonic_ns(), time.time_ns()
        payload = payloads.health(
            self._identity, report, free_bytes, mono_ns=mono_ns, epoch_ns=epoch_ns
        )
        self._put_state(self._topics.health, payload)

    def publish_lanes(self, frame: LaneFrame, _: Frame | None = None) -> None:
        """Offer a frame's lanes, or what a network found in it; of each camera, and of each of its
        networks, the newest frame wins. Never raises."""
        if (link := self._link) is None:
            return
        key = frame.camera, frame.network if isinstance(frame, NetworkFrame) else ""
        if key not in self._live:
            topic_of = (
                partial(self._topics.network, network=key[1]) if key[1] else self._topics.lanes
            )
            self._live[key] = self._topic(topic_of, frame.camera)
        topic = self._live[key]
        if topic is not None and self._outbox.put_live(topic, (next(self._seq[topic]), frame)):
            link.ring()

    def publish_channel(self, report: ChannelReport) -> None:
        """Publish what a channel says, and what became of its model."""
        topic = self._topics.channel(report.channel)
        self._put_state(topic, msgspec.json.encode(report))

    def publish_verdict(
        self, camera: str, network: str, model: str, served: str, verdict: LaneVerdict | None
    ) -> None:
        """Publish how a candidate agrees with the served lanes; None clears that."""
        payload = b""
        if verdict is not None:
            payload = payloads.verdict(network, model, served, verdict)
        topic = self._topics.verdict(camera, network)
        if payload or self._outbox.knows(topic):
            self._put_state(topic, payload)

    def holds(self, camera: str) -> bool:
        """Whether lanes of a camera wait for the broker, which its next ones would replace."""
        topic = self._live.get((camera, ""))
        return self.on and topic is not None and self._outbox.holds_live(topic)

    def publish_camera_status(
        self,
        name: str,
        state: payloads.CameraState,
        last_frame_age_ms: int | None,
        **more: Any,
    ) -> None:
        """Publish the state of a camera and its lanes; see `payloads.camera_status`."""
        topic = self._topic(self._topics.camera_status, name)
        self._put_state(topic, payloads.camera_status(state, last_frame_age_ms, **more))

    def publish_calibration(
        self, name: str, calibration: Calibration | None, lanes: bool = True
    ) -> None:
        """Publish how a camera sees, and that it exists; None where that is not known."""
        self._cameras = {**self._cameras, name: calibration}
        others = self._without_lanes - {name}
        self._without_lanes = others if lanes else others | {name}
        topic = self._topic(self._topics.calibration, name)
        if calibration is not None:
            self._put_state(topic, payloads.calibration(calibration))
        elif topic is not None and self._outbox.knows(topic):
            self._put_state(topic, b"")
        self._introduce()

    def clear_camera(self, name: str) -> None:
        """Clear the retained states of a camera that was removed."""
        self._put_state(self._topic(self._topics.camera_status, name), b"")
        self._feed.latency.forget(name)
        cameras = dict(self._cameras)
        calibration = cameras.pop(name, None)
        self._cameras = cameras
        if calibration is not None:
            self._put_state(self._topic(self._topics.calibration, name), b"")
        self._introduce()

    def publish_update(self, record: UpdateRecord) -> None:
        """Publish the version that runs, and what became of the last update."""
        self._put_state(self._topics.update, payloads.update(self._identity, record))

    def publish_model_state(
        self, name: str, state: str, reason: str = "", configuration: str = ""
    ) -> None:
        """Publish whether a model serves, by which configuration, and the reason if it does not."""
        topic = self._topic(self._topics.model_state, name)
        self._put_state(topic, payloads.model_state(name, state, reason, configuration))

    def publish_models(self, entries: Iterable[ModelEntry]) -> None:
        """Publish for each model its newest version that is READY, or else its newest one.

        The topics of models that are missing in `entries` are cleared.
        """
        entries = tuple(entries)
        by_rank = sorted(entries, key=lambda e: (e.state is ModelState.READY, e.version))
        newest = {entry.name: entry for entry in by_rank}
        for name, entry in newest.items():
            configuration = str(entry.configuration or "")
            self.publish_model_state(name, entry.state.value, entry.reason, configuration)
        for name in self._models - newest.keys():
            self._put_state(self._topic(self._topics.model_state, name), b"")
        self._models = set(newest)
        serving: defaultdict[str, list[int]] = defaultdict(list)
        for entry in entries:
            if entry.state is ModelState.READY:
                serving[entry.name].append(entry.version)
        if serving != self._serving:
            self._serving = dict(serving)
            self._introduce()

    def _introduce(self) -> None:
        """Publish what readers, and Home Assistant where it is on, know of this device."""
        with self._introducing:
            mqtt = None if self._link is None else self._link.mqtt
            calibrations = {name: each.id if each else "" for name, each in self._cameras.items()}
            birth = payloads.meta(
                self._identity,
                self._feed.session,
                mqtt.payload if mqtt else "json",
                calibrations,
                self._serving,
            )
            self._put_state(self._topics.meta, birth)
            before, self._discovery = self._discovery, ""
            if mqtt is not None and mqtt.home_assistant and self._cameras:
                self._discovery = payloads.discovery_topic(mqtt.home_assistant, self._identity)
                entities = payloads.discovery(
                    self._identity, self._topics, self._cameras, self._without_lanes
                )
                self._put_state(self._discovery, entities)
            if before not in {"", self._discovery}:
                self._put_state(before, b"")

    def _put_state(self, topic: str | None, payload: bytes) -> None:
        if topic is not None and self._outbox.put_state(topic, payload):
            self._ring()

    def _ring(self) -> None:
        if (link := self._link) is not None:
            link.ring()

    def _topic(self, topic_of: Callable[[str], str], name: str) -> str | None:
        try:
            return topic_of(name)
        except ValueError as error:
            if name not in self._misnamed:
                self._misnamed.add(name)
                log.error("mqtt: not published: %s", error)  # noqa: TRY400
            return None
