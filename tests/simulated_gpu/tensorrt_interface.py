"""The parameters of what the simulated TensorRT offers, as the real classes have them.

    python tests/simulated_gpu/tensorrt_interface.py FOLDER VERSION

asks the real bindings below FOLDER (see tests/support/tensorrt_api/real_bindings.py) and writes
what they say into tensorrt_interface.json beside this file.
"""

from __future__ import annotations

import importlib
import inspect
import json
import os
import re
import sys
from pathlib import Path
from typing import Any

FOLDER = Path(__file__).parent
RECORD = FOLDER / "tensorrt_interface.json"
CLASSES = (
    "Builder",
    "EngineInspector",
    "IBuilderConfig",
    "ICudaEngine",
    "IExecutionContext",
    "ILogger",
    "INetworkDefinition",
    "IOptimizationProfile",
    "ITensor",
    "ITimingCache",
    "OnnxParser",
    "ParserError",
    "Runtime",
)


def simulated(name: str) -> Any:
    """A class of the simulation."""
    for module in ("runtime", "context", "types", "builder"):
        found = vars(importlib.import_module(f"tensorrt.simulated_{module}")).get(name)
        if found is not None:
            return found
    raise AttributeError(name)


def offered(name: str) -> dict[str, list[str] | None]:
    """Member → its parameters; None for what is no method."""
    members = {}
    for member, value in vars(simulated(name)).items():
        if not member.startswith("_"):
            method = inspect.isfunction(value)
            members[member] = list(inspect.signature(value).parameters)[1:] if method else None
    return members


def real(value: Any) -> list[list[str]] | None:
    """The parameters of each form that pybind11's docstring tells; None for what is no method."""
    if isinstance(value, property) or not callable(value):
        return None
    name = re.escape(value.__name__)
    found = re.findall(rf"^\s*(?:\d+\. )?{name}\((.*)\) -> ", value.__doc__ or "", re.MULTILINE)
    return [_names(text) for text in found if not text.startswith("*args")]


def _names(text: str) -> list[str]:
    """`self: a.B, name: str, shape: tuple[int, int] = ()` without the first."""
    depth, parts = 0, [""]
    for letter in text:
        depth += (letter in "[(<") - (letter in "])>")
        if letter == "," and depth == 0:
            parts.append("")
        else:
            parts[-1] += letter
    return [part.partition(":")[0].strip() for part in parts[1:]]


def main(folder: str, version: str) -> None:
    sys.path.insert(0, folder)
    # Python puts the script's folder first, and there the simulation is.
    bindings = importlib.import_module("tensorrt_bindings")
    said = {}
    for name, members in json.loads(os.environ["OFFERED"]).items():
        for member in members:
            value = getattr(getattr(bindings, name), member, None)
            if value is not None:
                said[f"{name}.{member}"] = real(value)
    record = json.loads(RECORD.read_text()) if RECORD.exists() else {}
    record[version] = said
    RECORD.write_text(json.dumps(record, indent=1, sort_keys=True) + "\n")
    os._exit(0)


if __name__ == "__main__":
    main(*sys.argv[1:])
