"""Settings are read again at SIGHUP: what differs is applied, or is named for a restart."""

from __future__ import annotations

import json
import logging
import math
import time
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, NamedTuple

import msgspec

from edge_server.api.certificates import check_certificates
from edge_server.errors import EdgeServerError, SettingsError
from edge_server.inference.tracing import TraceRule
from edge_server.mqtt.broker import faults_of
from edge_server.process.sd_notify import notify
from edge_server.process.text import MASK, masked_by_place
from edge_server.process.threads import Worker
from edge_server.settings.sections import POWER, RESTART, Section, part_of

if TYPE_CHECKING:
    import threading
    from collections.abc import Callable, Iterator, Mapping

    from edge_server.api.grpc.server import GrpcServer
    from edge_server.daemon.camera_set import CameraSet
    from edge_server.inference.tracing import Tracer
    from edge_server.mqtt.publisher import Publisher
    from edge_server.process.logs import LogSwitches
    from edge_server.settings import Settings, TraceSection


@dataclass(frozen=True)
class Difference:
    """A setting that differs.

    Attributes:
        name: `grpc.port`; of a section that one part takes as a whole, the section.
        part: the part that applies it; RESTART or POWER if none does.
        old, new: for people, without secrets.
    """

    name: str
    part: str
    old: str
    new: str

    def __str__(self) -> str:
        return f"{self.name}: {self.old} -> {self.new}"


def differences(running: Settings, wanted: Settings) -> list[Difference]:
    """Return the settings of `wanted` that differ from `running`, in the order of the sections."""
    found = list(_differences(running, wanted, "", RESTART))
    if (running.grpc.tls.enabled, running.grpc.tls.mutual) == (
        wanted.grpc.tls.enabled,
        wanted.grpc.tls.mutual,
    ):
        return found
    # Certificates can be changed only while the listener stays as it is in the other respects.
    return [replace(d, part=RESTART) if d.name.startswith("grpc.tls.") else d for d in found]


def _differences(one: Section, other: Section, table: str, part: str) -> Iterator[Difference]:
    """Yield the settings of a table that differ; those that nothing else is said of, `part`
    applies."""
    for field in msgspec.structs.fields(one):
        name = f"{table}.{field.name}".lstrip(".")
        old, new = getattr(one, field.name), getattr(other, field.name)
        applies = part_of(field.type) or part
        if isinstance(field.default, Section):
            yield from _differences(old, new, name, applies)
        elif old != new:
            yield Difference(name, applies, _shown(name, old), _shown(name, new))


def _shown(name: str, value: Any) -> str:
    """Return the value of a setting for people, without secrets."""
    shown = msgspec.to_builtins(value)
    if name in ("grpc.restricted", "http.restricted"):
        # The values of these headers are passwords; every other secret is in a file.
        shown = [{**each, "value": MASK} for each in shown]
    return masked_by_place(json.dumps(shown, ensure_ascii=False))


class ShownSetting(NamedTuple):
    """A setting for people: `cameras.front.uri`, its value as JSON without secrets, and whether
    that is the default."""

    name: str
    value: str
    default: bool


def shown_settings(settings: Section, table: str = "") -> Iterator[ShownSetting]:
    """Yield every setting, in the order of the sections."""
    for field in msgspec.structs.fields(settings):
        name = f"{table}.{field.name}".lstrip(".")
        value = getattr(settings, field.name)
        below = value.items() if isinstance(value, dict) else ()
        if isinstance(value, Section):
            yield from shown_settings(value, name)
        elif sections := {k: each for k, each in below if isinstance(each, Section)}:
            for key, each in sections.items():
                yield from shown_settings(each, f"{name}.{key}")
        elif name == "mqtt.username" and value:
            # With some brokers that is a token.
            yield ShownSetting(name, json.dumps(MASK), default=False)
        else:
            made = field.default_factory
            default = field.default if made is msgspec.NODEFAULT else made()
            yield ShownSetting(name, _shown(name, value), default=value == default)


log = logging.getLogger(__name__)

# An editor, or a script with another request, may still write.
_SETTLE_S = 0.1
# Their parts say what becomes of them; the values of cameras are long.
_WORDED = frozenset({"cameras", "mqtt"})
_NOT_RELOADED = "settings: not reloaded, everything stays as it is"


class LivePart(NamedTuple):
    """How a part of the daemon takes other settings while it runs.

    Attributes:
        change: applies the settings of this part, given those before and the new ones; returns
            what has changed, in words, where the difference of the settings does not say it. The
            EdgeServerError of the first part says that nothing has changed; the others raise none.
        check: raises an EdgeServerError where the new settings, or the files that they name, have a
            fault; changes nothing.
    """

    change: Callable[[Settings, Settings], str | None]
    check: Callable[[Settings], object] = lambda _: None


class SettingsReload:
    """Reads the settings again where `requested` is set, and applies what can change in a run.

    The file is read until it no longer changes. Settings with a fault change nothing, and the log
    says why. Each one that needs a restart is named in a line, and the running one stays. Requests
    that come during a reload lead to one more reload after it, so the last file wins.

    Attributes:
        worker: waits for requests. A reload has no time limit: it waits for models and files, and
            while one of them hangs, nothing but further reloads waits for it.
        fault: why the last reload changed nothing; empty after one that did its work.
        restart_needed: the settings whose last reading waits for a restart.
        wanted: the settings as they were read last, those that wait for a restart included.

    Args:
        running: the settings of this run.
        requested: set at each request, also before `worker` has started.
        parts: by their names in the settings' `applied_by`; the first one alone may fail to change.
    """

    def __init__(
        self,
        running: Settings,
        read: Callable[[], Settings],
        requested: threading.Event,
        parts: Mapping[str, LivePart],
    ) -> None:
        self.worker = Worker("settings", self.tick)
        self.fault = ""
        self.restart_needed: tuple[str, ...] = ()
        self._at_start = running
        self.wanted = running
        self._read = read
        self._parts = parts
        self._requested = requested
        self._stopping = False

    def stop(self, timeout_s: float) -> None:
        """Stop waiting for requests; a reload that runs gets `timeout_s` to end."""
        self._stopping = True
        self.worker.ask_to_stop()
        self._requested.set()
        self.worker.stop(timeout_s)

    def tick(self, now: float) -> None:
        """Reload once if that was requested; wait for a request otherwise."""
        del now
        with self.worker.allowing(math.inf):
            is_requested = self._requested.wait()
        if not is_requested or self._stopping:
            return
        # Before the file is read: a later change of it comes with a request of its own.
        self._requested.clear()
        # sd_notify(3): RELOADING=1 needs the time, and READY=1 ends it, whatever came of it.
        notify("RELOADING=1", f"MONOTONIC_USEC={time.monotonic_ns() // 1000}")
        try:
            with self.worker.allowing(math.inf):
                self._reload()
        finally:
            notify("READY=1")

    def _reload(self) -> None:
        try:
            wanted = self._read_settled()
            for part in self._parts.values():
                part.check(wanted)
        except Exception as error:  # noqa: BLE001  # a reading or check that fails ends nothing
            self._refuse(error)
            return
        try:
            texts = {name: part.change(self.wanted, wanted) for name, part in self._parts.items()}
        except EdgeServerError as error:
            self._refuse(error)
            return
        self.fault = ""
        found = differences(self.wanted, wanted)
        nothing = "nothing changes yet" if found else "nothing differs"
        log.info("settings: reloaded; %s", "; ".join(_changes(found, texts)) or nothing)
        for line in wanted.without_effect():
            if line not in self.wanted.without_effect():
                log.warning("%s", line)
        for each in found:
            if each.part == POWER:
                log.warning("settings: %s: systemctl restart %s applies it", each, POWER)
        self.wanted = wanted
        waiting = [each for each in differences(self._at_start, wanted) if each.part == RESTART]
        self.restart_needed = tuple(each.name for each in waiting)
        for each in waiting:
            log.warning("settings: %s: restart needed, %s stays until then", each, each.old)

    def _refuse(self, error: Exception) -> None:
        self.fault = str(error)
        # The trace of our own errors would say nothing that they do not.
        trace = None if isinstance(error, EdgeServerError) else error
        log.error("%s: %s", _NOT_RELOADED, error, exc_info=trace)

    def _read_settled(self) -> Settings:
        """Return the settings once two readings in a row agree.

        Raises:
            Exception: that of the second of two readings with the same fault.
        """
        before: Settings | str | None = None
        while True:
            try:
                settings = self._read()
            except Exception as error:
                if str(error) == before:
                    raise
                before = str(error)
            else:
                if settings == before:
                    return settings
                before = settings
            self.worker.wait(_SETTLE_S)


def _changes(found: list[Difference], texts: Mapping[str, str | None]) -> list[str]:
    """Return what has changed: in the words of the part, or else as old and new values."""
    worded = [f"{part}: {text}" for part, text in texts.items() if text]
    return worded + [
        str(each)
        for each in found
        if each.part not in {RESTART, POWER} and each.name not in _WORDED
    ]


def live_parts(
    cameras: CameraSet,
    publisher: Publisher,
    grpc: GrpcServer,
    tracer: Tracer,
    log_switches: LogSwitches,
    *,
    allow_to_finish: Callable[[float], None],
) -> Mapping[str, LivePart]:
    """Return the parts that a reload changes, by their names in the settings' `applied_by`.

    Args:
        allow_to_finish: takes the seconds that requests in flight get at the next stop.
    """

    # What clients have set stays until the file says something else.
    def change_trace(before: Settings, wanted: Settings) -> None:
        if trace_rule(before.trace) != trace_rule(wanted.trace):
            tracer.begin_anew(trace_rule(wanted.trace))

    def change_log(before: Settings, wanted: Settings) -> None:
        if before.log != wanted.log:
            log_switches.apply(wanted.log)

    return {
        "cameras": LivePart(lambda _, wanted: cameras.change(wanted.cameras)),
        "broker": LivePart(lambda _, wanted: publisher.change(wanted.mqtt), check_broker),
        "grpc": LivePart(lambda _, wanted: grpc.change(wanted.grpc), _check_certificates),
        "trace": LivePart(change_trace),
        "log": LivePart(change_log),
        "stop": LivePart(lambda _, wanted: allow_to_finish(wanted.serving.exit_timeout_s)),
    }


def trace_rule(trace: TraceSection) -> TraceRule:
    return TraceRule("TIMESTAMPS" in trace.level, trace.rate, trace.count, trace.log_frequency)


def check_broker(settings: Settings) -> None:
    """Raises: SettingsError: the broker's settings contradict each other, or lack a file."""
    if settings.mqtt is not None and (faults := faults_of(settings.mqtt)):
        raise SettingsError("\n".join(faults))


def _check_certificates(settings: Settings) -> None:
    if settings.grpc.enabled and settings.grpc.tls.on:
        check_certificates(settings.grpc.tls)
