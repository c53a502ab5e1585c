"""`edge-server status` and `edge-server top`: their arguments; what they do is imported later."""

from __future__ import annotations

from typing import TYPE_CHECKING

from edge_server.cli.running_daemon import add_address_flags, settings_of
from edge_server.cli.verbs import OK, interval, positive

if TYPE_CHECKING:
    import argparse

_STATUS = """\
Shows what the daemon on this machine does: models with their states and reasons, cameras, lanes,
the broker, the board, plans, the recorder, and whether settings wait for a restart. Rates and times
are those of one second. Changes nothing, and needs no rights but those of a client.
"""
_STATUS_EXAMPLES = """\
examples:
  edge-server status
  edge-server status --json | jq '.models[] | select(.state != "READY")'
  edge-server status --grpc 127.0.0.1:18001 --metrics 127.0.0.1:18002

exit codes: 0 the daemon responds, whatever its state (`edge-server health` judges that), 2 usage,
69 it does not respond, 78 the settings are wrong, 130 interrupted
"""
_TOP = """\
Shows what `status` shows, again and again, until q or Ctrl-C. Without a terminal it prints once in
each interval. A daemon that stops is waited for.
"""
_TOP_EXAMPLES = """\
examples:
  edge-server top
  ssh -t truck-7 edge-server top --interval 1
  edge-server top --count 60 --json > minute.jsonl

exit codes: 0 ended as requested, 2 usage, 69 the daemon did not respond at the start,
78 the settings are wrong
"""


def add_status(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of `status`."""
    _describe(parser, _STATUS, _STATUS_EXAMPLES)
    parser.add_argument("--json", action="store_true", help="one object")
    parser.set_defaults(verb=_status)


def add_top(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of `top`."""
    _describe(parser, _TOP, _TOP_EXAMPLES)
    parser.add_argument(
        "--interval", type=interval, default=2.0, metavar="S", help="default: %(default)g"
    )
    parser.add_argument("--count", type=positive, default=0, metavar="N", help="end after N times")
    parser.add_argument("--json", action="store_true", help="one object on a line each time")
    parser.set_defaults(verb=_top)


def _describe(parser: argparse.ArgumentParser, about: str, examples: str) -> None:
    parser.description, parser.epilog = about, examples
    add_address_flags(parser)


def _status(arguments: argparse.Namespace) -> int:
    from edge_server.cli.status_screen import print_status

    print_status(settings_of(arguments), as_json=arguments.json)
    return OK


def _top(arguments: argparse.Namespace) -> int:
    from edge_server.cli.status_screen import run_top

    settings = settings_of(arguments)
    run_top(settings, arguments.interval, arguments.count, as_json=arguments.json)
    return OK
