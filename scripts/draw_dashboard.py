"""Draw examples/observability/dashboard.json from a Prometheus that answers, as a PNG.

python scripts/draw_dashboard.py --prometheus http://127.0.0.1:9090 --minutes 5 dashboard.png

Not Grafana's drawing: its panels, queries, titles and legends, laid out as it would.
"""

from __future__ import annotations

import argparse
import json
import math
import time
import urllib.parse
import urllib.request
from pathlib import Path
from typing import Any

import cv2
import numpy as np

DASHBOARD = Path(__file__).parents[1] / "examples/observability/dashboard.json"
CELL_W, CELL_H, GAP = 66, 38, 4
BACK, PANEL, TEXT, GREEN, RED = (
    (24, 20, 17),
    (38, 32, 28),
    (205, 200, 195),
    (90, 150, 60),
    (70, 70, 200),
)
COLOURS = [
    (103, 189, 115),
    (80, 175, 236),
    (224, 130, 87),
    (94, 94, 235),
    (200, 120, 180),
    (190, 190, 90),
]


def ask(
    url: str, query: str, minutes: float
) -> list[tuple[dict[str, str], list[tuple[float, float]]]]:
    end = time.time()
    fields = {"query": query, "start": end - 60 * minutes, "end": end, "step": minutes * 60 / 150}
    with urllib.request.urlopen(  # noqa: S310 - a Prometheus that the caller names
        f"{url}/api/v1/query_range?{urllib.parse.urlencode(fields)}", timeout=30
    ) as answer:
        found = json.load(answer)["data"]["result"]
    return [
        (
            each["metric"],
            [(at, value) for at, text in each["values"] if math.isfinite(value := float(text))],
        )
        for each in found
    ]


def legend(form: str, labels: dict[str, str]) -> str:
    for name, value in labels.items():
        form = form.replace("{{" + name + "}}", value)
    return form


def write(
    image: Any, text: str, at: tuple[int, int], colour: Any = TEXT, *, size: float = 0.4
) -> None:
    cv2.putText(image, text, at, cv2.FONT_HERSHEY_SIMPLEX, size, colour, 1, cv2.LINE_AA)


def draw(
    image: Any,
    panel: dict[str, Any],
    series: list[tuple[str, list[tuple[float, float]]]],
    span: tuple[float, float],
) -> None:
    place = panel["gridPos"]
    x, y = place["x"] * CELL_W + GAP, place["y"] * CELL_H + GAP
    w, h = place["w"] * CELL_W - 2 * GAP, place["h"] * CELL_H - 2 * GAP
    if panel["type"] == "row":
        write(image, panel["title"], (x + 2, y + h - 8), size=0.5)
        return
    cv2.rectangle(image, (x, y), (x + w, y + h), PANEL, -1)
    write(image, f"{panel['title']}  [{panel['fieldConfig']['defaults']['unit']}]", (x + 8, y + 16))
    if panel["type"] == "stat":
        for number, (name, values) in enumerate(series[:4]):
            top = y + 26 + number * (h - 32) // max(1, len(series[:4]))
            good = bool(values) and values[-1][1] >= 1
            low = top + (h - 36) // max(1, len(series[:4]))
            cv2.rectangle(image, (x + 6, top), (x + w - 6, low), GREEN if good else RED, -1)
            write(image, f"{name}: {values[-1][1]:g}" if values else name, (x + 14, top + 18))
        return
    points = [value for _, values in series for _, value in values]
    if not points:
        write(image, "No data", (x + w // 2 - 30, y + h // 2))
        return
    low, high = min(0.0, *points), max(points) or 1.0
    left, right, top, bottom = x + 62, x + w - 8, y + 28, y + h - 36
    for share in (0.0, 0.5, 1.0):
        at = round(bottom - share * (bottom - top))
        cv2.line(image, (left, at), (right, at), (60, 54, 48), 1)
        write(image, f"{low + share * (high - low):.3g}", (x + 6, at + 4), size=0.35)
    for number, (name, values) in enumerate(series):
        colour = COLOURS[number % len(COLOURS)]
        line = [
            (
                left + (at - span[0]) / (span[1] - span[0]) * (right - left),
                bottom - (v - low) / ((high - low) or 1) * (bottom - top),
            )
            for at, v in values
        ]
        cv2.polylines(image, [np.array(line, np.int32)], False, colour, 1, cv2.LINE_AA)
        if number < 6:
            at = x + 8 + number % 3 * (w // 3), y + h - 20 + number // 3 * 13
            write(image, name[:26], at, colour, size=0.35)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, allow_abbrev=False)
    parser.add_argument("--prometheus", default="http://127.0.0.1:9090")
    parser.add_argument("--minutes", type=float, default=60.0)
    parser.add_argument("png", type=Path)
    arguments = parser.parse_args()
    panels = json.loads(DASHBOARD.read_text())["panels"]
    rows = max(each["gridPos"]["y"] + each["gridPos"]["h"] for each in panels)
    image = np.full((rows * CELL_H, 24 * CELL_W, 3), BACK, np.uint8)
    now = time.time()
    for panel in panels:
        series = [
            (legend(target["legendFormat"], labels), values)
            for target in panel.get("targets", ())
            for labels, values in ask(
                arguments.prometheus, target["expr"].replace("$instance", ".*"), arguments.minutes
            )
        ]
        draw(image, panel, series, (now - 60 * arguments.minutes, now))
    cv2.imwrite(str(arguments.png), image)


if __name__ == "__main__":
    main()
