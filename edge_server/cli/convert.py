"""`edge-server convert SRC DST`: its arguments. The code is imported when the verb runs."""

from __future__ import annotations

import argparse
import re
from pathlib import Path

from edge_server.cli.verbs import number, whole_number

_ABOUT = """\
Converts a model file into a model's directory, complete with config.pbtxt, a version and labels,
and placed by one rename once the result gives what the source gives.

SRC is an ONNX file, a Keras model (.keras, .h5), a SavedModel's directory, a frozen GraphDef (.pb,
.graphdef), a TorchScript file, a program of torch.export (.pt2), a PyTorch module or checkpoint, a
Paddle model, or a model's directory of a repository, of which the latest version is taken.
DST is the directory of the new model, whose name the model gets.
"""
_CODES = """\
exit codes: 0 done, 1 the result differs from the source by more than is allowed, 2 usage,
69 a framework is not installed, 78 SRC, DST or a flag cannot be used; the text says why,
130 interrupted; nothing is written unless the code is 0
"""
_DATATYPES = ("FP16", "FP32", "FP64", "BOOL", "UINT8", "INT8", "INT16", "INT32", "INT64")
_INPUT = re.compile(r"(?:(?P<name>[^:]+):)?(?P<shape>-?\d+(?:x-?\d+)*|)(?::(?P<type>\w+))?")
_SOURCES = (
    "onnx",
    "keras",
    "savedmodel",
    "graphdef",
    "torchscript",
    "torch-export",
    "torch-module",
    "torch-weights",
    "paddle",
)


def add_convert(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of `convert`."""
    parser.description, parser.epilog = _ABOUT, _CODES
    add = parser.add_argument
    add("source", type=Path, metavar="SRC")
    add("target", type=Path, metavar="DST")
    add(
        "--to",
        choices=("onnx", "graphdef", "openvino", "plan"),
        default="onnx",
        help="what it becomes; default: onnx",
    )
    add("--from", dest="source_format", choices=_SOURCES, help="what SRC is, if it does not show")
    add("--fp16", action="store_true", help="in half precision; inputs and outputs stay FP32")
    add("--int8", action="store_true", help="with Q/DQ nodes; needs --calibration")
    add(
        "--int8-operators",
        type=_names,
        default=("Conv",),
        metavar="OPS",
        help="the ONNX operators to quantise, like Conv,Gemm; default: Conv",
    )
    add("--per-tensor", action="store_true", help="INT8: one scale for all channels of a weight")
    add(
        "--calibration",
        type=Path,
        action="append",
        default=[],
        metavar="PATH",
        help="recorded inputs for --int8: an .npz of arrays <input> or input.<input>, an .npy, or "
        "a directory of them; repeatable",
    )
    add("--simplify", action="store_true", help="fold constants and drop what does nothing")
    add("--version", type=_positive, default=1, metavar="N", help="of the model; default: 1")
    add(
        "--max-batch",
        type=whole_number,
        metavar="N",
        help="max_batch_size; default: SRC's, or 4 where the batch is open",
    )
    add("--labels", type=Path, metavar="FILE", help="of the first output; default: SRC's")
    add(
        "--input",
        dest="shapes",
        type=_shape,
        action="append",
        default=[],
        metavar="NAME:SHAPE[:TYPE]",
        help="an input's shape, like images:-1x3x360x640:FP32, -1 for any size: PyTorch's files do "
        "not have it; of other sources, the sizes of random inputs; repeatable",
    )
    add(
        "--outputs",
        type=_names,
        default=(),
        metavar="NAMES",
        help="names of the outputs: of a GraphDef its nodes, of PyTorch's what they get",
    )
    add("--signature", default="", metavar="NAME", help="of a SavedModel; default: serving_default")
    add("--module", default="", metavar="FILE.py:CLASS", help="of a PyTorch checkpoint")
    add("--module-path", default="", metavar="DIR", help="where a pickled module's class lies")
    add(
        "--trust",
        action="store_true",
        help="SRC may run the code in it: a pickled module, Keras' Lambda layers",
    )
    add(
        "--compare",
        type=Path,
        action="append",
        default=[],
        metavar="PATH",
        help="recorded inputs to compare on, beside random ones; as --calibration has them",
    )
    add("--samples", type=_positive, default=4, metavar="N", help="random inputs; default: 4")
    add(
        "--seed", type=whole_number, default=0, metavar="N", help="of the random inputs; default: 0"
    )
    add(
        "--limit",
        type=number(float, lambda value: 0 <= value <= 1, "a share, 0 to 1"),
        metavar="X",
        help="the largest error, as a share of the output's largest value; default: 1e-4, with "
        "--fp16 1e-2, with --int8 5e-2",
    )
    add(
        "--isolated",
        action="store_true",
        help="run each framework in an environment of its own, made once below the user's cache",
    )
    add(
        "--python",
        type=Path,
        action="append",
        default=[],
        metavar="FILE",
        help="an interpreter that has the framework; repeatable",
    )
    add("--verbose", action="store_true", help="show what the frameworks print")
    parser.set_defaults(verb=_convert, interrupted="\nedge-server: interrupted; nothing is written")


def _convert(arguments: argparse.Namespace) -> int:
    from edge_server.cli.conversion import convert

    return convert(arguments)


def _names(text: str) -> tuple[str, ...]:
    names = tuple(name.strip() for name in text.split(","))
    if not all(names):
        raise argparse.ArgumentTypeError(f"{text}: give names with commas between")
    return names


def _shape(text: str) -> tuple[str, str, list[int]]:
    match = _INPUT.fullmatch(text)
    datatype = ((match and match["type"]) or "FP32").upper()
    if match is None or datatype not in _DATATYPES:
        raise argparse.ArgumentTypeError(
            f"{text}: give it as NAME:SHAPE or NAME:SHAPE:TYPE, like images:-1x3x360x640:FP32; "
            f"types are {', '.join(_DATATYPES)}"
        )
    sizes = [int(size) for size in match["shape"].split("x")] if match["shape"] else []
    if any(size == 0 or size < -1 for size in sizes):
        raise argparse.ArgumentTypeError(f"{text}: a size is 1 or more, or -1 for any")
    return match["name"] or "", datatype, sizes


def _positive(text: str) -> int:
    if whole_number(text) < 1:
        raise argparse.ArgumentTypeError(f"{text}: give 1 or more")
    return int(text)
