"""The line that `systemctl status` shows: what serves, what is wrong, how many lanes there are."""

from __future__ import annotations

from collections import defaultdict
from typing import TYPE_CHECKING, Any

from edge_server.cameras.status import CameraState
from edge_server.inference.registry import UNLOADED, ModelState

if TYPE_CHECKING:
    from collections.abc import Sequence

    from edge_server.cameras.status import CameraStatus
    from edge_server.daemon.reload import SettingsReload
    from edge_server.inference.data_plane import DataPlane
    from edge_server.lanes.types import LaneFrame
    from edge_server.mqtt.publisher import Publisher
    from edge_server.pipeline.lane_pipeline import LanePipeline

# Characters of one reason.
_LONGEST_REASON = 120
_RATE_PERIOD_S = 10.0
# A rate that differs by less stays as it was shown, so that the line changes with the state only.
_RATE_DIFFERS = 0.15


class LaneRate:
    """Counts the frames with lanes; a listener of LanePipelines."""

    def __init__(self) -> None:
        # Each camera's frames come on one thread, so no count needs a lock.
        self._counts: defaultdict[str, int] = defaultdict(int)
        self._measured: tuple[float, int] | None = None
        self._shown_hz: float | None = None

    def __call__(self, lane_frame: LaneFrame, _frame: object) -> None:
        if not lane_frame.failure:
            self._counts[lane_frame.camera] += 1

    def shown_hz(self, now: float) -> float | None:
        """Return about how many frames got lanes per second; None in the first seconds.

        The number is that of the last `_RATE_PERIOD_S`, and stays while it differs little.
        """
        total = sum(tuple(self._counts.values()))
        if self._measured is None:
            self._measured = now, total
        at, before = self._measured
        if now - at >= _RATE_PERIOD_S:
            self._measured = now, total
            rate_hz, shown_hz = (total - before) / (now - at), self._shown_hz
            if shown_hz is None or abs(rate_hz - shown_hz) > _RATE_DIFFERS * min(rate_hz, shown_hz):
                self._shown_hz = rate_hz
        return self._shown_hz


class StatusLine:
    """Writes the line. It changes where a state does: durations and rates are in coarse steps.

    Args:
        data_plane, pipelines, publisher, rate: are read at each call.
        reload: None where settings are never read again.
    """

    def __init__(
        self,
        data_plane: DataPlane,
        pipelines: Sequence[LanePipeline],
        publisher: Publisher,
        rate: LaneRate,
        reload: SettingsReload | None = None,
    ) -> None:
        self._data_plane = data_plane
        self._pipelines = pipelines
        self._publisher = publisher
        self._rate = rate
        self._reload = reload

    def text(self, now: float) -> str:
        """Return the line at `now`, `time.monotonic()`."""
        parts = [f"serving {self._models()}", self._cameras(now), f"broker {self._publisher.state}"]
        if self._pipelines and (rate_hz := self._rate.shown_hz(now)) is not None:
            parts.append(f"{rate_hz:.{0 if rate_hz >= 10 else 1}f} lanes/s")
        line = ", ".join(parts)
        if (reload := self._reload) is not None:
            if reload.restart_needed:
                line += f"; restart needed for {', '.join(reload.restart_needed)}"
            if reload.fault:
                line += f"; settings not reloaded: {reload.fault[: 2 * _LONGEST_REASON]}"
        # systemd reads a second line as another assignment.
        return line.replace("\n", " ")

    def _models(self) -> str:
        entries = self._data_plane.index(only_ready=False)
        ready = {entry.name for entry in entries if entry.state is ModelState.READY}
        failed = {
            entry.name: entry.reason
            for entry in entries
            if entry.name not in ready and entry.reason != UNLOADED
        }
        if not failed:
            return _counted(len(ready), "model")
        reasons = "; ".join(f"{name}: {_short(reason)}" for name, reason in failed.items())
        return f"{len(ready)} of {_counted(len(ready) + len(failed), 'model')} ({reasons})"

    def _cameras(self, now: float) -> str:
        pipelines = tuple(self._pipelines)
        faults = {p.camera.name: fault for p in pipelines if (fault := _fault(p, now))}
        if not pipelines:
            return "no camera"
        if not faults:
            return _counted(len(pipelines), "camera")
        reasons = "; ".join(f"{name}: {fault}" for name, fault in faults.items())
        working = len(pipelines) - sum(not self._has_lanes(p) for p in pipelines)
        return f"{working} of {_counted(len(pipelines), 'camera')} ({reasons})"

    @staticmethod
    def _has_lanes(pipeline: LanePipeline) -> bool:
        return pipeline.camera.status.usable and not pipeline.failure


def _fault(pipeline: LanePipeline, now: float) -> str:
    """Return what is wrong with a camera, and since when; empty if nothing is."""
    status = pipeline.camera.status
    if status.state is not CameraState.LIVE:
        return f"{spelt(status)}{_duration(now - status.since_mono_ns / 1e9)}"
    return f"no lanes: {_short(pipeline.failure)}" if pipeline.failure else ""


def spelt(status: CameraStatus) -> str:
    """Return a camera's state with its reason, where it has one that the state does not say."""
    state, reason = status.state.value, status.reason
    return state if reason in {"", state, "no_frames"} else f"{state} ({reason})"


def _duration(seconds: float) -> str:
    """Return a duration that changes seldom: ` 20 s`, ` 5 min`, ` 3 h`; empty below 10 s."""
    if seconds < 10:
        return ""
    if seconds < 60:
        return f" {int(seconds // 10) * 10} s"
    return f" {int(seconds // 60)} min" if seconds < 3600 else f" {int(seconds // 3600)} h"


def _counted(count: int, word: str) -> str:
    return f"{count} {word}{'' if count == 1 else 's'}"


def _short(text: Any) -> str:
    text = str(text)
    return text if len(text) <= _LONGEST_REASON else f"{text[:_LONGEST_REASON]}…"
