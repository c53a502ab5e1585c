"""Tells what TensorRT's Python classes have: `MODULE` in, one JSON object on standard output.

    python dump.py tensorrt_bindings

The object maps a class, or "" for the module itself, to its members, and each of them to what it is
or what a call of it gives: the name of a class of the module, or "".
"""

from __future__ import annotations

import importlib
import json
import os
import re
import sys
from typing import Any


def members(value: Any) -> dict[str, str]:
    """Every public member of a class, inherited ones included, and what it gives."""
    found = {}
    for name in dir(value):
        if name.startswith("_"):
            continue
        member = getattr(value, name, None)
        if isinstance(member, property):
            found[name] = gives(member.fget)
        else:
            found[name] = gives(member) if callable(member) else ""
    return found


def gives(function: Any) -> str:
    """The class behind the arrow of the signature that pybind11 writes into the docstring."""
    match = re.search(r"-> (?:\w+(?:\.|::))*(\w+)\s*$", (function.__doc__ or ""), re.MULTILINE)
    return match[1] if match else ""


def main(name: str) -> None:
    module = importlib.import_module(name)
    classes = {n: v for n, v in vars(module).items() if isinstance(v, type) and n[0] != "_"}
    table = {n: members(v) for n, v in classes.items()}
    for found in table.values():
        # pybind11 may spell what it was told too early as C++ does.
        known = {n: renamed(g) for n, g in found.items()}
        found.update({n: g if g in classes else "" for n, g in known.items()})
    table[""] = {n: "" for n in vars(module) if not n.startswith("_") or n == "__version__"}
    json.dump({"version": module.__version__, "classes": table}, sys.stdout)
    sys.stdout.flush()
    # Some of these classes do not survive the interpreter's own end without a driver.
    os._exit(0)


def renamed(name: str) -> str:
    spelt = {"IEngineInspector": "EngineInspector", "IRuntime": "Runtime", "IBuilder": "Builder"}
    return {**spelt, "IParserError": "ParserError"}.get(name, name)


if __name__ == "__main__":
    main(sys.argv[1])
