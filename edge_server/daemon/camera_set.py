"""The daemon's cameras: built from the settings, and changed while the other cameras go on."""

from __future__ import annotations

import logging
import os
import time
from collections import defaultdict
from contextlib import suppress
from dataclasses import dataclass
from math import inf
from pathlib import Path
from typing import TYPE_CHECKING

from edge_server.cameras.calibration import read_calibration
from edge_server.cameras.camera import Camera
from edge_server.cameras.source import recorded_calibration
from edge_server.cameras.source_uri import SourceOptions, read_credentials
from edge_server.errors import SettingsError, SourceError, StageStuck, Unavailable
from edge_server.pipeline.fair_shares import FairShares
from edge_server.pipeline.lane_pipeline import LanePipeline
from edge_server.pipeline.networks import NetworkPipeline
from edge_server.pixels import ColourMatrix, ColourRange

if TYPE_CHECKING:
    import threading
    from collections.abc import Callable, Iterable, Mapping, Sequence

    from edge_server.board.watch import BoardWatch
    from edge_server.cameras.calibration import Calibration
    from edge_server.cameras.source import SourceKind
    from edge_server.inference.data_plane import DataPlane
    from edge_server.inference.tracing import Tracer
    from edge_server.pipeline.lane_pipeline import Listener
    from edge_server.pipeline.networks import NetworkListener
    from edge_server.pipeline.road_follower import RoadFollower
    from edge_server.process.threads import Worker
    from edge_server.settings import CameraSection

log = logging.getLogger(__name__)

# Cameras that leave get so long, all together, to end their reads and requests.
_LEAVE_S = 3.0
# For the first frames of live cameras, before the daemon is ready without them.
_FIRST_FRAMES_S = 2.0
# So many readers may hang, of present and removed cameras: four cameras that are out of service, at
# once. Each keeps a thread, a device, up to a picture's memory, and perhaps a lock that other
# readers of the same library wait for. Beyond that the process is not to be trusted.
MOST_HANGING = 8
# So many openings that fail, one after another, are no accident.
_FAILED_OPENINGS = 2
# A restart of Argus is judged after the first time, and counts up to the second.
_ARGUS_STARTS_S, _ARGUS_RESTARTED_S = 30.0, 600.0
# A camera whose driver only a new process gets back is worth a restart once no other one has given
# a frame for so long.
_NO_FRAMES_S = 10.0


def source_options(name: str, section: CameraSection) -> SourceOptions:
    """Return what the settings of a camera add to its URI.

    Raises:
        SettingsError: the file of credentials cannot be read, or has none.
    """
    credentials = None
    if section.credentials_file is not None:
        try:
            credentials = read_credentials(section.credentials_file)
        except SettingsError as error:
            raise SettingsError(f"cameras.{name}.credentials_file: {error}") from error
    return SourceOptions(
        credentials,
        section.reader,
        ColourMatrix(section.color_matrix) if section.color_matrix else None,
        ColourRange(section.color_range) if section.color_range else None,
    )


def calibration_of(name: str, section: CameraSection) -> Calibration | None:
    """Return the calibration that the settings of a camera name, or else the one of the recording
    that it plays; None if there is none.

    Raises:
        SettingsError: its file cannot be read, or is damaged.
        SourceError: the recording cannot be read.
    """
    try:
        if section.calibration is None:
            return recorded_calibration(section.uri)
        return read_calibration(section.calibration)
    except SettingsError as error:
        raise SettingsError(f"cameras.{name}.calibration: {error}") from error
    except SourceError as error:
        raise type(error)(f"camera {name}: {error}") from error


@dataclass(frozen=True, eq=False)
class _Entry:
    section: CameraSection
    options: SourceOptions
    calibration: Calibration | None
    pipeline: LanePipeline

    @property
    def camera(self) -> Camera:
        return self.pipeline.camera


class Argus:
    """Has systemd restart Argus, NVIDIA's daemon for CSI cameras, which may hang until then.

    Args:
        folder: the service's own in /run, which edge-server-argus.path watches; None without
            systemd: nothing restarts Argus then.
        restarted: where edge-server-argus.service writes when it last did, as /proc/uptime has it.
    """

    def __init__(
        self,
        folder: Path | None,
        restarted: Path = Path("/run/edge_server_argus/restarted"),
        uptime_s: Callable[[], float] = lambda: time.clock_gettime(time.CLOCK_BOOTTIME),
    ) -> None:
        self._request = None if folder is None else folder / "restart-argus"
        self._restarted = restarted
        self._uptime_s = uptime_s

    @staticmethod
    def of_this_service() -> Argus:
        folder = os.environ.get("RUNTIME_DIRECTORY")
        return Argus(Path(folder) if folder else None)

    def mend(self, cameras: Sequence[Camera]) -> None:
        """Request a restart where all of `cameras`, those on CSI connectors, fail to open; where
        there was one that did not help, say that a reboot is needed."""
        failing = [each for each in cameras if each.failed_openings >= _FAILED_OPENINGS]
        if not failing or any(each.status.arriving for each in cameras):
            return
        since_s = self._since_restart_s()
        if since_s > _ARGUS_RESTARTED_S:
            self._ask()
            for each in cameras:
                each.failed_openings = 0
        elif since_s > _ARGUS_STARTS_S:
            for each in failing:
                each.need_reboot()

    def _ask(self) -> None:
        if self._request is None or self._request.exists():
            return
        log.error("argus: no CSI camera opens: systemd is asked to restart nvargus-daemon")
        try:
            self._request.touch()
        except OSError as error:
            log.warning("argus: %s cannot be written: %s", self._request, error.strerror)

    def _since_restart_s(self) -> float:
        with suppress(OSError, ValueError, IndexError):
            return self._uptime_s() - float(self._restarted.read_text().split()[0])
        return inf


class CameraSet:
    """The cameras and their loops.

    Attributes:
        pipelines: in the order of the settings. It is one list for the whole run, whose elements
            are replaced at once, so other parts may hold it.
        models: names of the cameras' models; likewise one set for the whole run.

    Args:
        on_removed: called with the name of a camera that was removed, once its loop has ended.
        road: makes what follows the road through the frames of a calibrated camera.
        holds: of the listeners; see `LanePipeline`.
        board: what is wrong with the device itself.
        argus: restarts what CSI cameras hang in.
        frame_listeners: get the frames of cameras without lanes too.
        network_listeners: get what the other networks of cameras find.
        network_recorder: gets what is not published too.
    """

    def __init__(
        self,
        sections: Mapping[str, CameraSection],
        data_plane: DataPlane,
        listeners: Sequence[Listener],
        models: set[str],
        on_removed: Callable[[str], None] = lambda _: None,
        *,
        road: Callable[[Calibration], RoadFollower],
        holds: Sequence[Callable[[str], bool]] = (),
        kinds: Mapping[str, SourceKind] | None = None,
        board: BoardWatch | None = None,
        tracer: Tracer | None = None,
        argus: Argus | None = None,
        frame_listeners: Sequence[Listener] = (),
        network_listeners: Sequence[NetworkListener] = (),
        network_recorder: NetworkListener | None = None,
    ) -> None:
        self.models = models
        self._network_listeners = tuple(network_listeners)
        self._network_recorder = network_recorder
        self._argus = argus or Argus.of_this_service()
        self._data_plane = data_plane
        self._listeners = tuple(listeners)
        self._frame_listeners = tuple(frame_listeners)
        self._holds = tuple(holds)
        self._on_removed = on_removed
        self._kinds = kinds
        self._board = board
        self._road = road
        self._tracer = tracer
        self._shares: dict[str, FairShares] = defaultdict(FairShares)
        # One at a time: what they take beside the lanes is bounded.
        self._network_shares = FairShares()
        self._stopping = False
        self._leaving: frozenset[LanePipeline] = frozenset()
        self._entries = {
            name: self._entry(name, section, None) for name, section in sections.items()
        }
        self.pipelines = [entry.pipeline for entry in self._entries.values()]
        models.update(_models(sections.values()))
        self._left: list[Camera] = []  # removed, and a reader of theirs hangs

    def open_recordings(self) -> None:
        """Report a camera's mistake before the models load, which may take minutes.

        A live camera stays closed: an open one would fill its buffers meanwhile. Its library begins
        to load.

        Raises:
            SourceError: a recording cannot be opened.
            SourceUriError: a URI is wrong.
        """
        for pipeline in self.pipelines:
            self._open(pipeline.camera)

    def validate(
        self, stop: threading.Event, awaits: Callable[[str], bool] = lambda _: False
    ) -> None:
        """Run a frame through each camera's model, and open the cameras; end early at `stop`.

        Args:
            awaits: returns whether a model is still to be loaded; its cameras start with it.

        Raises:
            SettingsError, Unavailable: see `LanePipeline.validate`.
            SourceError: see `open_recordings`.
        """
        for pipeline in self.pipelines:
            if stop.is_set():
                return
            pipeline.awaits_model = awaits(pipeline.model)
            if pipeline.awaits_model:
                log.info("camera %s: waits for its model, %s", pipeline.camera.name, pipeline.model)
                continue
            pipeline.validate()
            for network in pipeline.networks:
                if not awaits(network.model.name):
                    network.validate(live=pipeline.camera.is_live)
            # All at once, as each may take its time or be absent.
            self._open(pipeline.camera, wait_s=0.0)
        until = time.monotonic() + _FIRST_FRAMES_S
        for pipeline in self.pipelines:
            if stop.is_set():
                return
            if not pipeline.awaits_model:
                self._open(pipeline.camera, wait_s=max(0.0, until - time.monotonic()))

    def start(self) -> None:
        for pipeline in self.pipelines:
            if not pipeline.awaits_model:
                pipeline.camera.start()
            for worker in _loops(pipeline):
                worker.start()

    def ask_to_stop(self) -> None:
        """Request every camera to stop, without a wait; none starts from now on."""
        self._stopping = True
        for pipeline in self.pipelines:
            for worker in (*_loops(pipeline), pipeline.camera.worker):
                worker.ask_to_stop()

    def stop(self, left_s: Callable[[], float]) -> None:
        """Stop every camera and wait for each as long as `left_s` returns at that moment."""
        for pipeline in self.pipelines:
            for worker in _loops(pipeline):
                worker.stop(left_s())
            pipeline.camera.stop(left_s())

    def workers(self) -> list[Worker]:
        """Return the threads that must make progress; the hang of one that leaves ends nothing."""
        staying = [p for p in tuple(self.pipelines) if p not in self._leaving]
        return [worker for p in staying for worker in (p.camera.worker, *_loops(p))]

    def change(self, sections: Mapping[str, CameraSection]) -> str:
        """Add, remove and replace cameras, so that the set is that of `sections`.

        A camera whose settings stay the same goes on without a pause. One whose model, priority,
        age or calibration alone changes keeps its source open. Before anything changes, each new
        recording is open, and each new camera's model has responded to a frame.

        Returns:
            What has changed, in words; empty if nothing.

        Raises:
            SettingsError, Unavailable, SourceError: nothing has changed; see `validate`. After
                `ask_to_stop` it is Unavailable.
        """
        old = self._entries
        new = {name: self._entry(name, each, old.get(name)) for name, each in sections.items()}
        coming = [entry for name, entry in new.items() if entry is not old.get(name)]
        # From here on no update may turn these models into something else.
        models_before = set(self.models)
        self.models.update(_models(entry.section for entry in coming))
        opening = {entry.camera for entry in coming} - {entry.camera for entry in old.values()}
        try:
            for entry in coming:
                self._go_on()
                entry.pipeline.validate()
                for network in entry.pipeline.networks:
                    network.validate(live=entry.camera.is_live)
            for camera in opening:
                self._go_on()
                self._open(camera)
        except BaseException:
            self.models.intersection_update(models_before)
            for camera in opening:
                camera.stop()
            raise
        self._replace(old, new)
        return _difference(old, new)

    def calibration(self, camera: str) -> Calibration | None:
        """Return the calibration of a camera; None without one, and without the camera."""
        entry = self._entries.get(camera)
        return None if entry is None else entry.calibration

    @property
    def hanging(self) -> int:
        """Number of readers that hang in their drivers, those of removed cameras too; each keeps a
        thread and its device."""
        cameras = {*(pipeline.camera for pipeline in tuple(self.pipelines)), *tuple(self._left)}
        return sum(camera.hanging for camera in cameras)

    def check(self, now: float) -> None:
        """Report models that do not respond, while the loops of their cameras wait for them.

        Raises:
            StageStuck: more readers hang than a process may keep, or no camera gives frames and
                one of them needs a new process.
        """
        pipelines = tuple(self.pipelines)
        for pipeline in pipelines:
            pipeline.report_silence(now)
        csi = [p.camera for p in pipelines if p.camera.source_uri.startswith("csi:")]
        self._argus.mend(csi)
        if (hanging := self.hanging) > MOST_HANGING:
            raise StageStuck(f"{hanging} readers of cameras hang in their drivers")
        ages = [pipeline.camera.last_frame_age_s(now) for pipeline in pipelines]
        if all(age_s is None or age_s > _NO_FRAMES_S for age_s in ages):
            for pipeline in pipelines:
                if pipeline.camera.needs_restart and not pipeline.camera.needs_reboot:
                    text = "hangs in its driver, and no other camera gives frames"
                    raise StageStuck(f"camera {pipeline.camera.name}: {text}")

    def _note_hanging(self, closed: Iterable[Camera]) -> None:
        for camera in closed:
            if camera.hanging:
                self._left.append(camera)
                log.warning(
                    "camera %s: was removed while its reader hangs in the driver, and keeps the "
                    "device; %d such readers, and with more than %d this process ends",
                    camera.name,
                    self.hanging,
                    MOST_HANGING,
                )
        self._left = [camera for camera in self._left if camera.hanging]

    def _go_on(self) -> None:
        """Raise Unavailable after a request to stop: a stop need not wait for many cameras."""
        if self._stopping:
            raise Unavailable("the daemon stops")

    def _replace(self, old: Mapping[str, _Entry], new: dict[str, _Entry]) -> None:
        """Stop the old, then start the new: a device may be the same, and opens once."""
        kept = {entry.pipeline for entry in old.values()} & {e.pipeline for e in new.values()}
        closing = {entry.camera for entry in old.values()} - {e.camera for e in new.values()}
        opening = {entry.camera for entry in new.values()} - {e.camera for e in old.values()}
        leaving = [entry.pipeline for entry in old.values() if entry.pipeline not in kept]
        # Others still see them: a camera that is to change would seem removed meanwhile.
        self._leaving = frozenset(leaving)
        loops = [worker for pipeline in leaving for worker in _loops(pipeline)]
        for worker in (*loops, *(camera.worker for camera in closing)):
            worker.ask_to_stop()
        until = time.monotonic() + _LEAVE_S
        for pipeline in leaving:
            for worker in _loops(pipeline):
                worker.stop(max(0.0, until - time.monotonic()))
            # One that waits for its model yet would give older lanes than the camera's next loop.
            pipeline.mute()
        for camera in closing:
            camera.stop(max(0.0, until - time.monotonic()))
        self._note_hanging(closing)
        for name in old.keys() - new.keys():
            self._on_removed(name)
        if self._stopping:
            self.pipelines[:] = [pipeline for pipeline in self.pipelines if pipeline in kept]
            return
        for camera in opening:
            camera.start()
        for name, entry in new.items():
            if entry.pipeline in kept:
                continue
            if entry.camera not in opening:
                entry.pipeline.go_on_from(old[name].pipeline)
            for worker in _loops(entry.pipeline):
                worker.start()
        self._entries = new
        self.pipelines[:] = [entry.pipeline for entry in new.values()]
        self.models.intersection_update(_models(entry.section for entry in new.values()))

    def _entry(self, name: str, section: CameraSection, old: _Entry | None) -> _Entry:
        """Return the entry of a camera; `old` itself where nothing changes."""
        options = source_options(name, section)
        calibration = calibration_of(name, section)
        camera = None
        if old is not None and (old.section.uri, old.options) == (section.uri, options):
            if (old.section, old.calibration) == (section, calibration):
                return old
            camera = old.camera
        networks = [
            NetworkPipeline(
                name,
                network,
                each,
                self._data_plane,
                self._network_listeners,
                shares=self._network_shares,
                served=section.model,
                calibration=calibration,
                recorder=self._network_recorder,
            )
            for network, each in section.networks.items()
        ]
        pipeline = LanePipeline(
            camera or Camera(name, section.uri, options=options, kinds=self._kinds),
            self._data_plane,
            section.model,
            (*(self._listeners if section.model else ()), *self._frame_listeners),
            holds=self._holds,
            shares=self._shares[section.model],
            priority=section.priority,
            max_age_ms=section.max_age_ms,
            board=self._board,
            road=None if calibration is None else self._road(calibration),
            tracer=self._tracer,
            networks=networks,
        )
        return _Entry(section, options, calibration, pipeline)

    def _open(self, camera: Camera, *, wait_s: float | None = None) -> None:
        """Open a camera's source; without `wait_s`, of a live one only the URI is checked.

        Raises:
            SourceError: the error with the camera's name.
        """
        try:
            if wait_s is not None:
                camera.open(wait_s)
            elif camera.is_live:
                camera.load_library()
            else:
                camera.open()
        except SourceError as error:
            raise type(error)(f"camera {camera.name}: {error}") from error


def _loops(pipeline: LanePipeline) -> list[Worker]:
    """Return the threads that use a camera's frames."""
    return [pipeline.worker, *(network.worker for network in pipeline.networks)]


def _models(sections: Iterable[CameraSection]) -> set[str]:
    """Return the names of the models that cameras use."""
    sections = tuple(sections)
    networks = [network for section in sections for network in section.networks.values()]
    lane_models = {section.model for section in sections if section.model}
    return lane_models | {network.model for network in networks}


def _difference(old: Mapping[str, _Entry], new: Mapping[str, _Entry]) -> str:
    changes = {
        "added": sorted(new.keys() - old.keys()),
        "removed": sorted(old.keys() - new.keys()),
        "changed": sorted(name for name in old.keys() & new.keys() if old[name] is not new[name]),
    }
    return "; ".join(f"{word} {', '.join(names)}" for word, names in changes.items() if names)
