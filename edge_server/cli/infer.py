"""`edge-server infer`: its arguments; what it does is imported when it runs."""

from __future__ import annotations

import argparse
from pathlib import Path

from edge_server.cli.running_daemon import add_address_flags, settings_of
from edge_server.cli.verbs import OK, positive

_ABOUT = """\
Sends one request to a model of the running daemon, over gRPC, and prints the outputs. A picture
goes through the daemon's own preprocessing: where MODEL takes none, through the steps before it in
the ensemble that it is a member of. Lanes are drawn into the picture.
"""
_EXAMPLES = """\
examples:
  edge-server infer lane_detection --image road.jpg --save lanes.png
  edge-server infer laneDetect_model --image 'synthetic://road?seed=7'
  edge-server infer classifier --image cat.png --classes 3
  edge-server infer my_model --input x=x.npy --input mask=mask.npy --save outputs.npz
  edge-server infer my_model --input x=x.npy --json | jq '.outputs[0].shape'

exit codes: 0 done, 1 the model failed, or there is no such model, 2 usage, 69 the daemon, the
model or a file cannot be reached, 78 the model takes no such request, 130 interrupted
"""


def add_infer(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of `infer`."""
    parser.description, parser.epilog = _ABOUT, _EXAMPLES
    parser.add_argument("model", metavar="MODEL")
    given = parser.add_mutually_exclusive_group(required=True)
    given.add_argument(
        "--image",
        metavar="FILE",
        help="a picture, or the first frame of any source that a camera can have",
    )
    given.add_argument(
        "--input",
        action="append",
        type=named_file,
        metavar="NAME=FILE.npy",
        help="an input as numpy saves arrays; repeatable. The batch dimension may be left out",
    )
    parser.add_argument(
        "--save",
        type=_result_file,
        metavar="FILE",
        help="the picture with its lanes (.png, .jpg), or all outputs (.npz)",
    )
    parser.add_argument(
        "--classes", type=positive, metavar="N", help="print the N best classes of each output"
    )
    parser.add_argument("--model-version", default="", metavar="N", help="default: the latest")
    parser.add_argument("--json", action="store_true", help="one object, with all numbers")
    add_address_flags(parser)
    parser.set_defaults(verb=_infer)


def named_file(text: str) -> tuple[str, Path]:
    """Parse NAME=FILE."""
    name, equals, path = text.partition("=")
    if not (name and equals and path):
        raise argparse.ArgumentTypeError(f"{text}: give it as NAME=FILE.npy")
    return name, Path(path)


def _result_file(text: str) -> Path:
    path = Path(text)
    if path.suffix.lower() not in {".png", ".jpg", ".jpeg", ".npz"}:
        raise argparse.ArgumentTypeError(f"{text}: give a name that ends in .png, .jpg or .npz")
    return path


def _infer(arguments: argparse.Namespace) -> int:
    from edge_server.cli.infer_request import run_infer

    run_infer(settings_of(arguments), arguments)
    return OK
