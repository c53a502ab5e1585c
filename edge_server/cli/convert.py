"""Converts: source → ONNX or GraphDef → further stages, compared, checked, and placed."""

from __future__ import annotations

import sys
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, Any

from edge_server.cli.check import check
from edge_server.cli.main import run_command
from edge_server.cli.model_push import read_model
from edge_server.cli.verbs import FAILED, OK
from edge_server.errors import InvalidRequest, ModelConfigError, Unavailable
from edge_server.gpu.device import Devices
from edge_server.model_config.files import CONFIG_NAME
from edge_server.model_config.parse import read_model_config
from edge_server.repository.content import usable_tree
from edge_server.repository.manifest import ABOUT_CONTENT
from edge_server.repository.scan import NAME_RULE, is_model_name
from edge_server.repository.transfer import entries_of, receive
from edge_server.settings import read_settings
from edge_server.tools.convert.conversion import Conversion, compare
from edge_server.tools.convert.formats import (
    SOURCES,
    lacks,
    read_source,
    source_format,
)

if TYPE_CHECKING:
    import argparse
    from collections.abc import Callable, Iterator

    from edge_server.repository.transfer import Entry
    from edge_server.tools.convert.formats import FrameworkPackages


def accept(
    directory: Path, framework: FrameworkPackages, python: Path, show: Callable[[str], None]
) -> None:
    """Return if the daemon would load the model in `directory`, whose parent has no other; without
    a GPU only the configuration and the files of a model for one are checked.

    Args:
        framework: what runs it.
        python: an interpreter that has it. Without msgspec, which the processes of models need
            there, only configuration and files are checked.

    Raises:
        ModelConfigError: it would not load it; with check's own text.
        Unavailable: it cannot load it now.
    """
    read_model(directory)
    interpreters = {}
    if not framework.is_ours and python != Path(sys.executable):
        if lacks(python, ("msgspec",)):
            show(f"not loaded: {python} lacks msgspec, which serving a model there needs")
            return
        interpreters = {framework.name: str(python)}
    groups = read_model_config(directory / CONFIG_NAME).instance_group
    if any(each.kind == each.KIND_GPU for each in groups) and (reason := Devices().reason):
        show(f"not loaded: its instances are for a GPU, and {reason}")
        return
    show("checking the model's directory")
    off = {"enabled": False}
    chosen: dict[str, Any] = {
        "repository": {"paths": [str(directory.parent)]},
        "grpc": off,
        "metrics": off,
    }
    chosen["python"] = {"interpreters": interpreters}
    findings = check(read_settings(None, chosen))
    if findings.faults:
        raise ModelConfigError("\n".join(findings.faults))
    if findings.unavailable:
        raise Unavailable("\n".join(findings.unavailable))


def convert(arguments: argparse.Namespace) -> int:
    """Convert as `arguments` say; return the exit code. Nothing is written unless it succeeds."""
    source = read_source(arguments.src)
    name = vars(arguments)["from"] or source_format(source.path)
    if name == "torch-module" and arguments.module:
        name = "torch-weights"
    target = _free_target(arguments.dst, arguments.version)
    _check_flags(arguments, name)
    with tempfile.TemporaryDirectory(prefix="edge-server-convert-") as scratch:
        conversion = Conversion(arguments, source, SOURCES[name], Path(scratch), _show)
        conversion.find_interpreters()
        made = conversion.make()
        for line in made.lines:
            print(line)
        errors = compare(conversion.samples, made.samples, conversion.limit)
        for error in errors:
            print(error)
        recorded = len(conversion.recorded)
        inputs = f"{made.samples - recorded} random and {recorded} recorded inputs"
        if not all(error.agrees for error in errors):
            print(
                f"edge-server: the result differs from {source.path} on {inputs}; nothing is "
                "written; --limit sets what is allowed",
                file=sys.stderr,
            )
            return FAILED
        print(f"the result agrees with {source.path} on {inputs}")
        directory = conversion.write(made, target.name)
        if arguments.to == "plan":
            of_it = [str(directory), "--version", str(arguments.version)]
            typed = ["--strongly-typed"] if conversion.precision != "fp32" else []
            for words in (["plan", "build", *of_it, *typed], ["plan", "verify", *of_it]):
                if code := run_command(words):
                    return code
        accept(directory, *conversion.interpreter(), _show)
        print(f"{target}: {_place(directory, target, arguments.version)}")
    return OK


def _show(text: str) -> None:
    print(f"{text} …", file=sys.stderr, flush=True)


def _check_flags(arguments: argparse.Namespace, source: str) -> None:
    if source == "torch-module" and not arguments.trust:
        raise InvalidRequest(
            f"{arguments.src}: a pickled module or checkpoint; loading a module runs the code "
            "in it: --trust, if you know who wrote it; of a checkpoint give --module FILE.py:CLASS"
        )
    if arguments.fp16 and arguments.int8:
        raise InvalidRequest("--fp16 and --int8: give one of the two")
    if arguments.int8 and not arguments.calibration:
        raise InvalidRequest(
            "--int8 needs the ranges of typical inputs: --calibration PATH with recorded ones"
        )
    if arguments.to == "graphdef" and (arguments.fp16 or arguments.int8 or arguments.simplify):
        raise InvalidRequest("--fp16, --int8 and --simplify are of ONNX; leave out --to graphdef")
    if arguments.to == "openvino" and arguments.int8:
        raise InvalidRequest("--int8: not tested with OpenVINO here; leave out one of the two")
    for flag, path in (("--labels", arguments.labels), ("--module-path", arguments.module_path)):
        if path and not Path(path).exists():
            raise InvalidRequest(f"{flag} {path}: no such file")


def _free_target(target: Path, version: int) -> Path:
    place = target.expanduser().absolute()
    if not is_model_name(place.name):
        raise ModelConfigError(f"{target}: '{place.name}' is no model's name: {NAME_RULE}")
    if (place / str(version)).exists():
        raise ModelConfigError(
            f"{place / str(version)}: is there already; --version N adds another version"
        )
    return place


def _place(directory: Path, target: Path, version: int) -> str:
    """Place the model, with the versions that are there, by one rename; return what was done."""
    tree = usable_tree(directory.parent, directory.name)
    target.parent.mkdir(parents=True, exist_ok=True)
    new = entries_of(tree)
    if not target.exists():
        receive(target.parent, new, target.name)
        return f"version {version} of a new model"
    there = usable_tree(target.parent, target.name)
    paths = {file.path for file in there.files}
    mine = (target / CONFIG_NAME).read_bytes() if CONFIG_NAME in paths else b""
    if mine != (directory / CONFIG_NAME).read_bytes():
        raise ModelConfigError(
            f"{target / CONFIG_NAME}: is another than the one of version {version}:\n"
            f"{(directory / CONFIG_NAME).read_text(encoding='utf-8')}convert into a directory of "
            "its own, and move the version"
        )

    def entries() -> Iterator[Entry]:
        yield from entries_of(there, only=lambda path: path not in ABOUT_CONTENT)
        yield from entries_of(tree, only=lambda path: path.partition("/")[0] == str(version))

    receive(target.parent, entries(), target.name)
    return f"version {version}, beside those that were there"
