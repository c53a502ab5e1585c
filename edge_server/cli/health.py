"""`edge-server health`: whether the daemon serves what is required, now or within some seconds.

It is the gate of update engines: an update is good once this verb ends with 0.
"""

from __future__ import annotations

import json
import sys
import time
from dataclasses import dataclass, field
from importlib.metadata import version
from pathlib import Path
from typing import TYPE_CHECKING

from edge_server.api.grpc.client import not_ready_reason
from edge_server.api.http.scrape import scrape
from edge_server.cli.run import settings_of
from edge_server.cli.verbs import OK, UNAVAILABLE, USAGE
from edge_server.errors import SettingsError, Unavailable

if TYPE_CHECKING:
    import argparse
    from collections.abc import Callable, Sequence

    from edge_server.api.http.scrape import Scrape
    from edge_server.settings import Settings

# Health that lasted less may be a daemon that crashes and starts again.
STABLE_S = 10.0
_LANES_WITHIN_S = 2.0
_LOOK_S = 0.5
_KINDS = "model:NAME, camera:NAME, lanes:NAME or mqtt"


@dataclass(frozen=True)
class Look:
    """What one look at the daemon found.

    Attributes:
        unmet: requirement → why it is not met.
        started_s: when the daemon's process was started, by its own account, which is the same as
            long as it runs; None without a daemon.
    """

    unmet: dict[str, str]
    started_s: float | None = None


@dataclass
class Stability:
    """Decides, look by look, whether the daemon has been healthy for `stable_s`.

    A look that finds something unmet, or another daemon than the look before, starts the time anew.

    Attributes:
        restarts: number of times that another daemon was found.
        last: the newest look.
    """

    stable_s: float
    restarts: int = 0
    last: Look = field(default_factory=lambda: Look({}))
    _healthy_since_s: float | None = None
    _started_s: float | None = None

    def healthy_for_s(self, look: Look, now_s: float) -> float:
        """Return how long everything has been met, up to this look; negative while it is not."""
        before_s = self._started_s
        self._started_s = before_s if look.started_s is None else look.started_s
        restarted = before_s not in (None, self._started_s)
        self.restarts += restarted
        self.last = look
        if look.unmet:
            self._healthy_since_s = None
            return -1.0
        if restarted or self._healthy_since_s is None:
            self._healthy_since_s = now_s
        return now_s - self._healthy_since_s

    def is_met(self, look: Look, now_s: float) -> bool:
        return self.healthy_for_s(look, now_s) >= self.stable_s


def health(arguments: argparse.Namespace) -> int:
    """Look, and print what was found; return the exit code."""
    settings = settings_of(arguments)
    stable_s = min(STABLE_S, arguments.wait) if arguments.stable is None else arguments.stable
    faults = faults_of(arguments.require, settings)
    if stable_s > arguments.wait:
        faults.append(f"--stable {stable_s:g}: --wait is only {arguments.wait:g} s")
    if faults:
        for fault in faults:
            print(f"edge-server health: {fault}", file=sys.stderr)
        return USAGE
    stability = Stability(stable_s)
    healthy = wait_until_healthy(
        settings,
        arguments.require,
        stability,
        wait_s=arguments.wait,
        lanes_within_s=arguments.lanes_within,
        progress=None if arguments.json else lambda line: print(line, file=sys.stderr),
    )
    _print(arguments, stability, healthy=healthy)
    return OK if healthy else UNAVAILABLE


def _print(arguments: argparse.Namespace, stability: Stability, *, healthy: bool) -> None:
    unmet = stability.last.unmet
    names = dict.fromkeys(["daemon", "version", "grpc", *arguments.require, *unmet])
    if "daemon" in unmet:
        unmet = {**dict.fromkeys(names, "not known without the daemon"), **unmet}
    if arguments.json:
        rows = [{"name": n, "met": n not in unmet, "reason": unmet.get(n, "")} for n in names]
        report = {"healthy": healthy, "restarts": stability.restarts, "requirements": rows}
        print(json.dumps(report, indent=2))
        return
    # Reports of scripts keep the last line: what is wrong.
    for name in sorted(names, key=lambda each: (each in unmet, each == "daemon")):
        print(f"{name}: {unmet.get(name, 'ok')}")
    if not healthy and not unmet:
        print(f"healthy, but not yet for {stability.stable_s:g} s in a row")
    if stability.restarts:
        print(f"the daemon was restarted {stability.restarts} times meanwhile")


def wait_until_healthy(
    settings: Settings,
    required: Sequence[str],
    stability: Stability,
    *,
    wait_s: float,
    lanes_within_s: float = _LANES_WITHIN_S,
    progress: Callable[[str], None] | None = None,
) -> bool:
    """Look until the daemon has been healthy as `stability` demands, for `wait_s` at most.

    Args:
        required: each like `model:NAME`, see `faults_of`.
        stability: has the last look afterwards.
        progress: gets a line when what is unmet changes.
    """
    end_s: float | None = None
    before: dict[str, str] | None = None
    while True:
        found = look(settings, required, lanes_within_s)
        now_s = time.monotonic()
        if stability.is_met(found, now_s):
            return True
        # From the first look on: what must stay healthy for all of the wait can.
        end_s = now_s + wait_s if end_s is None else end_s
        if now_s >= end_s:
            return False
        if progress is not None and found.unmet != before:
            text = "; ".join(f"{name}: {why}" for name, why in found.unmet.items())
            progress(f"waiting: {text or 'healthy, is it stable?'}")
        before = found.unmet
        time.sleep(min(_LOOK_S, end_s - now_s))


def faults_of(required: Sequence[str], settings: Settings) -> list[str]:
    """Return what no daemon with `settings` could meet; the texts name the remedies.

    Raises:
        SettingsError: the settings leave nothing to look at.
    """
    if not (settings.metrics.enabled and settings.metrics.port):
        raise SettingsError(
            "metrics: health reads the metrics endpoint; set enabled = true and a port in [metrics]"
        )
    faults = []
    for text in required:
        kind, _, name = text.partition(":")
        if kind == "mqtt" and not name:
            if settings.mqtt is None:
                faults.append("--require mqtt: the settings have no [mqtt]")
        elif kind not in {"model", "camera", "lanes"} or not name:
            faults.append(f"--require {text}: give {_KINDS}")
        elif kind == "model":
            if fault := _no_such_model(name, settings.repository.paths):
                faults.append(f"--require {text}: {fault}")
        elif name not in settings.cameras:
            there = ", ".join(settings.cameras) or "none"
            faults.append(f"--require {text}: no such camera in the settings, which have {there}")
    return faults


def _no_such_model(name: str, repositories: Sequence[str]) -> str:
    """Return why no repository has the model; empty if one has it, or cannot be read now."""
    there = set()
    for repository in repositories:
        try:
            there |= {entry.name for entry in Path(repository).iterdir() if entry.is_dir()}
        except OSError:
            return ""
    found = ", ".join(sorted(there)) or "none"
    return "" if name in there else f"no such model in the repository, which has {found}"


def look(settings: Settings, required: Sequence[str], lanes_within_s: float) -> Look:
    """Look at the daemon once; it may be missing."""
    try:
        metrics = scrape(settings.metrics.host, settings.metrics.port)
    except Unavailable as error:
        return Look({"daemon": str(error)})
    unmet = {text: why for text in required if (why := _unmet(text, metrics, lanes_within_s))}
    runs = next((found["version"] for found in metrics.labels("edge_build_info", 1)), "?")
    if runs != (installed := version("edge-server")):
        unmet["version"] = f"{runs} runs, {installed} is installed: restart the daemon"
    if settings.grpc.enabled and (why := not_ready_reason(settings.grpc)):
        unmet["grpc"] = why
    return Look(unmet, metrics.value("process_start_time_seconds"))


def _unmet(text: str, metrics: Scrape, lanes_within_s: float) -> str:
    """Return why a requirement is not met; empty if it is."""
    kind, _, name = text.partition(":")
    if kind == "mqtt":
        return "" if metrics.value("edge_mqtt_connected") == 1 else "no connection to the broker"
    if kind == "model":
        states = {each["state"] for each in metrics.labels("edge_model_state", 1, model=name)}
        return "" if "READY" in states else f"is {' and '.join(sorted(states)) or 'not loaded'}"
    if metrics.value("edge_camera_up", camera=name) is None:
        return "the daemon runs without it; reload its settings"
    if kind == "camera":
        states = {each["state"] for each in metrics.labels("edge_camera_state", 1, camera=name)}
        up = metrics.value("edge_camera_up", camera=name) == 1
        return "" if up else f"no frames arrive: {' '.join(states)}"
    age_s = metrics.value("edge_camera_last_lanes_age_seconds", camera=name)
    if age_s is None:
        return "no valid lanes yet"
    return "" if age_s <= lanes_within_s else f"the newest valid lanes are {age_s:.1f} s old"
