"""Prints reports of the daemon: one, or one in each interval, redrawn in place on a terminal."""

from __future__ import annotations

import json
import os
import select
import shutil
import signal
import sys
import termios
import time
import tty
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import asdict
from typing import TYPE_CHECKING, TextIO

from edge_server.board.board import read_board
from edge_server.cli.status.report import make_report
from edge_server.cli.status.sample import DaemonSampler
from edge_server.cli.status.screen import FAULT, PLAIN, screen
from edge_server.errors import Unavailable
from edge_server.process.utf8 import shown

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from edge_server.settings import Settings

# Rates of `status` are measured over this time: a camera of 5 fps gives some frames in it.
RATES_OVER_S = 1.0
# xterm's control sequences, which every terminal of today and tmux know.
_ENTER = "\x1b[?1049h\x1b[?25l"  # the alternate screen, without a cursor
_LEAVE = "\x1b[?25h\x1b[?1049l"
_HOME, _END_OF_LINE, _REST = "\x1b[H", "\x1b[K", "\x1b[J"
_QUIT = (b"q", b"Q", b"\x03", b"\x04", b"")


def print_status(settings: Settings, *, as_json: bool) -> None:
    """Print one report.

    Raises:
        Unavailable: the daemon does not respond.
    """
    with DaemonSampler(settings) as sampler:
        before = sampler.sample()
        time.sleep(RATES_OVER_S)
        report = make_report(before, sampler.sample(), settings, read_board())
    if as_json:
        print(json.dumps(asdict(report), indent=2))
    else:
        print(_printable("\n".join(screen(report))))


def run_top(settings: Settings, interval_s: float, count: int, *, as_json: bool) -> None:
    """Print reports until the user quits, or `count` were printed; 0 is unlimited.

    Raises:
        Unavailable: the daemon does not respond to the first call.
    """
    with ExitStack() as stack:
        # Ctrl-C quits, and the terminal is as before also after a SIGTERM.
        stack.enter_context(suppress(KeyboardInterrupt))
        signal.signal(signal.SIGTERM, signal.default_int_handler)
        sampler = stack.enter_context(DaemonSampler(settings))
        before = sampler.sample()
        on_terminal = sys.stdout.isatty() and not as_json and os.environ.get("TERM") != "dumb"
        quits = stack.enter_context(_keys(sys.stdin))
        if on_terminal:
            stack.enter_context(_alternate_screen(sys.stdout))
            _draw(["waiting for the first interval …"])
        printed = 0
        while not quits(interval_s):
            try:
                now = sampler.sample()
            except Unavailable as error:
                lines = [f"{FAULT} {shown(line)}" for line in str(error).splitlines()]
                text = json.dumps({"faults": str(error).splitlines()})
            else:
                report = make_report(before, now, settings, read_board())
                before, lines, text = now, screen(report), json.dumps(asdict(report))
            if on_terminal:
                _draw(lines)
            else:
                plain = _printable("\n".join([time.strftime("%H:%M:%S"), *lines, ""]))
                print(text if as_json else plain)
                sys.stdout.flush()
            printed += 1
            if printed == count:
                return


def _draw(lines: Sequence[str]) -> None:
    """Write over the lines before, within the terminal as it is now."""
    width, height = shutil.get_terminal_size()
    title = f"edge-server top  {time.strftime('%H:%M:%S')}  q quits"
    fitted = [_printable(line)[: width - 1] for line in (title, "", *lines)][:height]
    sys.stdout.write(_HOME + "\n".join(line + _END_OF_LINE for line in fitted) + _REST)
    sys.stdout.flush()


def _printable(text: str) -> str:
    encoding = sys.stdout.encoding or "ascii"
    if encoding.lower().startswith("utf"):
        return text
    return text.translate(PLAIN).encode(encoding, "replace").decode(encoding)


@contextmanager
def _alternate_screen(output: TextIO) -> Iterator[None]:
    output.write(_ENTER)
    try:
        yield
    finally:
        output.write(_LEAVE)
        output.flush()


@contextmanager
def _keys(keyboard: TextIO) -> Iterator[Callable[[float], bool]]:
    """Yield a function that waits for so many seconds, or until the user quits; it returns whether
    the user did. Without a terminal it only waits."""
    if not keyboard.isatty():
        yield _wait
        return
    descriptor = keyboard.fileno()
    before = termios.tcgetattr(descriptor)

    def wait_for_key(seconds: float) -> bool:
        end_s = time.monotonic() + seconds
        while (left_s := end_s - time.monotonic()) > 0:
            ready, _, _ = select.select([descriptor], [], [], left_s)
            if ready and os.read(descriptor, 1) in _QUIT:
                return True
        return False

    try:
        tty.setcbreak(descriptor)
        yield wait_for_key
    finally:
        termios.tcsetattr(descriptor, termios.TCSADRAIN, before)


def _wait(seconds: float) -> bool:
    time.sleep(seconds)
    return False
