"""Checks of the board: model, power mode, temperature, clock, memory and free disk."""

from __future__ import annotations

import time
from dataclasses import dataclass, field
from enum import Enum
from typing import TYPE_CHECKING, Any

from edge_server.board.installation import remedy
from edge_server.board.resources import BoardMemory

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping
    from pathlib import Path

    from edge_server.board.board import Board
    from edge_server.board.device_nodes import DeviceNode, Disk
    from edge_server.board.facts import ThermalZone
    from edge_server.settings import Settings


class Level(Enum):
    """The severity of a finding.

    A warning works, but not as well as it could; a fault is a required feature that does not work.
    """

    OK = "ok"
    WARNING = "warning"
    FAULT = "fault"


@dataclass(frozen=True)
class Finding:
    """`found` describes the finding for a person; `remedy` is the command or action that fixes
    it, or empty."""

    level: Level
    found: str
    remedy: str = ""


def ok(found: str) -> Finding:
    return Finding(Level.OK, found)


def warning(found: str, remedy: str) -> Finding:
    return Finding(Level.WARNING, found, remedy)


def fault(found: str, remedy: str) -> Finding:
    return Finding(Level.FAULT, found, remedy)


@dataclass(frozen=True)
class ProbeResult:
    """What a probe found, or in `failure` the reason why that is missing."""

    facts: Mapping[str, Any] = field(default_factory=dict)
    failure: str = ""

    @property
    def problem(self) -> str:
        """Why the probe gave no facts, or the error among them; empty where all is well."""
        return self.failure or str(self.facts.get("error", ""))


_NOT_RUN = ProbeResult(failure="not run")


@dataclass(frozen=True)
class Configuration:
    """The daemon's settings; `settings` is None when `error` gives the reason.

    Attributes:
        path: the file; None where no file exists, and the defaults apply.
    """

    path: Path | None
    settings: Settings | None
    error: str = ""


@dataclass(frozen=True)
class Evidence:
    """The input of every check.

    Attributes:
        disk: of the model store or its future place; None where it cannot be read.
        results: of the probes, by name.
        version: of edge-server.
    """

    board: Board
    configuration: Configuration
    disk: Disk | None
    results: Mapping[str, ProbeResult] = field(default_factory=dict)
    python: str = ""
    version: str = ""

    def result(self, probe: str) -> ProbeResult:
        return self.results.get(probe, _NOT_RUN)

    @property
    def driver_works(self) -> bool:
        return self.result("driver").facts.get("init") == 0

    @property
    def driver_tried_by_account(self) -> bool:
        """Return whether the probe of the driver ran as the daemon's user; only root can run it
        as another user."""
        uid = self.result("driver").facts.get("uid")
        return uid is None or uid == self.board.account.uid


NO_GPU = "no NVIDIA GPU: models run on the CPU"
# CUresult of cuda.h: cuInit returns the last two, and on a Jetson the first, to a user who may not
# open the device files.
_NO_DEVICE = 100
_NOT_OPENED = (_NO_DEVICE, 801, 999)


def join_groups(nodes: Iterable[DeviceNode], user: str) -> str:
    """Return the command that grants `user` access to `nodes`; empty where no group grants it."""
    groups = sorted({node.group for node in nodes if node.group})
    if not groups:
        return ""
    return f"sudo usermod -aG {','.join(groups)} {user}; then log in again, or restart the daemon"


def gpu_nodes(evidence: Evidence) -> Finding:
    """The device files of GPU and NVDLA exist, and the daemon's user may open them."""
    board = evidence.board
    user = board.account.name
    if not board.gpu_nodes:
        if not board.is_jetson:
            return ok(NO_GPU)
        return fault(
            "no /dev/nvmap, no /dev/nvhost-*, no /dev/nvgpu: nothing leads to the GPU",
            "in a container: --runtime nvidia; elsewhere flash the board again",
        )
    refused = [node for node in board.gpu_nodes if not node.usable]
    found = f"{len(board.gpu_nodes) - len(refused)} device files open to {user}"
    works = evidence.driver_works and evidence.driver_tried_by_account
    if not works:
        # Some files are for root on every board, such as those that switch the GPU's power, and
        # /dev/nvmap may be read-only: a successful start of CUDA proves more than the modes.
        if curable := [node for node in refused if node.group]:
            names = ", ".join(node.path for node in curable)
            return fault(f"closed to {user}: {names}", join_groups(curable, user))
        if any(node.path == "/dev/nvmap" and node.for_root for node in refused):
            return fault(
                "/dev/nvmap is open to root only", "reinstall the udev rules of nvidia-l4t-init"
            )
    why = "which CUDA does not need to start" if works else "by their modes"
    return ok(found + (f", {len(refused)} not, {why}" if refused else ""))


def driver(evidence: Evidence) -> Finding:
    """CUDA's driver starts."""
    result, board = evidence.result("driver"), evidence.board
    facts = result.facts
    if evidence.driver_works and facts["devices"]:
        devices = ", ".join(
            f"{device['name']} (compute {device['compute_capability']})"
            for device in facts["devices"]
        )
        found = f"CUDA {facts['version']}: {devices}"
        if evidence.driver_tried_by_account:
            return ok(found)
        return ok(f"{found}; as {board.account.name} it is tried by: sudo edge-server doctor")
    if (
        not board.is_jetson
        and not board.gpu_nodes
        and (facts.get("missing") or facts.get("init") == _NO_DEVICE)
    ):
        return ok(NO_GPU)
    if "init" in facts and facts["init"] is None:
        remedy = "use a newer JetPack" if board.is_jetson else "update NVIDIA's driver"
        return fault(result.problem, remedy)
    found = result.problem or "it sees no device"
    return fault(f"CUDA's driver does not start: {found}", _driver_remedy(evidence))


def _driver_remedy(evidence: Evidence) -> str:
    board, facts = evidence.board, evidence.result("driver").facts
    if not facts.get("missing"):
        refused = [node for node in board.gpu_nodes if not node.usable]
        look = "sudo dmesg | grep -iE 'nvgpu|nvrm', and restart the machine"
        if join := join_groups(refused, board.account.name):
            return join
        if board.is_jetson and facts.get("init") in _NOT_OPENED:
            groups = f"sudo usermod -aG video,render {board.account.name}"
            return f"{groups}, then log in again, or restart the daemon; if that is so: {look}"
        return look
    if board.is_jetson:
        again = "sudo apt install --reinstall nvidia-l4t-cuda"
        return f"in a container: --runtime nvidia; elsewhere: {again}"
    return "install NVIDIA's driver; in a container: --gpus all"


def cuda_runtime(evidence: Evidence) -> Finding:
    """CUDA's runtime library is installed, in a version that the driver supports."""
    result, board = evidence.result("cuda_runtime"), evidence.board
    version = result.facts.get("version")
    if version is None:
        if not board.is_jetson and not evidence.driver_works:
            return ok("none, and none needed on the CPU")
        found = result.problem or "libcudart.so is not found"
        cuda = (board.jetpack.cuda if board.jetpack else "12.6").replace(".", "-")
        return warning(f"{found}: TensorRT needs it", f"sudo apt install cuda-cudart-{cuda}")
    found = f"CUDA {version} ({result.facts['library']})"
    drivers = evidence.result("driver").facts.get("version", version)
    if _major(version) > _major(drivers):
        return fault(
            f"{found}, but the driver carries CUDA {drivers} only",
            "use the CUDA of this JetPack" if board.is_jetson else "update NVIDIA's driver",
        )
    return ok(found)


def pycuda(evidence: Evidence) -> Finding:
    """pycuda can run edge-server's own kernels."""
    result = evidence.result("pycuda")
    facts = result.facts
    needed = evidence.board.is_jetson or evidence.driver_works
    if result.problem:
        found = f"pycuda cannot be imported: {result.problem}"
        if not needed:
            return ok(f"{found}; none needed on the CPU")
        if not evidence.driver_works:
            return warning(found, "fix the driver first")
        return fault(found, remedy("pycuda"))
    if facts.get("missing"):
        if not needed:
            return ok("none, and none needed on the CPU")
        return warning(
            "pycuda is not installed: images are preprocessed on the CPU",
            remedy("pycuda"),
        )
    return ok(f"pycuda {facts['version']}")


def _major(version: str) -> int:
    return int(version.partition(".")[0])


_GIB = 1 << 30
_MIB = 1 << 20
# Orin throttles from about 99 degrees on; a board in a closed box at this temperature gets there in
# summer.
_WARM_CELSIUS = 85.0
_WARM_MARGIN_CELSIUS = 5.0
_SUPPLY_EVENTS = {
    "oc1": "undervoltage (oc1)",
    "oc2": "average over-current (oc2)",
    "oc3": "peak over-current (oc3)",
}
_WORN_PERCENT = 100
_ENDS = ("warning", "urgent")
# With less free space a log, a plan or a copy of a model fills the disk.
_LITTLE_ROOM_BYTES = _GIB
_NO_ROOM_BYTES = 64 * _MIB
_LITTLE_MEMORY_BYTES = 512 * _MIB
# The shipped models and one camera take 164 MB; the frame path does not fit into less than this.
_TOO_TIGHT_BYTES = 256 * _MIB
# Of JetPack 6, the first whose Python runs edge-server.
_FIRST_L4T = 36


def jetpack(evidence: Evidence) -> Finding:
    """On a Jetson, the JetPack is one that edge-server supports."""
    board = evidence.board
    if not board.is_jetson:
        return ok("not a Jetson: a desktop, a server or a container of one")
    name = board.module.name if board.module else board.model or "a Jetson of an unknown kind"
    if board.chip not in ("Orin", None):
        return fault(f"{name} has a {board.chip}", "use a Jetson Orin: edge-server is made for it")
    if board.l4t is None:
        return warning(
            f"{name}, but /etc/nv_tegra_release does not name its L4T",
            "in a container, mount that file from the board; elsewhere, flash a JetPack",
        )
    if board.l4t.major < _FIRST_L4T:
        return warning(
            f"{name} with L4T {board.l4t}: its TensorRT and OpenCV are for Python 3.8 or older, "
            "which is too old for edge-server",
            "update to JetPack 6.2",
        )
    if board.jetpack is None:
        return warning(
            f"{name} with L4T {board.l4t}, of which nothing is known here",
            "use JetPack 6.2, or see edge-server doctor --matrix",
        )
    found = f"JetPack {board.jetpack.version} (L4T {board.l4t}) on {name}"
    if not evidence.python.startswith(f"{board.jetpack.python}."):
        return warning(
            f"{found}, whose TensorRT and OpenCV are for Python {board.jetpack.python}; "
            f"this is Python {evidence.python}",
            f"python{board.jetpack.python} -m venv --system-site-packages, and install into that",
        )
    return ok(found)


def power_mode(evidence: Evidence) -> Finding:
    """The board runs in its fastest mode."""
    board = evidence.board
    if not board.is_jetson:
        return ok("not a Jetson")
    modes = None if board.facts is None else board.facts.power_modes
    if board.facts is None or modes is None or modes.current is None or modes.highest is None:
        return warning(
            "unknown: the files of nvpmodel do not show it",
            "sudo nvpmodel -q, outside any container",
        )
    rates = "; ".join(
        f"{engine.name} {engine.now_hz / 1e6:.0f} of {engine.highest_hz / 1e6:.0f} MHz"
        for engine in board.facts.engines
        if engine.now_hz is not None and engine.highest_hz
    )
    found = modes.current.name + (f"; now {rates}" if rates else "")
    if modes.current != modes.highest:
        return warning(
            f"{found}; {modes.highest.name} is faster",
            f"sudo nvpmodel -m {modes.highest.id}, if supply and cooling are made for it",
        )
    return ok(found)


def heat(evidence: Evidence) -> Finding:
    """No engine throttles because of heat or supply."""
    facts = evidence.board.facts
    if facts is None:
        return warning(
            "not known: a sensor's file cannot be read",
            "sudo dmesg | grep -i i2c, and switch the board off and on",
        )
    state, hottest = facts.heat, facts.heat.hottest
    if hottest is None:
        return ok("not known here")
    found = f"{hottest.celsius:.0f} °C at {hottest.name}"
    if state.throttled:
        return warning(
            f"{found}; slowed down by {', '.join(state.throttled)}",
            "cool it better, or choose a lower power mode: sudo nvpmodel -m ID",
        )
    if any(zone.celsius >= _warm_celsius(zone) for zone in state.zones):
        return warning(f"{found}; it slows down soon", "look at fan, dust and the place it is in")
    return ok(found)


def supply(evidence: Evidence) -> Finding:
    """The supply gives the board enough voltage and current."""
    facts = evidence.board.facts
    if facts is None:
        return ok("not known here")
    found = ", ".join(f"{rail.name} {rail.watts:.1f} W" for rail in facts.rails)
    if facts.heat.low_voltage:
        return warning(
            f"{found or 'no power monitor'}; low voltage at {', '.join(facts.heat.low_voltage)}",
            "look at the supply and its cable",
        )
    events = {event.name: event.count for event in facts.heat.supply_events if event.count}
    if events:
        counts = ", ".join(
            f"{_SUPPLY_EVENTS.get(n, n)} {count} times" for n, count in events.items()
        )
        return warning(
            f"{found + '; ' if found else ''}slowed down since its start by {counts}",
            "look at the supply and its cable, or choose a lower power mode: sudo nvpmodel -m ID",
        )
    return ok(found or "not known here")


def storage(evidence: Evidence) -> Finding:
    """No drive is near the end of its life."""
    drives = evidence.board.facts.storage if evidence.board.facts is not None else ()
    asked = evidence.result("nvme_wear").facts
    lines, bad = [], []
    for each in drives:
        own = asked.get(each.name, {})
        used = own.get("used_percent") if each.worn is None else round(100 * each.worn)
        line = each.name if used is None else f"{each.name} up to {used} % worn"
        lines.append(line + ("" if each.celsius is None else f" {each.celsius:.0f} °C"))
        if (used or 0) >= _WORN_PERCENT or own.get("critical_warning") or each.end_of_life in _ENDS:
            bad.append(each.name)
    found = ", ".join(lines)
    if bad:
        return warning(found, f"replace {', '.join(bad)}: what it holds may be lost any time")
    return ok(found or "no drive reports it here")


def clock(evidence: Evidence) -> Finding:
    """The clock shows a plausible time, and a time daemon synchronizes it."""
    wall = evidence.board.wall_clock
    now = time.strftime("%Y-%m-%d %H:%M UTC", time.gmtime(wall.now_s))
    remedy = (
        "sudo timedatectl set-ntp true, with a network (where there is no NTP: sudo apt install "
        "systemd-timesyncd); a battery for the board's RTC without"
    )
    if wall.is_behind:
        return fault(f"{now}, which is before this software was built: TLS will fail", remedy)
    if wall.synchronized or evidence.result("kernel_clock").facts.get("synchronized"):
        return ok(f"{now}, synchronized")
    if evidence.result("kernel_clock").facts.get("synchronized") is None:
        return warning(f"{now}; whether it is synchronized is not known", "timedatectl status")
    return warning(f"{now}, not synchronized: other machines may see lanes at other times", remedy)


def memory(evidence: Evidence) -> Finding:
    """The memory suffices, also under a cgroup's limit."""
    facts = evidence.board.facts
    known = BoardMemory() if facts is None else facts.memory
    total, available = known.total_bytes, known.available_bytes
    limit = evidence.board.limits.memory_bytes
    if total is None or available is None:
        return ok("not known here")
    found = f"{available / _GIB:.1f} of {total / _GIB:.1f} GiB available"
    if limit is not None and limit < total:
        found += f"; this process and its group may take {limit / _GIB:.1f}"
    if limit is not None and limit < _TOO_TIGHT_BYTES:
        return fault(found, "allow more: MemoryMax= of the unit, or --memory of the container")
    if min(available, limit or available) < _LITTLE_MEMORY_BYTES:
        return warning(
            found,
            "stop what else runs; on a desktop image of JetPack: "
            "sudo systemctl set-default multi-user.target",
        )
    return ok(found)


def disk(evidence: Evidence) -> Finding:
    """The disk of models and plans has room, and is writable where that is needed."""
    there, settings, board = evidence.disk, evidence.configuration.settings, evidence.board
    if there is None:
        return ok("not known here")
    found = f"{there.free_bytes / _GIB:.1f} GiB free at {there.stands}"
    user = board.account.name
    poll = settings is not None and settings.repository.mode == "poll"
    usual = settings is not None and not settings.repository.store
    # systemd makes the unit's directories at its first start; before that they do not exist.
    made = there.stands in (there.directory, there.directory.parent)
    if poll and not there.writable and (made or not usual or board.unit is None):
        return fault(
            f"{found}, where {user} may not write the model store {there.directory}",
            f"sudo install -d -o {user} -m 700 {there.directory}",
        )
    if there.free_bytes < _NO_ROOM_BYTES:
        return fault(found, "make room: journalctl --vacuum-size=100M, apt clean, old models")
    if there.free_bytes < _LITTLE_ROOM_BYTES:
        return warning(found, "make room: journalctl --vacuum-size=100M, apt clean, old models")
    return ok(found)


def _warm_celsius(zone: ThermalZone) -> float:
    """Return where a zone is near its limit: shortly below its own, or below Orin's usual one."""
    limits = [at for at in (zone.throttle_celsius, zone.critical_celsius) if at is not None]
    return min(limits) - _WARM_MARGIN_CELSIUS if limits else _WARM_CELSIUS
