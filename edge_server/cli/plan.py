"""`edge-server plan …`: the arguments of each verb. Each verb imports its code when it runs."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

from edge_server.cli.verbs import FAILED, OK, Run, Verbs, positive, whole_number

if TYPE_CHECKING:
    import argparse

_ABOUT = """\
TensorRT plans of a model's ONNX file. A plan belongs to one GPU with one TensorRT: it is built on
the device that runs it, and again after an update. The ONNX file stays the truth.

MODEL is a model's name in the repository, its directory, or an ONNX file.
"""
_CODES = """\
exit codes: 0 done, 1 failed (verify: the plan's outputs differ from the ONNX file's; refresh: a
model is left without a plan that fits), 2 usage,
69 no GPU or no TensorRT here, 78 no such model, or it or a flag's value cannot be
used; the text gives the reason, 130 interrupted
"""
_FOREVER_S = 365 * 86400
_INTERRUPTED = "\nedge-server: interrupted; what was there is as it was"


def add_verbs(parser: argparse.ArgumentParser) -> None:
    """Add the verbs below `plan`."""
    verbs = Verbs(parser, about=_ABOUT, codes=_CODES, interrupted=_INTERRUPTED)

    build = _add(verbs, "build", "build a model's plan on this device", _build)
    build.add_argument(
        "--out", type=Path, metavar="FILE", help="the plan; default: beside the ONNX file"
    )
    samples = "typical inputs for INT8 (TensorRT up to 10): DIR/*.npy, or DIR/<input>/*.npy"
    build.add_argument("--calibration", type=Path, metavar="DIR", help=samples)
    for which, text in (("min", "least"), ("opt", "usual"), ("max", "largest")):
        help_text = f"{text} shapes, like input:1x3x360x640; once for each profile"
        build.add_argument(
            f"--{which}", action="append", default=[], metavar="SHAPES", help=help_text
        )
    for flag, kind, unit, text in _BUILD_NUMBERS:
        build.add_argument(flag, type=kind, metavar=unit, help=text)
    for flag, text in _BUILD_SWITCHES:
        build.add_argument(flag, action="store_true", help=text)

    inspect = _add(verbs, "inspect", "what a plan was built of and for", _inspect)
    inspect.add_argument("--layers", action="store_true", help="its layers, which takes the device")
    inspect.add_argument("--json", action="store_true", help="the side-car as it is")

    differ = "whether a plan's outputs are those of its ONNX file"
    verify = _add(verbs, "verify", differ, _verify)
    off = "how far any element may be off; default: by precision"
    verify.add_argument("--tolerance", type=float, metavar="X", help=off)
    count = "random inputs; default: 4"
    verify.add_argument("--samples", type=positive, default=4, metavar="N", help=count)

    missing = (
        "build every plan of the repositories that is missing or of another device or TensorRT"
    )
    refresh = verbs.add("refresh", missing, _refresh)
    refresh.add_argument("--config", type=Path, metavar="FILE", help="the daemon's settings")
    where = "instead of the settings' repositories; repeatable"
    refresh.add_argument("--model-repository", action="append", metavar="DIR", help=where)
    hold = "for systemd: count as started after so many seconds; default: when all is built"
    refresh.add_argument("--hold", type=positive, default=_FOREVER_S, metavar="S", help=hold)


def _add(verbs: Verbs, name: str, text: str, run: Run) -> argparse.ArgumentParser:
    """Add a verb with the arguments that all verbs share."""
    verb = verbs.add(name, text, run)
    verb.add_argument("model", metavar="MODEL", help="a name, a directory, or an ONNX file")
    verb.add_argument(
        "--model-repository",
        type=Path,
        action="append",
        metavar="DIR",
        help="where names are looked for; repeatable; default: models",
    )
    verb.add_argument(
        "--config", type=Path, metavar="FILE", help="or where the daemon's settings have them"
    )
    verb.add_argument("--version", type=positive, metavar="N", help="default: the latest")
    return verb


def _build(arguments: argparse.Namespace) -> int:
    from edge_server.tools.plan import build_for_people

    build_for_people(_target(arguments), arguments)
    return OK


def _inspect(arguments: argparse.Namespace) -> int:
    from edge_server.tools.plan import inspect

    for line in inspect(_target(arguments), layers=arguments.layers, as_json=arguments.json):
        print(line)
    return OK


def _verify(arguments: argparse.Namespace) -> int:
    from edge_server.tools.plan import verify

    found = verify(_target(arguments), arguments.tolerance, arguments.samples)
    for line in found.lines:
        print(line)
    return OK if found.agrees else FAILED


def _refresh(arguments: argparse.Namespace) -> int:
    from importlib.metadata import version

    from edge_server.cli.plan_refresh import refresh_for_unit
    from edge_server.process.logs import set_up_logging
    from edge_server.settings import read_settings

    paths = arguments.model_repository
    settings = read_settings(arguments.config, {"repository": {"paths": paths}} if paths else {})
    # Its progress is for the console, too.
    set_up_logging(settings.log, fields=False)
    refreshed = refresh_for_unit(settings, version("edge-server"), arguments.hold)
    print(f"plans: {refreshed}")
    for failure in refreshed.failures:
        print(f"edge-server: {failure}", file=sys.stderr)
    return FAILED if refreshed.failures else OK


def _target(arguments: argparse.Namespace) -> Any:
    from edge_server.tools.plan import find_target

    repositories = arguments.model_repository
    if not repositories:
        from edge_server.settings import read_settings

        paths = read_settings(arguments.config, {}).repository.paths
        repositories = [Path(path) for path in paths]
    return find_target(arguments.model, repositories, arguments.version)


_BUILD_NUMBERS = (
    ("--dla-core", whole_number, "N", "build for NVDLA"),
    ("--max-gpu-layers", whole_number, "N", "fail where more fall back to the GPU"),
    ("--workspace", positive, "MIB", "what a layer may take; default: 1024"),
    ("--memory-limit", positive, "MIB", "of the host's memory, for the build"),
)
_BUILD_SWITCHES = (
    ("--fp16", "layers may calculate in FP16 (TensorRT up to 10)"),
    ("--int8", "layers may calculate in INT8 and FP16: with Q/DQ nodes, or with --calibration"),
    ("--strongly-typed", "calculate as the ONNX file is typed, as TensorRT 11 always does (10)"),
    ("--gpu", "build for the GPU, whatever is configured"),
    ("--no-gpu-fallback", "fail where NVDLA cannot take a layer, rather than run it on the GPU"),
    ("--no-timing-cache", "measure every layer anew"),
    ("--verbose", "show all messages of TensorRT"),
)
