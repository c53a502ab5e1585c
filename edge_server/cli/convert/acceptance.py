"""Holds a new model's directory to what `check` asks of it, and builds its plan."""

from __future__ import annotations

import argparse
import importlib.util
from typing import TYPE_CHECKING

from edge_server.cli.check import check
from edge_server.cli.models.push import read_model
from edge_server.cli.plan.building import build_for_people
from edge_server.cli.plan.target import find_target
from edge_server.cli.plan.verbs import add_verbs as add_plan_verbs
from edge_server.cli.plan.verification import verify
from edge_server.errors import InternalError, ModelConfigError, Unavailable
from edge_server.settings import read_settings

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from edge_server.backends.convert.environments import Framework


def accept(directory: Path, framework: Framework, show: Callable[[str], None]) -> None:
    """Return if the daemon would load the model in `directory`, whose parent has no other.

    Where this Python lacks the model's framework, only configuration and files are checked.

    Raises:
        ModelConfigError: it would not load it; with check's own text.
        Unavailable: it cannot load it now.
    """
    read_model(directory)
    lacking = [name for name in framework.modules if importlib.util.find_spec(name) is None]
    if lacking and not framework.is_ours:
        show(f"not loaded, as {lacking[0]} is not installed here: `edge-server check` where it is")
        return
    show("checking the model's directory")
    off = {"enabled": False}
    chosen = {"repository": {"paths": [str(directory.parent)]}, "grpc": off, "metrics": off}
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
