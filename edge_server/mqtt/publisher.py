"""Publisher: publishes lanes and state of this device to an MQTT broker."""

from __future__ import annotations

import itertools
import logging
import threading
import time
from collections import defaultdict
from typing import TYPE_CHECKING, Any

import msgspec

from edge_server.inference.registry import ModelState
from edge_server.mqtt import payloads
from edge_server.mqtt.connection import KEEPALIVE_S
from edge_server.mqtt.feed import EventFeed, Feed
from edge_server.mqtt.link import Link, contents_of
from edge_server.mqtt.payloads import Topics, rfc3339
from edge_server.process.utf8 import as_utf8

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Iterable, Iterator, Mapping

    from edge_server.board.facts import BoardFacts
    from edge_server.board.identity import Identity
    from edge_server.board.resources import BoardMemory
    from edge_server.board.update import UpdateRecord
    from edge_server.board.watch import DeviceReport
    from edge_server.cameras.calibration import Calibration
    from edge_server.inference.registry import ModelEntry
    from edge_server.lanes.types import LaneFrame
    from edge_server.pipeline.event_log import EventLog
    from edge_server.pipeline.vehicle import VehicleInputs
    from edge_server.process.histogram import Distribution
    from edge_server.process.worker import Worker
    from edge_server.settings import Mqtt

SCHEMA = "edge.health/1"

_UINT32 = 2**32
_MIB = 1 << 20
_encode = msgspec.json.Encoder().encode


def health(
    identity: Identity,
    report: DeviceReport,
    free_bytes: Mapping[str, int],
    *,
    mono_ns: int,
    epoch_ns: int,
) -> bytes:
    """Return the JSON of the device's health.

    Args:
        identity: of this device.
        report: of the board.
        free_bytes: directory → its free space.
        mono_ns: `time.monotonic_ns()` now.
        epoch_ns: `time.time_ns()` now.
    """
    facts = report.facts
    status = "OK" if facts is not None else "UNKNOWN"
    if report.reasons:
        status = "DEGRADED"
    known = {} if facts is None else _facts(facts)
    uptime_s = None if facts is None else facts.uptime_s
    uptime = {} if uptime_s is None else {"uptime_s": int(uptime_s) % _UINT32}
    return _encode(
        {
            "schema": SCHEMA,
            "device": identity.device,
            "boot_id": identity.boot_id,
            "status": f"HEALTH_STATUS_{status}",
            "reasons": [as_utf8(reason) for reason in report.reasons],
            "time": {
                "mono_ns": str(mono_ns),
                "time": rfc3339(epoch_ns),
                "clock": f"HEALTH_CLOCK_{report.clock.name}",
                "clock_steps": report.clock_steps % _UINT32,
                **uptime,
            },
            **(_NOTHING | known),
            "disks": [
                {"directory": as_utf8(directory), "free_mib": count // _MIB % _UINT32}
                for directory, count in free_bytes.items()
            ],
        }
    )


_NOTHING: dict[str, Any] = {
    "engines": [],
    "temperatures": [],
    "rails": [],
    "memory": {},
    "storage": [],
    "supply_events": [],
}


def _facts(facts: BoardFacts) -> dict[str, Any]:
    return _known(power_mode=facts.power_mode, boot_reason=facts.boot_reason) | {
        "engines": [
            {"name": engine.name}
            | _known(
                load=engine.load,
                clock_mhz=_mega(engine.now_hz),
                highest_clock_mhz=_mega(engine.highest_hz),
            )
            for engine in facts.engines
        ],
        "temperatures": [
            {"zone": as_utf8(zone.name), "celsius": zone.celsius}
            | _known(throttle_celsius=zone.throttle_celsius)
            for zone in facts.heat.zones
        ],
        "rails": [
            {"name": as_utf8(rail.name), "watts": round(rail.watts, 3)} for rail in facts.rails
        ],
        "memory": _memory(facts.memory),
        "storage": [
            {"name": drive.name} | _known(worn=drive.worn, celsius=drive.celsius)
            for drive in facts.storage
        ],
        "supply_events": [
            {"name": event.name, "count": event.count % _UINT32}
            for event in facts.heat.supply_events
        ],
    }


def _memory(memory: BoardMemory) -> dict[str, Any]:
    swap_used = None
    if memory.swap_total_bytes is not None and memory.swap_free_bytes is not None:
        swap_used = memory.swap_total_bytes - memory.swap_free_bytes
    return _known(
        total_mib=_mib(memory.total_bytes),
        available_mib=_mib(memory.available_bytes),
        swap_used_mib=_mib(swap_used),
    )


def _known(**values: Any) -> dict[str, Any]:
    return {
        name: as_utf8(value) if isinstance(value, str) else value
        for name, value in values.items()
        if value is not None
    }


def _mega(hz: int | None) -> int | None:
    return None if hz is None else hz // 1_000_000 % _UINT32


def _mib(count: int | None) -> int | None:
    return None if count is None else max(0, count) // _MIB % _UINT32


_STATES = ("ok", "degraded", "stalled", "frozen", "lost")
# "None" is its word for "not known"; the key is absent where the offset cannot be measured.
_OFFSET = "{{ (value_json.get('ego') or {}).get('lateral_offset_m') }}"
_DEPARTURE = "{{ 'OFF' if value_json.phase == 'EVENT_PHASE_END' else 'ON' }}"


def discovery_topic(prefix: str, identity: Identity) -> str:
    """Return the topic of the device's discovery; retained."""
    return f"{prefix}/device/edge_server_{identity.device}/config"


def discovery(identity: Identity, topics: Topics, cameras: Iterable[str]) -> bytes:
    """Return the entities of every camera: departure warning, state, and lateral offset."""
    components: dict[str, Any] = {}
    for camera in sorted(cameras):
        unique = f"edge_server_{identity.device}_{camera}"
        components[f"{camera}_lane_departure"] = {
            "p": "binary_sensor",
            "unique_id": f"{unique}_lane_departure",
            "name": f"{camera} lane departure",
            "device_class": "safety",
            "state_topic": topics.event("lane_departure", camera),
            "value_template": _DEPARTURE,
        }
        components[f"{camera}_state"] = {
            "p": "sensor",
            "unique_id": f"{unique}_state",
            "name": f"{camera} camera",
            "device_class": "enum",
            "options": _STATES,
            "entity_category": "diagnostic",
            "state_topic": topics.camera_status(camera),
            "value_template": "{{ value_json.state }}",
        }
        components[f"{camera}_lateral_offset"] = {
            "p": "sensor",
            "unique_id": f"{unique}_lateral_offset",
            "name": f"{camera} lateral offset",
            "device_class": "distance",
            "state_class": "measurement",
            "unit_of_measurement": "m",
            "state_topic": topics.lanes(camera),
            "value_template": _OFFSET,
            "expire_after": 2,
        }
    return msgspec.json.encode(
        {
            "dev": {
                "ids": [f"edge_server_{identity.device}"],
                "name": identity.device,
                "sw": identity.version,
            },
            "o": {"name": "edge_server", "sw": identity.version},
            "availability_topic": topics.status,
            "availability_template": "{{ value_json.state }}",
            "cmps": components,
            "qos": 1,
        }
    )


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
        identity: of this device.
        events: are published at least once, in their order; None publishes none.
        vehicle: gets the vehicle's state where `mqtt.vehicle_state` is on; None takes none.
        keepalive_s: see `KEEPALIVE_S`.
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
            self._feed.events = EventFeed(events)
            events.when_visible(self._ring)
        self._outbox = self._feed.outbox
        self._outbox.put_state(self._topics.status, payloads.status(identity, "starting"))
        self._seq: dict[str, Iterator[int]] = defaultdict(itertools.count)
        self._models: set[str] = set()  # that have a topic
        # Replaced, never changed: two threads read them.
        self._cameras: dict[str, Calibration | None] = {}
        self._serving: dict[str, list[int]] = {}
        self._discovery = ""  # the topic that Home Assistant reads
        self._misnamed: set[str] = set()
        self._introducing = threading.Lock()
        self._mqtt = mqtt
        self._lock = threading.Lock()
        self._stopped = False
        # To the broker that has the lanes, and to the one that is to have them.
        self._link = None if mqtt is None else Link(mqtt, self._feed, self._take_over)
        self._next: Link | None = None
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
        link, following = self._link, self._next
        if link is None:
            return "off"
        state = "connected" if link.connected else f"away ({link.trouble or 'connecting'})"
        if link.connected and (contest := self._feed.contest.text):
            state += f" ({contest})"
        if following is not None:
            state += f", not yet at {following.address} ({following.trouble or 'connecting'})"
        return state

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
        return bool(self._feed.contest.text)

    @property
    def taken_over(self) -> int:
        """Number of those that another client with this device's client id took over."""
        return self._feed.contest.taken_over

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
        """Return the threads whose hang, or end by an error, must end the daemon."""
        with self._lock:
            return [link.worker for link in (self._link, self._next) if link is not None]

    def start(self) -> None:
        """Start connecting to the broker; returns at once. `status` is `starting`."""
        if self._link is not None:
            self._link.worker.start()

    def stop(self) -> None:
        """Publish `offline` if a broker is connected, and stop; takes 1 s at most."""
        with self._lock:
            self._stopped = True
            link, following = self._link, self._next
        self._outbox.put_state(self._topics.status, payloads.status(self._identity, "offline"))
        _abandon(following)
        if link is not None:
            link.leave()
            if link.worker.alive:
                link.wait_until_left()
                link.worker.stop(timeout_s=0.1)  # a worker deep in a connect ends with the process

    def change(self, mqtt: Mqtt | None) -> str:
        """Publish to the broker of `mqtt` from the moment on when it accepts this device.

        Until then the broker so far keeps the lanes; then it gets `offline`, and the new one every
        state. A file whose contents have changed is a change like any other. Returns at once.

        Args:
            mqtt: the broker; None publishes nothing more.

        Returns:
            What is going to happen, in words; empty if nothing changes.
        """
        # Outside of the lock, for which the supervisor waits: a disk may hang.
        contents = () if mqtt is None else contents_of(mqtt)
        with self._lock:
            link, following = self._link, self._next
            if self._stopped or (link is None and mqtt is None):
                return ""
            if link is None or mqtt is None:
                self._introduce_for(mqtt)
                return self._switch(mqtt, contents)
            if link.is_of(mqtt, contents):
                self._next = None
                _abandon(following)
                return "" if following is None else f"stays at {link.address}"
            if following is None or not following.is_of(mqtt, contents):
                self._next = Link(mqtt, self._feed, self._take_over, link.address, contents)
                _abandon(following)
                self._next.worker.start()
                if self._next.address == link.address:
                    return f"logs in to {link.address} anew"
                return f"moves from {link.address} to {self._next.address} once accepted there"
            return ""

    def _switch(self, mqtt: Mqtt | None, contents: tuple[str, ...]) -> str:
        """Begin or end to publish at all."""
        link, following = self._link, self._next
        self._next = None
        if mqtt is not None:
            self._link = Link(mqtt, self._feed, self._take_over, contents=contents)
            self._link.worker.start()
            return f"on, at {self._link.address}"
        self._link = None
        _abandon(following)
        if link is None:
            return ""
        link.leave(payloads.status(self._identity, "offline"))
        return f"off, {link.address} is left"

    def _take_over(self, link: Link) -> bool:
        """Return whether `link` publishes from now on, after the one before; called on its
        worker."""
        with self._lock:
            if link is not self._next or self._link is None:
                return link is self._link
            before, self._link, self._next = self._link, link, None
        before.leave(payloads.status(self._identity, "offline"))
        if before.connected:
            before.wait_until_left()
        self._feed.contest.log_in_anew()
        self._introduce_for(link.mqtt)
        return True

    def publish_online(self, no_lanes: Collection[str] = (), **more: Any) -> None:
        """Publish that the device serves, until `stop`.

        Retained topics of an earlier run's models and cameras that no longer exist are cleared.

        Args:
            no_lanes: the cameras without lanes at present.
            more: see `payloads.status`.
        """
        payload = payloads.status(self._identity, "online", no_lanes=sorted(no_lanes), **more)
        self._put_state(self._topics.status, payload)
        self._feed.online = True

    def publish_health(self, report: DeviceReport, free_bytes: Mapping[str, int]) -> None:
        """Publish the health of the board; see `health`."""
        mono_ns, epoch_ns = time.monotonic_ns(), time.time_ns()
        payload = health(self._identity, report, free_bytes, mono_ns=mono_ns, epoch_ns=epoch_ns)
        self._put_state(self._topics.health, payload)

    def publish_lanes(self, frame: LaneFrame) -> None:
        """Offer a frame's lanes; the newest frame of each camera wins. Never raises."""
        if not self.on:
            return
        topic = self._topic(self._topics.lanes, frame.camera)
        if topic is not None and self._outbox.put_live(topic, (next(self._seq[topic]), frame)):
            self._ring()

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

    def publish_calibration(self, name: str, calibration: Calibration | None) -> None:
        """Publish how a camera sees, and that it exists; None where that is not known."""
        self._cameras = {**self._cameras, name: calibration}
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

    def publish_model_state(self, name: str, state: str, reason: str = "") -> None:
        """Publish whether a model serves, and the reason if it does not."""
        topic = self._topic(self._topics.model_state, name)
        self._put_state(topic, payloads.model_state(name, state, reason))

    def publish_models(self, entries: Iterable[ModelEntry]) -> None:
        """Publish for each model its newest version that is READY, or else its newest one.

        The topics of models that are missing in `entries` are cleared.
        """
        entries = tuple(entries)
        by_rank = sorted(entries, key=lambda e: (e.state is ModelState.READY, e.version))
        newest = {entry.name: entry for entry in by_rank}
        for name, entry in newest.items():
            self.publish_model_state(name, entry.state.value, entry.reason)
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

    def _introduce_for(self, mqtt: Mqtt | None) -> None:
        self._mqtt = mqtt
        self._introduce()

    def _introduce(self) -> None:
        """Publish what readers, and Home Assistant where it is on, know of this device."""
        with self._introducing:
            mqtt = self._mqtt
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
                self._discovery = discovery_topic(mqtt.home_assistant, self._identity)
                entities = discovery(self._identity, self._topics, self._cameras)
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


def _abandon(link: Link | None) -> None:
    if link is not None:
        link.abandon()
