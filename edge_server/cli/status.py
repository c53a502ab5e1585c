"""`edge-server status` and `top`: one report of the daemon, or one in each interval."""

from __future__ import annotations

import json
import os
import signal
import sys
import time
from contextlib import ExitStack, suppress
from dataclasses import asdict
from typing import TYPE_CHECKING

from rich.live import Live
from rich.text import Text

from edge_server.board.board import read_board
from edge_server.cli.run import settings_of
from edge_server.cli.status_report import make_report, sampling
from edge_server.cli.tables import UNKNOWN, answer, duration_text, number, size_text, table
from edge_server.errors import Unavailable
from edge_server.inference.registry import IDLE
from edge_server.process.text import shown

if TYPE_CHECKING:
    import argparse
    from collections.abc import Iterable, Iterator, Sequence

    from edge_server.cli.status_report import (
        BoardReport,
        CameraReport,
        DaemonReport,
        ModelReport,
    )

OK, WARNING, FAULT = "✔", "‼", "✘"
LEAST = "≥"
_MODELS = ("MODEL", "VERSION", "STATE", "BACKEND", "DEVICE", "REQUESTS", "FAILED", "PER S")
_MODEL_TIMES = ("MEAN ms", "QUEUE ms", "INFER ms", "MEM MiB")
_CAMERAS = ("CAMERA", "STATE", "MODEL", "FPS", "LANES/S", "LANES", "AGE ms", "MEAN ms", "DROPPED")
_BAR = 10
# For terminals that are not of UTF-8.
PLAIN = str.maketrans(
    {OK: "+", WARNING: "!", FAULT: "x", LEAST: ">", "°": " ", "…": ".", "▮": "#", "▯": "-"}
)
_STYLES = {OK: "green", WARNING: "yellow", FAULT: "bold red"}
# Beside words that stay: what a first look may find while a camera or a model starts.
_STARTING = frozenset({"starting", "LOADING", "UNLOADING", "ended", "degraded"})


def screen(report: DaemonReport) -> list[str]:
    """Return the lines; none is empty, and none steers a terminal, whatever a model or a camera
    reports of itself."""
    lines = [
        _head(report),
        *(f"{FAULT} {line}" for fault in report.faults for line in fault.splitlines()),
        *_models(report.models),
        *_cameras(report.cameras),
        _broker(report),
        *_board(report.board),
        _plans(report),
        _recorder(report),
        *_channels(report),
        *_settings(report),
    ]
    return [shown(line) for line in lines]


def _head(report: DaemonReport) -> str:
    version = report.version or "of an unknown version"
    up = "" if report.uptime_s is None else f", up {duration_text(report.uptime_s)}"
    words = {True: "ready", False: "not ready", None: "not known whether it is ready"}
    mark = OK if report.ready else FAULT
    line = f"edge-server {version}{up}, {words[report.ready]}"
    if report.version not in (None, report.installed):
        mark = WARNING if report.ready else FAULT
        line += f"; {report.installed} is installed: systemctl restart edge-server"
    return f"{mark} {line}"


def _models(models: tuple[ModelReport, ...] | None) -> Iterator[str]:
    if models is None:
        yield f"{WARNING} models: not known"
        return
    if not models:
        yield f"{WARNING} no model is loaded"
        return
    rows: list[tuple[str, ...]] = [_MODELS + _MODEL_TIMES]
    for each in models:
        counts = (UNKNOWN if c is None else str(c) for c in (each.requests, each.failed))
        times = map(number, (each.per_s, each.mean_ms, each.queue_ms, each.infer_ms))
        known = each.memory_bytes or {}
        memory = number(sum(known.values()) / 2**20, 0) if known else UNKNOWN
        # A file is the least that its model takes.
        memory = f"{LEAST}{memory}" if "file" in known else memory
        where = each.backend or UNKNOWN, each.devices or UNKNOWN
        first = (each.name, each.version or UNKNOWN, each.state, *where)
        rows.append((*first, *counts, *times, memory))
    lines = table(rows, left=range(5))
    yield f"  {lines[0]}"
    for each, line in zip(models, lines[1:], strict=True):
        mark = OK if each.reason == IDLE else _mark(each.state, "READY")
        told = each.degraded or (each.reason and each.reason != IDLE)
        yield f"{WARNING if mark == OK and told else mark} {line}"
        if each.reason:
            yield f"    {_one_line(each.reason)}"


def _cameras(cameras: tuple[CameraReport, ...] | None) -> Iterator[str]:
    if cameras is None:
        yield f"{WARNING} cameras: not known"
        return
    if not cameras:
        yield "  no camera"
        return
    rows = [_CAMERAS]
    for each in cameras:
        counts = [UNKNOWN if c is None else str(c) for c in (each.lanes, each.dropped)]
        rows.append(
            (
                *(each.name, each.state, each.model),
                *(number(each.fps), number(each.lanes_per_s), counts[0]),
                *(number(each.age_ms, 0), number(each.mean_ms), counts[1]),
            )
        )
    lines = table(rows, left=range(3))
    yield f"  {lines[0]}"
    for each, line in zip(cameras, lines[1:], strict=True):
        mark = _mark(each.state, "ok")
        yield f"{WARNING if mark == OK and each.reason else mark} {line}"
        if each.reason:
            yield f"    {each.reason}: {_one_line(each.text)}"


def _mark(state: str, good: str) -> str:
    return OK if state == good else WARNING if state in _STARTING else FAULT


def _one_line(text: str) -> str:
    return " ".join(text.split())


def _broker(report: DaemonReport) -> str:
    broker = report.broker
    if broker is None:
        return "  broker: none"
    name = f"broker {broker.address}".strip()
    if broker.connected is None:
        return f"{WARNING} {name}: not known"
    if broker.connected:
        return f"{OK} {name}: connected, {broker.waiting} wait"
    lost = f"{broker.waiting} wait, {broker.dropped} lane messages were not sent"
    return f"{FAULT} {name}: not connected; {lost}"


def _board(board: BoardReport) -> Iterator[str]:
    parts = [board.model or "no Jetson"]
    if board.power_mode is not None:
        parts.append(f"mode {board.power_mode}")
    if board.cpu_load is not None:
        parts.append(f"CPU {_bar(board.cpu_load)}")
    if board.gpu_load is not None or board.gpu_hz is not None:
        load = "" if board.gpu_load is None else f" {_bar(board.gpu_load)}"
        clock = "" if board.gpu_hz is None else f" at {board.gpu_hz / 1e6:.0f} MHz"
        parts.append(f"GPU{load}{clock}")
    if board.celsius is not None:
        parts.append(f"{board.hottest} {board.celsius:.1f} °C")
    if board.watts is not None:
        parts.append(f"{board.watts:.1f} W")
    if board.memory_total_bytes and board.memory_available_bytes is not None:
        total = board.memory_total_bytes
        used = total - board.memory_available_bytes
        parts.append(f"memory {_bar(used / total)}, {size_text(used)} of {size_text(total)}")
    if board.clock:
        parts.append(f"clock {board.clock}")
    yield f"{FAULT if board.conditions else OK} board: {', '.join(parts)}"
    if board.conditions:
        yield f"    {', '.join(board.conditions)}; `edge-server doctor` has the remedies"
    if board.free_bytes:
        free = (f"{size_text(n)} in {where}" for where, n in board.free_bytes.items())
        yield f"  disk: free {', '.join(free)}"


def _bar(load: float) -> str:
    full = round(_BAR * min(1.0, max(0.0, load)))
    return f"{'▮' * full}{'▯' * (_BAR - full)} {load:.0%}"


def _plans(report: DaemonReport) -> str:
    plans = report.plans
    runs = ", ".join(plans.models) or "no model runs one"
    built = f"{plans.built} built here, {size_text(plans.built_bytes)}" if plans.built else ""
    return f"  plans: {runs}{'; ' if built else ''}{built}"


def _recorder(report: DaemonReport) -> str:
    recorder = report.recorder
    if recorder.mode is None:
        return f"{WARNING} recorder: not known"
    if recorder.mode == "off":
        return "  recorder: off"
    counts = f"{size_text(recorder.written_bytes)} written"
    if recorder.lost or recorder.dropped:
        counts += f", {recorder.lost} lost, {recorder.dropped} not encoded"
    if not recorder.ok:
        return f"{FAULT} recorder: {recorder.mode}, nothing is recorded now; the journal has why"
    return f"{OK} recorder: {recorder.mode}, {counts}"


def _channels(report: DaemonReport) -> Iterator[str]:
    for each in report.channels:
        words = each.state.replace("_", " ")
        words += f", {each.trouble}" if each.trouble not in ("", each.state) else ""
        mark = FAULT if each.trouble else OK
        yield f"{mark} channel {each.name}: serial {each.serial}, {words}"


def _settings(report: DaemonReport) -> Iterator[str]:
    settings = report.settings
    if settings.reloaded is None:
        return
    if not settings.reloaded:
        yield (
            f"{FAULT} settings: the last reload was refused, and nothing has changed; "
            "`systemctl status edge-server` has the reason"
        )
    elif settings.restart_needed:
        yield (
            f"{WARNING} settings: {settings.restart_needed} wait for a restart; "
            "`systemctl status edge-server` names them"
        )
    else:
        yield f"{OK} settings: as in the file when it was read last"


# Rates of `status` are measured over this time: a camera of 5 fps gives some frames in it.
RATES_OVER_S = 1.0


def print_status(arguments: argparse.Namespace) -> Iterable[str]:
    """Return one report."""
    settings = settings_of(arguments)
    with sampling(settings) as sample:
        before = sample()
        time.sleep(RATES_OVER_S)
        report = make_report(before, sample(), settings, read_board())
    return answer(arguments, asdict(report), map(_printable, screen(report)))


def _printable(text: str) -> str:
    encoding = sys.stdout.encoding or "ascii"
    if encoding.lower().startswith("utf"):
        return text
    return text.translate(PLAIN).encode(encoding, "replace").decode(encoding)


def run_top(arguments: argparse.Namespace) -> None:
    """Print reports until the user interrupts it, or as many were printed as are wanted."""
    settings, as_json = settings_of(arguments), arguments.json
    with ExitStack() as stack:
        # The terminal is as before also after a SIGTERM.
        stack.enter_context(suppress(KeyboardInterrupt))
        signal.signal(signal.SIGTERM, signal.default_int_handler)
        sample = stack.enter_context(sampling(settings))
        before = sample()
        live = None
        if sys.stdout.isatty() and not as_json and os.environ.get("TERM") != "dumb":
            live = stack.enter_context(Live(screen=True, auto_refresh=False, redirect_stdout=False))
            _draw(live, ["waiting for the first interval …"])
        for _ in range(arguments.count or sys.maxsize):
            time.sleep(arguments.interval)
            try:
                now = sample()
            except Unavailable as error:
                lines = [f"{FAULT} {shown(line)}" for line in str(error).splitlines()]
                text = json.dumps({"faults": str(error).splitlines()})
            else:
                report = make_report(before, now, settings, read_board())
                before, lines, text = now, screen(report), json.dumps(asdict(report))
            if live is not None:
                _draw(live, lines)
            else:
                plain = _printable("\n".join([time.strftime("%H:%M:%S"), *lines, ""]))
                print(text if as_json else plain, flush=True)


def _draw(live: Live, lines: Sequence[str]) -> None:
    """Write over the lines before, within the terminal as it is now; longer ones are folded."""
    screen = Text(f"edge-server top  {time.strftime('%H:%M:%S')}  Ctrl-C ends\n", overflow="fold")
    for line in lines:
        style = _STYLES.get(line[:1], "")
        # Of what is well the mark alone has a colour.
        coloured = 1 if line.startswith(OK) else len(line)
        screen.append("\n").append(_printable(line[:coloured]), style)
        screen.append(_printable(line[coloured:]))
    live.update(screen, refresh=True)
