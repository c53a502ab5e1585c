"""The parts of a support bundle: each is a text, or the reason why there is none."""

from __future__ import annotations

import json
import platform
import subprocess
import sys
import tempfile
import threading
from dataclasses import asdict
from importlib.metadata import distributions, version
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any

from edge_server.api.http.scrape import read_metrics
from edge_server.board.board import UNIT
from edge_server.board.doctor.examination import examine
from edge_server.board.facts import read_within
from edge_server.board.kernel_files import listed, read_text
from edge_server.cli.doctor import as_json
from edge_server.errors import EdgeServerError, Unavailable
from edge_server.process.disk import states_here
from edge_server.repository.store_state import StateFile, stores_here
from edge_server.repository.verdicts import read_report

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from edge_server.board.doctor.evidence import Configuration

Part = tuple[str, "Callable[[], str]"]

# A part is cut beyond this: of logs the newest lines stay, of others the first ones.
MOST_BYTES = 2 << 20
_COMMAND_S = 10.0
_PART_BYTES = 1 << 16
_SENSORS_S = 5.0
_LOG_LINES = 5000
_MOST_PLANS = 100
_SIDE_CARS = "*/model.plan.json"
_RELEASES = ("etc/os-release", "etc/nv_tegra_release", "proc/version", "proc/cmdline")


class Missing(EdgeServerError):
    """There is no such part here; the text is the reason."""


def parts(configuration: Configuration) -> Iterator[Part]:
    """Yield the name of each part and the function that makes its text.

    No part needs the daemon to run: those that ask it have a reason instead.
    """
    yield "versions.json", _versions
    yield "doctor.json", lambda: as_json(examine(configuration.path))
    yield "board.json", _board
    yield "models.json", lambda: _models(configuration)
    yield "metrics.txt", lambda: _metrics(configuration)
    yield "plans.json", _plans
    yield "unit.txt", _unit
    yield "journal.txt", lambda: _journal("-u", UNIT)
    yield "kernel.txt", lambda: _journal("-k", "-b")
    if configuration.settings is not None and configuration.settings.log.file:
        path = Path(configuration.settings.log.file)
        yield "log.txt", lambda: _tail(path)


def _versions() -> str:
    found: dict[str, Any] = {
        "edge_server": version("edge-server"),
        "python": sys.version,
        "machine": platform.machine(),
        "packages": dict(sorted((each.name, each.version) for each in distributions())),
    }
    for name in _RELEASES:
        found[f"/{name}"] = read_text(Path("/", name))
    try:
        # What JetPack and this package installed; absent where there is no dpkg.
        found["dpkg"] = _run(
            "dpkg-query", "-W", "nvidia-*", "libnvinfer*", "tensorrt*", "edge-server*", "cuda-*"
        ).splitlines()
    except Missing as error:
        found["dpkg"] = str(error)
    return json.dumps(found, indent=1)


def _board() -> str:
    facts = read_within(_SENSORS_S)
    if facts is None:
        raise Missing("a file of the board's sensors does not let itself be read")
    return json.dumps(asdict(facts), indent=1)


def _models(configuration: Configuration) -> str:
    """What the stores on this machine know of models, and what their daemon reported last."""
    settings, stores = configuration.settings, stores_here()
    if settings is not None and settings.repository.store:
        stores = [Path(settings.repository.store), *stores]
    found: dict[str, dict[str, Any]] = {}
    for store in dict.fromkeys(stores):
        if not store.is_dir():
            continue
        try:
            report, state = read_report(store), StateFile(store).look()
        except OSError as error:
            found[str(store)] = {"error": str(error)}
            continue
        found[str(store)] = {
            "runs": report is not None and report.runs,
            "repositories": [] if report is None else list(report.repositories),
            "verdicts": {}
            if report is None
            else {name: verdict._asdict() for name, verdict in report.models.items()},
            "kept": {
                name: [kept.digest for kept in history] for name, history in state.models.items()
            },
            "quarantined": state.quarantined,
            "quarantined_as": state.quarantined_as,
        }
    if not found:
        raise Missing("no model store is here; the state of models is among the metrics")
    return json.dumps(found, indent=1)


def _metrics(configuration: Configuration) -> str:
    settings = configuration.settings
    if settings is None or not settings.metrics.enabled or not settings.metrics.port:
        raise Missing("the settings name no port of metrics")
    try:
        return read_metrics(settings.metrics.host, settings.metrics.port)[:MOST_BYTES]
    except Unavailable as error:
        raise Missing(f"{error}; does the daemon run?") from error


def _plans() -> str:
    """What the plans in the caches were built with, and from what."""
    found: dict[str, Any] = {}
    for state in states_here():
        for side_car in listed(state / "plans", _SIDE_CARS)[:_MOST_PLANS]:
            text = read_text(side_car)
            try:
                found[str(side_car)] = json.loads(text or "")
            except ValueError:
                found[str(side_car)] = "is no JSON"
    if not found:
        raise Missing("no plan was built here")
    return json.dumps(found, indent=1)


def _unit() -> str:
    return "\n".join(
        _run("systemctl", *verb, UNIT, "--no-pager") for verb in (("status",), ("cat",), ("show",))
    )


def _journal(*which: str) -> str:
    return _run(
        "journalctl",
        *which,
        "--no-pager",
        "-q",
        "-o",
        "short-iso",
        "-n",
        str(_LOG_LINES),
        newest=True,
    )


def _tail(path: Path) -> str:
    try:
        if not path.is_file():
            raise Missing(f"{path}: is no file")
        with path.open("rb") as file:
            begin = max(0, path.stat().st_size - MOST_BYTES)
            file.seek(begin)
            return _whole_lines(file.read(MOST_BYTES), begin).decode(errors="replace")
    except OSError as error:
        raise Missing(f"{path}: {error.strerror}") from error


def _whole_lines(end: bytes, begin: int) -> bytes:
    """Return the end of a log without its first line where the log was cut within that: a part of a
    secret cannot be known for one."""
    return end if begin == 0 else end.partition(b"\n")[2]


def _run(*command: str, newest: bool = False) -> str:
    """Return the output of a program of the system.

    Raises:
        Missing: the program does not exist here, hangs, or has no output.
    """
    late = threading.Event()

    def end() -> None:
        late.set()
        process.kill()

    with tempfile.TemporaryFile() as complaints:
        try:
            process = subprocess.Popen(  # noqa: S603 - fixed names
                command, stdout=subprocess.PIPE, stderr=complaints
            )
        except FileNotFoundError:
            raise Missing(f"{command[0]} is not here") from None
        except OSError as error:
            raise Missing(f"{command[0]}: {error}") from error
        timer = threading.Timer(_COMMAND_S, end)
        timer.start()
        with process:
            assert process.stdout is not None  # noqa: S101 - for the type checker: it is a pipe
            output = _end_of(process.stdout) if newest else process.stdout.read(MOST_BYTES)
            timer.cancel()
            process.kill()  # what it has yet to say is not wanted
        if late.is_set():
            raise Missing(f"{command[0]}: no end within {_COMMAND_S:g} s")
        if not output.strip():
            complaints.seek(0)
            reason = complaints.read(MOST_BYTES).decode(errors="replace").strip()
            raise Missing(f"{' '.join(command[:2])}: {reason or 'no output'}")
    return output.decode(errors="replace")


def _end_of(stream: IO[bytes]) -> bytes:
    """Return the last whole lines of `stream`, `MOST_BYTES` at most; holds twice as much at most,
    however long it is."""
    end, begin = bytearray(), 0
    while part := stream.read(_PART_BYTES):
        end += part
        if len(end) > 2 * MOST_BYTES - _PART_BYTES:
            begin += len(end) - MOST_BYTES
            del end[:-MOST_BYTES]
    begin += max(0, len(end) - MOST_BYTES)
    return _whole_lines(bytes(end[-MOST_BYTES:]), begin)
