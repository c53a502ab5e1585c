"""Tables and numbers as text, for terminals."""

from __future__ import annotations

import io
import json
import sys
import time
from typing import TYPE_CHECKING, Any

from edge_server.process.text import shown

if TYPE_CHECKING:
    import argparse
    from collections.abc import Collection, Iterable, Sequence

UNKNOWN = "-"
# Tables are not cut to the terminal: a name is whole in a pipe too.
_WIDEST = 10_000
REFRESH_S = 0.5
# Frames older than this do not count for the rate that is shown.
_RATE_OVER_S = 3.0


def answer(arguments: argparse.Namespace, value: object, lines: Iterable[str]) -> Iterable[str]:
    """Return `value` as JSON where `--json` asks for it, and `lines` otherwise."""
    return (json.dumps(value, indent=2),) if arguments.json else lines


def table(rows: Sequence[Sequence[str]], *, left: Collection[int] = (0,)) -> list[str]:
    """Return the rows in columns, each in one line, the first row the head; numbers are put to the
    right.

    Args:
        rows: cells, as many in each.
        left: the columns that begin at their left edge.
    """
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    grid = Table.grid(padding=(0, 2, 0, 0))
    for column in range(len(rows[0])):
        grid.add_column(justify="left" if column in left else "right", no_wrap=True)
    for row in rows:
        grid.add_row(*(Text(shown(cell)) for cell in row))
    console = Console(file=io.StringIO(), width=_WIDEST, color_system=None)
    with console.capture() as lines:
        console.print(grid)
    return [line.rstrip() for line in lines.get().splitlines()]


def number(value: float | None, decimals: int = 1) -> str:
    return UNKNOWN if value is None else f"{value:.{decimals}f}"


def size_text(size_bytes: float) -> str:
    """Return a size like `1.5 GiB`."""
    size, units = float(size_bytes), iter(("B", "KiB", "MiB", "GiB"))
    unit = next(units)
    while size >= 1024 and unit != "GiB":
        size, unit = size / 1024, next(units)
    return f"{size:.0f} {unit}" if unit == "B" else f"{size:.1f} {unit}"


def duration_text(seconds: float) -> str:
    """Return a duration in its two largest units, like `2 h 5 min`."""
    left = int(seconds)
    parts: list[str] = []
    for unit, length in (("d", 86400), ("h", 3600), ("min", 60), ("s", 1)):
        count, left = divmod(left, length)
        if count or parts or unit == "s":
            parts.append(f"{count} {unit}")
    return " ".join(parts[:2])


def result_text(message: dict[str, Any]) -> str:
    """Return what a network has found in a frame, in a line."""
    found = [text for text in message["reasons"] if message["status"] == "FRAME_STATUS_INVALID"]
    for each in message.get("detections", ()):
        box, ahead = each["box"], ""
        if "ground" in each:
            ahead = f", {each['ground']['x_m']:.1f} m ahead"
        corners = ",".join(f"{box[name]:.0f}" for name in ("x_min", "y_min", "x_max", "y_max"))
        word = each["label"] or f"class {each['class_id']}"
        found.append(f"{word} {each['confidence']:.2f} at {corners}{ahead}")
    if "segmentation" in message:
        mask = message["segmentation"]
        for number, label in enumerate(mask["labels"]):
            runs = zip(mask["run_classes"], mask["run_lengths"], strict=True)
            cells = sum(length for class_id, length in runs if class_id == number)
            found.append(f"{label} {cells / (mask['columns'] * mask['rows']):.0%}")
    found += [f"{e['label']} {e['confidence']:.2f}" for e in message.get("classes", ())]
    found += [f"{each['name']} {each['shape']}" for each in message.get("tensors", ())]
    head = f"{message['camera']:>8} {message['frame_id']:>8} {message['network']}:"
    # As wide as a row, which it is written over on a terminal.
    return f"{shown(' '.join((head, '; '.join(found) or 'nothing'))):<72}"


class LaneTable:
    """One row that is overwritten on a terminal, and printed repeatedly elsewhere; a line below it
    whenever the camera's state or its reason changes."""

    _FORMAT = "{:>8} {:>8} {:>7} {:>9} {:>9} {:>6} {:>8}  {}"

    def __init__(self) -> None:
        self._terminal = sys.stdout.isatty()
        self._arrivals: list[float] = []
        self._count = 0
        self._printed_at = 0.0
        self._row = ""
        self._printed = ""
        self._word = ""
        head = ("camera", "frames", "fps", "age ms", "infer ms", "lanes", "dropped", "state")
        print(self._FORMAT.format(*head))

    def add(self, message: dict[str, Any]) -> None:
        now = time.monotonic()
        state = message["status"].removeprefix("FRAME_STATUS_").lower()
        if state != "invalid":
            self._count += 1
            self._arrivals = [*self._arrivals[-49:], now]
        recent = [at for at in self._arrivals if now - at < _RATE_OVER_S]
        spanned_s = recent[-1] - recent[0] if recent else 0.0
        fps = (len(recent) - 1) / spanned_s if spanned_s > 0 else 0.0
        self._row = self._FORMAT.format(
            message["camera"],
            self._count,
            f"{fps:.1f}",
            f"{message['time']['age_us'] / 1e3:.1f}",
            f"{message['latency_us'].get('infer', 0) / 1e3:.1f}",
            len(message["lanes"]),
            message["dropped"],
            state,
        )
        # The age varies from frame to frame, and has a column.
        reason = "; ".join(each for each in message["reasons"] if each != "age")
        # A reason begins with its word; the text after it may differ from message to message.
        word = reason.partition(":")[0]
        if word != self._word:
            self._word = word
            self._printed_at = now
            self._print(end="\n")
            print(f"{message['camera']:>8} {state}{f': {reason}' if reason else ''}", flush=True)
        if now - self._printed_at >= (REFRESH_S if self._terminal else 2 * REFRESH_S):
            self._printed_at = now
            self._print(end="\r" if self._terminal else "\n")

    def finish(self) -> None:
        """Keep the last row on the terminal."""
        if self._row != self._printed or self._terminal:
            self._print(end="\n")

    def _print(self, end: str) -> None:
        self._printed = self._row
        print(self._row, end=end, flush=True)
