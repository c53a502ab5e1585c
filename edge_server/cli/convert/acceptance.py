"""Holds a new model's directory to what `check` asks of it, and builds its plan."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

from edge_server.cli.check import check
from edge_server.cli.models.push import read_model
from edge_server.cli.plan.verbs import add_verbs as add_plan_verbs
from edge_server.errors import InternalError, ModelConfigError, Unavailable
from edge_server.settings import read_settings
from edge_server.tools.convert.formats import lacks
from edge_server.tools.plan import build_for_people, find_target, verify

if TYPE_CHECKING:
    from collections.abc import Callable

    from edge_server.tools.convert.formats import FrameworkPackages


def accept(
    directory: Path, framework: FrameworkPackages, python: Path, show: Callable[[str], None]
) -> None:
    """Return if the daemon would load the model in `directory`, whose parent has no other.

    Args:
        directory: of the model.
        framework: what runs it.
        python: an interpreter that has it. Without msgspec, which the processes of models need
            there, only configuration and files are checked.
        show: called with each step.

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


def build_plan(directory: Path, version: int, *, strongly_typed: bool) -> None:
    """Build the plan of the model in `directory` with `plan build`, and hold it to `plan verify`.

    Args:
        directory: of the model.
        version: which holds the ONNX file.
        strongly_typed: calculate in the types of the ONNX file.

    Raises:
        Unavailable: there is no TensorRT or no GPU here.
        InternalError: the plan's outputs are not those of the ONNX file.
    """
    parser = argparse.ArgumentParser()
    add_plan_verbs(parser)
    flags = ["--strongly-typed"] if strongly_typed else []
    given = parser.parse_args(["build", str(directory), "--version", str(version), *flags])
    build_for_people(find_target(str(directory), (), version), given)
    found = verify(find_target(str(directory), (), version), None, 4)
    for line in found.lines:
        print(line)
    if not found.agrees:
        raise InternalError(f"{directory.name}: the plan's outputs differ from the ONNX file's")
