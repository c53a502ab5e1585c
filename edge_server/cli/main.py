"""The command line: the arguments of each verb, and the exit codes.

Nothing heavy is imported here: a verb imports its code when it runs.
"""

from __future__ import annotations

import argparse
import errno
import logging
import os
import pwd
import signal
import sys
import threading
from pathlib import Path
from queue import SimpleQueue
from typing import TYPE_CHECKING, Any, NoReturn

from edge_server import errors
from edge_server.cli.bench.verb import add_bench
from edge_server.cli.calibrate.verbs import add_calibrate_verbs
from edge_server.cli.cameras.verbs import add_camera_verbs
from edge_server.cli.completion import add_completion
from edge_server.cli.convert.verb import add_convert
from edge_server.cli.doctor import add_doctor
from edge_server.cli.examples import add_examples
from edge_server.cli.flags.parser import add_settings_flags, choose, nearest
from edge_server.cli.flags.values import address
from edge_server.cli.health import add_health
from edge_server.cli.infer.verb import add_infer
from edge_server.cli.models.verbs import add_verbs
from edge_server.cli.plan.verbs import add_verbs as add_plan_verbs
from edge_server.cli.power import add_power
from edge_server.cli.provision.verb import add_provision
from edge_server.cli.recordings import add_recording_verbs
from edge_server.cli.running_daemon import INSTALLED
from edge_server.cli.status.verbs import add_status, add_top
from edge_server.cli.update import add_verbs as add_update_verbs
from edge_server.cli.verbs import positive
from edge_server.process.logs import (
    end_logging,
    journal_prefix,
    logs_fields,
    logs_json,
    set_up_logging,
)
from edge_server.process.masking import masked
from edge_server.process.utf8 import shown

if TYPE_CHECKING:
    from collections.abc import Sequence

    from edge_server.settings import Settings

log = logging.getLogger(__name__)

OK = 0
FAILED = 1
USAGE = 2
UNAVAILABLE = 69
ALREADY_RUNNING = 75
CONFIGURATION = 78
DEVICE_LOST = 86
RESTART_ME = 87
INTERRUPTED = 130

# systemd does not restart a process that ended with 2 or 78: those codes are for permanent errors.
# Temporary errors have one of the others. An error class that is missing has its parent's code.
EXIT_CODES: dict[type[BaseException], int] = {
    errors.SettingsError: CONFIGURATION,
    errors.InvalidRequest: CONFIGURATION,
    errors.ModelConfigError: CONFIGURATION,
    errors.ModelLoadError: UNAVAILABLE,
    errors.SourceError: UNAVAILABLE,
    errors.SourceUriError: CONFIGURATION,
    errors.Unavailable: UNAVAILABLE,
    errors.Unsupported: CONFIGURATION,
    errors.AlreadyRunning: ALREADY_RUNNING,
    errors.DeviceLost: DEVICE_LOST,
    errors.StageStuck: RESTART_ME,
    errors.EdgeServerError: FAILED,
}

EXIT_CODE_MEANINGS = {
    OK: "ended as requested, also by SIGTERM",
    FAILED: "failed",
    USAGE: "usage: a verb, flag or argument that is unknown or missing",
    UNAVAILABLE: "something required is unavailable and may come: a taken port, a repository or "
    "another place that is not mounted yet, an unreadable recording, a model that did not load "
    "this time though its files are not known to be wrong (a Python model's `initialize` raised, "
    "no memory, no GPU yet, a full disk)",
    ALREADY_RUNNING: "another daemon holds the Unix socket, or the copies of models",
    CONFIGURATION: "the configuration, a flag's value or a model's files are wrong and stay so; "
    "the text names file, key and remedy",
    DEVICE_LOST: "a GPU is lost (a CUDA error that stays): restart me",
    RESTART_ME: "a part of the daemon hung: restart me",
    INTERRUPTED: "interrupted by SIGINT before the verb ended",
}

_EPILOG = """\
examples:
  edge-server demo --frames 100
  edge-server check --config /etc/edge_server/config.toml
  edge-server status
  edge-server VERB --help

exit codes: 0 ended as requested, 1 failed, 2 usage, 69 something is unavailable,
75 another daemon holds the socket or the copies of models,
78 settings or files of a model are wrong and stay so, 86 a GPU is lost: restart me,
87 a stage hung: restart me"""


def run_command(argv: Sequence[str]) -> int:
    """Run one verb; return the exit code. Our errors print one line, without a traceback."""
    parser = command_line()
    arguments, unknown = parser.parse_known_args(argv)
    if unknown:
        parser.error(nearest(unknown, arguments.flags))
    try:
        code: int = arguments.verb(arguments)
    except errors.EdgeServerError as error:
        return _report(error)
    except KeyboardInterrupt:
        # While a verb imports what it needs; later ones say what they leave.
        return INTERRUPTED
    except BrokenPipeError:
        # The reader of our output has closed the pipe.
        _discard_output()
        return OK
    except OSError as error:
        if error.errno != errno.ENOSPC:
            raise
        _discard_output()
        return _report(errors.EdgeServerError(f"the output cannot be written: {error.strerror}"))
    return code


def _discard_output() -> None:
    """Keep the interpreter's last flush from raising, too."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def _report(error: errors.EdgeServerError) -> int:
    """Print `error`, or log it where programs read the log; return its exit code."""
    prefix = journal_prefix(logging.ERROR)
    for line in masked(str(error)).splitlines():
        if logs_json() or logs_fields():
            log.error("%s", line, extra={"error_classes": _class_names(error)})
        else:
            print(f"{prefix}edge-server: {shown(line)}", file=sys.stderr, flush=True)
    return next(EXIT_CODES[kind] for kind in type(error).__mro__ if kind in EXIT_CODES)


def _class_names(error: errors.EdgeServerError) -> list[str]:
    return [kind.__name__ for kind in type(error).__mro__]


def command_line() -> argparse.ArgumentParser:
    """Return the parser of all verbs."""
    parser = argparse.ArgumentParser(
        prog="edge-server",
        description="Lane detection appliance: cameras in, lanes out on MQTT and gRPC.",
        epilog=_EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--version", action=_Version, nargs=0, help="print it and exit")
    verbs = parser.add_subparsers(required=True, metavar="VERB")

    for name, verb, text, about in (
        ("run", _run, "the daemon", "Runs the daemon until SIGTERM."),
        (
            "check",
            _check,
            "validate settings and model repository, start nothing",
            "Looks for what `run` would trip over with the same flags, and starts nothing. Without "
            f"any flag it takes the settings of the installed service, {INSTALLED}.",
        ),
    ):
        each = verbs.add_parser(
            name,
            help=text,
            description=about,
            usage=f"edge-server {name} [FLAG ...]",
            allow_abbrev=False,
            add_help=False,
        )
        add_settings_flags(each, name)
        each.set_defaults(verb=verb)

    add_verbs(verbs.add_parser("models", help="deliver, list, verify and sign models"))
    add_plan_verbs(verbs.add_parser("plan", help="build, inspect and verify TensorRT plans"))

    convert = "make a model's directory of a file of another framework"
    add_convert(verbs.add_parser("convert", help=convert, allow_abbrev=False))

    add_camera_verbs(verbs.add_parser("cameras", help="which cameras are there, what one gives"))

    add_recording_verbs(
        verbs.add_parser("recordings", help="what the recorder has written, and pictures of it")
    )

    add_power(verbs.add_parser("power", help="a Jetson's power mode and clocks"))

    add_calibrate_verbs(
        verbs.add_parser("calibrate", help="put a camera's lanes on the road, in metres")
    )

    add_doctor(verbs.add_parser("doctor", help="what is wrong with this machine, and the remedies"))

    bundle = verbs.add_parser(
        "support-bundle",
        help="one archive that a vendor can be sent, without secrets",
        description="Gathers settings, versions, doctor's findings, models, metrics, logs, plans "
        "and the board's state into one archive, without passwords, keys and tokens. The daemon "
        "need not run. Run as root to have the unit's journal and the files of its user.",
        allow_abbrev=False,
    )
    bundle.add_argument(
        "--config",
        type=Path,
        metavar="FILE",
        help="the daemon's settings; default: /etc/edge_server/config.toml, where it is there",
    )
    bundle.add_argument(
        "-o",
        "--output",
        type=Path,
        metavar="FILE",
        help="default: edge-server-support-DEVICE-TIME.tar.gz in this directory",
    )
    bundle.add_argument(
        "--anonymous", action="store_true", help="without the names of device and host"
    )
    bundle.set_defaults(verb=_support_bundle, flags=("--config", "-o", "--output", "--anonymous"))

    health = "whether the daemon serves what is required"
    add_health(verbs.add_parser("health", help=health, allow_abbrev=False))

    add_status(verbs.add_parser("status", help="what the daemon does now", allow_abbrev=False))
    add_top(verbs.add_parser("top", help="likewise, again and again", allow_abbrev=False))

    infer = "one request to a model, with a picture or arrays"
    add_infer(verbs.add_parser("infer", help=infer, allow_abbrev=False))

    bench = "how fast a model is, and with which settings it would be fastest"
    add_bench(verbs.add_parser("bench", help=bench, allow_abbrev=False))

    add_update_verbs(verbs.add_parser("update", help="slots, trial and verdict of an image update"))
    add_provision(verbs.add_parser("provision", help="id, broker and keys, from a stick or broker"))

    shells = "what a shell completes after edge-server"
    add_completion(verbs.add_parser("completion", help=shells), command_line)

    demo = verbs.add_parser("demo", help="show lanes arriving, with no camera or broker needed")
    demo.add_argument(
        "--source",
        default="synthetic://road?seed=7&fps=25",
        metavar="URI",
        help="a video, an image, a folder of images, /dev/video0, rtsp://HOST/PATH, "
        "http://HOST/PATH, csi://0 or gst:PIPELINE (default: a drawn road)",
    )
    demo.add_argument("--frames", type=positive, default=0, metavar="N", help="end after N frames")
    demo.add_argument(
        "--mqtt", metavar="HOST[:PORT]", help="publish there, not on a private broker"
    )
    demo.add_argument(
        "--calibration", metavar="FILE", help="of edge-server calibrate: lanes in metres, tracked"
    )
    demo.add_argument(
        "--video",
        metavar="FILE",
        help="write what is published, drawn into the frames, as .mp4 or .avi",
    )
    demo.add_argument("--json", action="store_true", help="one JSON object per frame")
    demo.add_argument(
        "--serve",
        nargs="?",
        type=positive,
        const=8000,
        metavar="PORT",
        help="go on until Ctrl-C, with the page at this port (8000)",
    )
    demo.add_argument(
        "--model-repository",
        action="append",
        metavar="DIR",
        help="models in Triton's layout, not the shipped ones; repeatable",
    )
    demo.set_defaults(
        verb=_demo,
        flags=(
            *("--source", "--frames", "--mqtt", "--calibration", "--video", "--json", "--serve"),
            "--model-repository",
        ),
    )
    add_examples(parser)
    return parser


class _Version(argparse.Action):
    """argparse's own version action, but with the lookup on demand."""

    def __call__(self, parser: argparse.ArgumentParser, *_: Any) -> NoReturn:
        from importlib.metadata import version

        print(f"edge-server {version('edge-server')}")
        parser.exit()


def _settings(arguments: argparse.Namespace) -> tuple[Settings, list[str]]:
    """Return the settings, and the lines to log about them."""
    from edge_server.settings import read_settings

    chosen = choose({name: values for name, values in vars(arguments).items() if values})
    if arguments.camera:
        chosen.overrides["cameras"] = _cameras(arguments.camera)
    if broker := _broker(arguments):
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


def _broker(arguments: argparse.Namespace) -> dict[str, Any] | None:
    """Return the host and the port of --mqtt; None without the flag."""
    if arguments.mqtt is None:
        return None
    try:
        return address(arguments.mqtt)
    except ValueError as error:
        raise errors.SettingsError(f"--mqtt {arguments.mqtt}: {error}") from None


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


def _stop_on_signals() -> threading.Event:
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


def _reload_on_signal() -> threading.Event:
    """Return an event that SIGHUP sets."""
    requested = threading.Event()
    # Without a function of Python's around it: signals in quick succession would interrupt that
    # function at its first line, again and again, until the stack is full. The second argument, the
    # frame, takes the place of `block`, which has no effect.
    signal.signal(signal.SIGHUP, _setting(requested).put)  # type: ignore[arg-type]
    return requested


def _run(arguments: argparse.Namespace) -> NoReturn:
    stop = _stop_on_signals()
    # Without a file nothing can be read again: a closed terminal ends the daemon.
    reload_requested = None if arguments.config is None else _reload_on_signal()
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
        code = _report(error)
    daemon.stop()
    end_logging()
    # A thread that hangs in a model or a driver would keep the interpreter from exiting.
    os._exit(code)


def choose_file(
    arguments: argparse.Namespace, installed: Path = INSTALLED, user: str = "edge-server"
) -> str:
    """Have `check` without a flag take the settings of the service; return what it then checks."""
    flags = [name for name, value in vars(arguments).items() if value and name != "config"]
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


def _check(arguments: argparse.Namespace) -> int:
    from edge_server.cli.check import check, unseen_by_service

    what = choose_file(arguments)
    settings, notes = _settings(arguments)
    # The error itself reports the fault; the log would repeat it.
    logging.getLogger().setLevel(logging.CRITICAL)
    findings = check(settings)
    if arguments.config == INSTALLED:
        findings.well += unseen_by_service(settings)
    for line in (what, *findings.well, *(f"note: {note}" for note in notes)):
        print(line, flush=True)
    code = OK
    if findings.unavailable:
        code = _report(errors.Unavailable("\n".join(findings.unavailable)))
    if findings.faults:
        code = _report(errors.SettingsError("\n".join(findings.faults)))
    return code


def _support_bundle(arguments: argparse.Namespace) -> int:
    from edge_server.cli.support_bundle.bundle import make_bundle

    try:
        return make_bundle(arguments)
    except KeyboardInterrupt:
        return INTERRUPTED


def _demo(arguments: argparse.Namespace) -> int:
    stop = _stop_on_signals()
    broker = _broker(arguments)
    from edge_server.cli.demo import run_demo

    run_demo(
        arguments.source,
        stop,
        frames=arguments.frames,
        broker=broker,
        repositories=arguments.model_repository,
        as_json=arguments.json,
        page_port=arguments.serve,
        calibration=arguments.calibration,
        video=arguments.video,
    )
    return OK
