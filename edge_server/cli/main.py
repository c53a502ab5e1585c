"""The command line: the arguments of each verb, and what becomes of an error.

Nothing heavy is imported here: a verb imports its code when it runs.
"""

from __future__ import annotations

import argparse
import errno
import os
import sys
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

from edge_server import errors
from edge_server.cli.bench import add_bench
from edge_server.cli.calibrate import add_calibrate_verbs
from edge_server.cli.cameras import add_camera_verbs
from edge_server.cli.completion import add_completion
from edge_server.cli.convert import add_convert
from edge_server.cli.doctor import add_doctor
from edge_server.cli.examples import add_examples, verbs_of
from edge_server.cli.flags.parser import add_settings_flags, nearest
from edge_server.cli.health import add_health
from edge_server.cli.infer import add_infer
from edge_server.cli.models import add_verbs
from edge_server.cli.plan import add_verbs as add_plan_verbs
from edge_server.cli.power import add_power
from edge_server.cli.provision import add_provision
from edge_server.cli.recordings import add_recording_verbs
from edge_server.cli.run import broker_of, run, run_check, stop_on_signals
from edge_server.cli.running_daemon import INSTALLED, add_config_flag
from edge_server.cli.status import add_status, add_top
from edge_server.cli.update import add_verbs as add_update_verbs
from edge_server.cli.verbs import INTERRUPTED, OK, positive, report

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

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
        return report(error)
    except KeyboardInterrupt:
        # A verb that could leave something behind has a text that tells what is there.
        if text := getattr(arguments, "interrupted", ""):
            print(text, file=sys.stderr)
        return INTERRUPTED
    except BrokenPipeError:
        # The reader of our output has closed the pipe.
        _discard_output()
        return OK
    except OSError as error:
        if isinstance(error, PermissionError) and error.filename is not None:
            # `Path.exists` and `is_dir` raise it for what lies in a directory that is closed.
            return report(errors.Unavailable(f"{error.filename}: {error.strerror}"))
        if error.errno != errno.ENOSPC:
            raise
        _discard_output()
        return report(errors.EdgeServerError(f"the output cannot be written: {error.strerror}"))
    return code


def command_line() -> argparse.ArgumentParser:
    """Return the parser of all verbs."""
    parser = argparse.ArgumentParser(
        prog="edge-server",
        description="Lane detection appliance: cameras in, lanes out on MQTT and gRPC.",
        epilog=_EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--version", action=_PrintVersion, nargs=0, help="print it and exit")
    verbs = parser.add_subparsers(required=True, metavar="VERB")

    for name, verb, text, about in (
        ("run", run, "the daemon", "Runs the daemon until SIGTERM."),
        (
            "check",
            run_check,
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

    for name, add, text in _VERBS:
        add(verbs.add_parser(name, help=text, allow_abbrev=name not in _WHOLE_FLAGS))

    add_examples(parser)
    for _, each in verbs_of(parser):
        if each.get_default("flags") is None:
            each.set_defaults(flags=_flags_of(each))
    return parser


def _flags_of(verb: argparse.ArgumentParser) -> list[str]:
    """Return the flags of a verb, one of which a typing error may have meant."""
    actions = verb._actions  # noqa: SLF001 - argparse has no other list of them
    return [name for each in actions if each.dest != "help" for name in each.option_strings]


def _discard_output() -> None:
    """Keep the interpreter's last flush from raising, too."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


class _PrintVersion(argparse.Action):
    """argparse's own version action, but with the lookup on demand."""

    def __call__(self, parser: argparse.ArgumentParser, *_: Any) -> NoReturn:
        from importlib.metadata import version

        print(f"edge-server {version('edge-server')}")
        parser.exit()


def _add_support_bundle(parser: argparse.ArgumentParser) -> None:
    parser.description = (
        "Gathers settings, versions, doctor's findings, models, metrics, logs, plans "
        "and the board's state into one archive, without passwords, keys and tokens. The daemon "
        "need not run. Run as root to have the unit's journal and the files of its user."
    )
    add_config_flag(parser)
    parser.add_argument(
        "-o",
        "--output",
        type=Path,
        metavar="FILE",
        help="default: edge-server-support-DEVICE-TIME.tar.gz in this directory",
    )
    parser.add_argument(
        "--anonymous", action="store_true", help="without the names of device and host"
    )
    parser.set_defaults(verb=_support_bundle)


def _support_bundle(arguments: argparse.Namespace) -> int:
    from edge_server.cli.support_bundle import make_bundle

    return make_bundle(arguments)


def _add_demo(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--source",
        default="synthetic://road?seed=7&fps=25",
        metavar="URI",
        help="a video, an image, a folder of images, /dev/video0, rtsp://HOST/PATH, "
        "http://HOST/PATH, csi://0 or gst:PIPELINE (default: a drawn road)",
    )
    parser.add_argument(
        "--frames", type=positive, default=0, metavar="N", help="end after N frames"
    )
    parser.add_argument(
        "--mqtt", metavar="HOST[:PORT]", help="publish there, not on a private broker"
    )
    parser.add_argument(
        "--calibration", metavar="FILE", help="of edge-server calibrate: lanes in metres, tracked"
    )
    parser.add_argument(
        "--video",
        metavar="FILE",
        help="write what is published, drawn into the frames, as .mp4 or .avi",
    )
    parser.add_argument("--json", action="store_true", help="one JSON object per frame")
    parser.add_argument(
        "--serve",
        nargs="?",
        type=positive,
        const=8000,
        metavar="PORT",
        help="go on until Ctrl-C, with the page at this port (8000)",
    )
    parser.add_argument(
        "--model-repository",
        action="append",
        metavar="DIR",
        help="models in Triton's layout, not the shipped ones; repeatable",
    )
    parser.set_defaults(verb=_demo)


def _demo(arguments: argparse.Namespace) -> int:
    stop = stop_on_signals()
    broker = broker_of(arguments)
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


_VERBS: tuple[tuple[str, Callable[[argparse.ArgumentParser], None], str], ...] = (
    ("models", add_verbs, "deliver, list, verify and sign models"),
    ("plan", add_plan_verbs, "build, inspect and verify TensorRT plans"),
    ("convert", add_convert, "make a model's directory of a file of another framework"),
    ("cameras", add_camera_verbs, "which cameras are there, what one gives"),
    ("recordings", add_recording_verbs, "what the recorder has written, and pictures of it"),
    ("power", add_power, "a Jetson's power mode and clocks"),
    ("calibrate", add_calibrate_verbs, "put a camera's lanes on the road, in metres"),
    ("doctor", add_doctor, "what is wrong with this machine, and the remedies"),
    (
        "support-bundle",
        _add_support_bundle,
        "one archive that a vendor can be sent, without secrets",
    ),
    ("health", add_health, "whether the daemon serves what is required"),
    ("status", add_status, "what the daemon does now"),
    ("top", add_top, "likewise, again and again"),
    ("infer", add_infer, "one request to a model, with a picture or arrays"),
    ("bench", add_bench, "how fast a model is, also with other settings"),
    ("update", add_update_verbs, "slots, trial and verdict of an image update"),
    ("provision", add_provision, "id, broker and keys, from a file"),
    (
        "completion",
        partial(add_completion, command_line=command_line),
        "what a shell completes after edge-server",
    ),
    ("demo", _add_demo, "show lanes arriving, with no camera or broker needed"),
)
# Verbs that take no abbreviated flag.
_WHOLE_FLAGS = ("convert", "support-bundle", "health", "status", "top", "infer", "bench")
