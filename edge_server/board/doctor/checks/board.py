"""Checks of the board: model, power mode, temperature, clock, memory and free disk."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

from edge_server.board.doctor.evidence import fault, ok, warning
from edge_server.board.resources import BoardMemory

if TYPE_CHECKING:
    from edge_server.board.doctor.evidence import Evidence, Finding
    from edge_server.board.thermal import ThermalZone

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
            "not known: a sensor's file does not let itself be read",
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
