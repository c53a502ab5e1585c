"""`edge-server bench`: its arguments; what it does is imported when it runs."""

from __future__ import annotations

import argparse
from typing import TYPE_CHECKING

from edge_server.cli.running_daemon import add_address_flags
from edge_server.cli.verbs import OK, interval, positive

if TYPE_CHECKING:
    from collections.abc import Callable

_ABOUT = """\
Measures a model of the running daemon over gRPC: percentiles of the latency, throughput by the
number of requests at a time, and where the time goes in the server. Inputs are made up; a model
that takes pictures, or is in an ensemble that does, gets a drawn road through the real
preprocessing. For other loads, inputs and protocols use perf_analyzer.

--sweep starts a daemon of its own on the same model files, loads the model there with other
instance counts, batching delays and backends, and measures each; the running daemon and the
repository stay as they are. Stop the running daemon first: both would share the processors and the
GPU.
"""
_EXAMPLES = """\
examples:
  edge-server bench lane_detection
  edge-server bench laneDetect_model --concurrency 1:4 --json > bench.json
  edge-server bench my_model --batch 8 --shape text:128 --seconds 10
  edge-server bench laneDetect_model --sweep --instances 1,2
  edge-server bench laneDetect_model --sweep --backends onnxruntime,tensorrt

exit codes: 0 done, 1 no request succeeded, or there is no such model, 2 usage, 69 the daemon, the
model or a file cannot be reached, 78 the model takes no such request, 130 interrupted
"""


def add_bench(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of `bench`."""
    parser.description, parser.epilog = _ABOUT, _EXAMPLES
    add = parser.add_argument
    add("model", metavar="MODEL")
    add(
        "--concurrency",
        type=numbers(1),
        default=(1, 2, 4),
        metavar="N,…",
        help="requests at a time, like 1,2,4 or 1:4; default: 1,2,4",
    )
    add("--batch", type=positive, default=1, metavar="N", help="elements of a request; default: 1")
    add("--image", metavar="FILE", help="a picture, in place of a drawn road")
    add(
        "--shape",
        action="append",
        default=[],
        type=_shape,
        metavar="NAME:N,…",
        help="of a made-up input whose shape is open, without the batch; repeatable",
    )
    add(
        "--seconds",
        type=interval,
        default=5.0,
        metavar="S",
        help="of each measurement, after a first request; default: %(default)g",
    )
    add("--json", action="store_true", help="one object")
    sweep = parser.add_argument_group("sweep")
    sweep.add_argument("--sweep", action="store_true", help="measure other settings of the model")
    sweep.add_argument(
        "--instances", type=numbers(1), default=(1, 2), metavar="N,…", help="default: 1,2"
    )
    sweep.add_argument(
        "--delays",
        type=numbers(0),
        default=(0, 1000),
        metavar="US,…",
        help="of a batch, where the model batches, in microseconds; default: 0,1000",
    )
    sweep.add_argument(
        "--backends",
        type=_words,
        metavar="NAME,…",
        help="like onnxruntime,tensorrt; default: the model's",
    )
    sweep.add_argument(
        "--model-repository",
        action="append",
        metavar="DIR",
        help="default: as the settings have it; the shipped models without a settings file",
    )
    add_address_flags(parser)
    parser.set_defaults(verb=_bench)


def numbers(least: int) -> Callable[[str], tuple[int, ...]]:
    """Return a parser of `1,2,4` and `1:4` (from, to), of numbers from `least` on."""

    def parse(text: str) -> tuple[int, ...]:
        try:
            if ":" in text:
                first, last = map(int, text.split(":"))
                found = tuple(range(first, last + 1))
            else:
                found = tuple(map(int, text.split(",")))
        except ValueError:
            found = ()
        if not found or min(found) < least or len(found) > 64:
            raise argparse.ArgumentTypeError(
                f"{text}: give whole numbers, {least} or above, like 1,2,4 or 1:4"
            )
        return tuple(dict.fromkeys(found))

    return parse


def _words(text: str) -> tuple[str, ...]:
    return tuple(dict.fromkeys(filter(None, text.split(","))))


def _shape(text: str) -> tuple[str, tuple[int, ...]]:
    name, _, sizes = text.rpartition(":")
    try:
        shape = tuple(map(int, sizes.split(",")))
    except ValueError:
        shape = (-1,)
    if not name or min(shape) < 0:
        raise argparse.ArgumentTypeError(f"{text}: give it as NAME:720,1280,3")
    return name, shape


def _bench(arguments: argparse.Namespace) -> int:
    from edge_server.cli.bench_run import run_bench

    run_bench(arguments)
    return OK
