"""`edge-server run`, `check` and `demo`: the settings of a command line, and signals; and how other
verbs reach the daemon that runs on this machine.

Nothing heavy is imported before the signals are handled.
"""

from __future__ import annotations

import logging
import os
import pwd
import signal
import threading
from contextlib import contextmanager
from pathlib import Path
from queue import SimpleQueue
from typing import TYPE_CHECKING, Any, NoReturn

from edge_server import errors
from edge_server.cli.flags import choose
from edge_server.cli.flags.values import address
from edge_server.cli.verbs import OK, report
from edge_server.process.logs import end_logging, set_up_logging
from edge_server.process.text import shown

if TYPE_CHECKING:
    import argparse
    from collections.abc import Iterator, Sequence

    from edge_server.api.grpc.client import DaemonClient
    from edge_server.settings import Settings

log = logging.getLogger(__name__)

INSTALLED = Path("/etc/edge_server/config.toml")
REMEDY = (
    "is the daemon running? `systemctl status edge-server` says why it is not; --config FILE names "
    "the settings of another one, --grpc and --metrics its addresses"
)


def _settings(arguments: argparse.Namespace) -> tuple[Settings, list[str]]:
    """Return the settings, and the lines to log about them."""
    from edge_server.settings import read_settings

    chosen = choose({name: values for name, values in vars(arguments).items() if values})
    if arguments.camera:
        chosen.overrides["cameras"] = _cameras(arguments.camera)
    if broker := broker_of(arguments):
        chosen.overrides["mqtt"] = broker
    settings = read_settings(arguments.config, chosen.overrides)
    return settings, chosen.notes + settings.without_effect()


def _cameras(texts: Sequence[str]) -> dict[str, dict[str, str]]:
    # Needed for a camera on the command line alone.
    from edge_server.cameras.source_uri import masked_uri

    cameras: dict[str, dict[str, str]] = {}
    for text in texts:
        name, equals, uri = text.partition("=")
        if not equals or "://" in name:
            raise errors.SettingsError(
                f"--camera {masked_uri(text)}: give it as NAME=URI, like front=road.mp4"
            )
        if name in cameras:
            raise errors.SettingsError(
                f"--camera {name}={masked_uri(uri)}: camera '{name}' is given twice"
            )
        cameras[name] = {"uri": uri}
    return cameras


def broker_of(arguments: argparse.Namespace) -> dict[str, Any] | None:
    """Return the host and the port of --mqtt; None without the flag."""
    return None if arguments.mqtt is None else _tcp("--mqtt", arguments.mqtt)


def _setting(event: threading.Event) -> SimpleQueue[int]:
    """Return a queue that sets `event` at each item.

    A signal interrupts the main thread anywhere: while it holds the event's lock, or runs the
    handler of an earlier signal; and the system may refuse another thread by then.
    `SimpleQueue.put` is safe at all these points.
    """
    requests: SimpleQueue[int] = SimpleQueue()

    def pass_on() -> None:
        while True:
            requests.get()
            event.set()

    threading.Thread(target=pass_on, name="signals", daemon=True).start()
    return requests


def stop_on_signals() -> threading.Event:
    """Return an event that the first SIGTERM or SIGINT sets; a second one ends the process."""
    stop = threading.Event()
    requests = _setting(stop)
    numbers = (signal.SIGINT, signal.SIGTERM)

    def request_stop(*_: Any) -> None:
        for number in numbers:
            signal.signal(number, signal.SIG_DFL)
        requests.put(0)

    for number in numbers:
        signal.signal(number, request_stop)
    return stop


def reload_on_signal() -> threading.Event:
    """Return an event that SIGHUP sets."""
    requested = threading.Event()
    # Without a function of Python's around it: signals in quick succession would interrupt that
    # function at its first line, again and again, until the stack is full. The second argument, the
    # frame, takes the place of `block`, which has no effect.
    signal.signal(signal.SIGHUP, _setting(requested).put)  # type: ignore[arg-type]
    return requested


def run(arguments: argparse.Namespace) -> NoReturn:
    """Run the daemon until a signal, or an error, ends it; then end this process."""
    stop = stop_on_signals()
    # Without a file nothing can be read again: a closed terminal ends the daemon.
    reload_requested = None if arguments.config is None else reload_on_signal()
    from edge_server.settings import LogSection

    # Until the settings say otherwise: a mistake in them shall reach the journal with its fields.
    set_up_logging(LogSection())
    settings, notes = _settings(arguments)
    log_switches = set_up_logging(settings.log)
    for note in notes:
        log.warning("%s", note)

    from edge_server.daemon.daemon import Daemon

    daemon = Daemon(
        settings,
        log_switches=log_switches,
        read_settings=lambda: _settings(arguments)[0],
        reload_requested=reload_requested,
    )
    daemon.start(stop)
    code = OK
    try:
        daemon.run(stop)
    except errors.EdgeServerError as error:
        code = report(error)
    daemon.stop()
    end_logging()
    # A thread that hangs in a model or a driver would keep the interpreter from exiting.
    os._exit(code)


def demo(arguments: argparse.Namespace) -> None:
    """Show lanes until a signal, or the end of the source."""
    stop = stop_on_signals()
    broker = broker_of(arguments)
    from edge_server.cli.demo import run_demo

    run_demo(arguments, stop, broker)


def choose_file(
    arguments: argparse.Namespace, installed: Path = INSTALLED, user: str = "edge-server"
) -> str:
    """Have `check` without a flag take the settings of the service; return what it then checks."""
    others = {"config", "strict"}
    flags = [name for name, value in vars(arguments).items() if value and name not in others]
    if arguments.config is None and not set(flags) - {"verb", "flags"} and installed.is_file():
        arguments.config = installed
    if arguments.config is not None:
        as_service = _as_service(user) if arguments.config == installed else ""
        return f"settings: {shown(str(arguments.config))}{as_service}"
    if installed.is_file():
        return f"settings: the flags alone; those of the service: --config {installed}"
    return "settings: the flags and the defaults; --config names a file"


def _as_service(user: str) -> str:
    """Say that the files which the settings name are read with other rights than the service's."""
    try:
        is_service = pwd.getpwnam(user).pw_uid == os.geteuid()
    except KeyError:  # no service is installed
        return ""
    command = f"sudo -u {user} edge-server check"
    return "" if is_service else f"; with your rights, with those of the service: {command}"


def run_check(arguments: argparse.Namespace) -> int:
    """Print what `check` finds; return the exit code."""
    from edge_server.cli.check import check, unseen_by_service

    what = choose_file(arguments)
    settings, notes = _settings(arguments)
    # The error itself reports the fault; the log would repeat it.
    logging.getLogger().setLevel(logging.CRITICAL)
    findings = check(settings)
    if arguments.config == INSTALLED:
        findings.well += unseen_by_service(settings)
    lines = [what, *findings.well]
    if arguments.strict:
        findings.faults += [*findings.no_effects, *notes]
    else:
        lines += [f"warning: {line}" for line in findings.no_effects]
        lines += [f"note: {note}" for note in notes]
    for line in lines:
        print(line, flush=True)
    code = OK
    if findings.unavailable:
        code = report(errors.Unavailable("\n".join(findings.unavailable)))
    if findings.faults:
        code = report(errors.SettingsError("\n".join(findings.faults)))
    return code


def settings_of(arguments: argparse.Namespace) -> Settings:
    """Return the settings of the running daemon, with the addresses of the flags."""
    from msgspec.structs import replace

    from edge_server.settings import Grpc, Metrics, read_settings

    config = arguments.config or (INSTALLED if INSTALLED.is_file() else None)
    settings = read_settings(config, {})
    # Neither certificate nor header of the settings belongs to another address.
    if given := getattr(arguments, "grpc", None):
        if "/" in given:
            settings = replace(settings, grpc=Grpc(socket=given))
        else:
            grpc = Grpc(**_tcp("--grpc", given), insecure=True, control="off")
            settings = replace(settings, grpc=grpc)
    if given := getattr(arguments, "metrics", None):
        settings = replace(settings, metrics=Metrics(**_tcp("--metrics", given), insecure=True))
    return settings


def _tcp(flag: str, given: str) -> dict[str, Any]:
    try:
        return address(given)
    except ValueError as error:
        raise errors.SettingsError(f"{flag} {given}: {error}") from None


@contextmanager
def connected(settings: Settings) -> Iterator[DaemonClient]:
    """Yield a client of the daemon, which has responded to a first call."""
    from edge_server.api.grpc.client import DaemonClient

    with DaemonClient(settings.grpc) as client:
        try:
            client.server()
        except (errors.Unavailable, errors.DeadlineExceeded) as error:
            raise errors.Unavailable(f"gRPC at {client.target}: {error}; {REMEDY}") from error
        yield client
