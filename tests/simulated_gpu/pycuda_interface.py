"""What of pycuda.driver the simulation has, described from either: names, values, parameters.

Run by a Python in which the real pycuda is installed, this writes pycuda_interface.json beside it.
"""

from __future__ import annotations

import ctypes
import importlib.util
import inspect
import json
import re
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from types import ModuleType

FOLDER = Path(__file__).parent
RECORD = FOLDER / "pycuda_interface.json"

# `(object)dest [, (int)size=0` in the docstrings of Boost.
_PARAMETER = re.compile(r"\((?:\w+)\)(\w+)")
# No more than made by others; nobody constructs them.
_MADE_BY_OTHERS = {"Context", "Module", "Function", "DeviceAllocation", "PagelockedHostAllocation"}


def simulated_driver() -> ModuleType:
    """The simulation, under a name that is not pycuda's; needs a libcuda.so.1."""
    path = FOLDER / "pycuda" / "driver.py"
    spec = importlib.util.spec_from_file_location("simulated_pycuda_driver", path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def names_of(module: ModuleType) -> list[str]:
    """The public names of the simulation: of the module, and of its classes `Class.name`."""
    names = []
    for name, thing in vars(module).items():
        if name.startswith("_") or getattr(thing, "__module__", None) != module.__name__:
            continue
        names.append(name)
        if inspect.isclass(thing):
            names += [f"{name}.{inner}" for inner in vars(thing) if not inner.startswith("_")]
            if "__init__" in vars(thing) and name not in _MADE_BY_OTHERS:
                names.append(f"{name}.__init__")
    return sorted(names)


def described(module: ModuleType, name: str) -> Any:
    """What `name` is: a number, parameters, an error's bases, or its kind."""
    thing: Any = module
    for part in name.split("."):
        thing = getattr(thing, part)
    if inspect.isclass(thing):
        if not issubclass(thing, Exception):
            return "class"
        return {"bases": [base.__name__ for base in thing.__mro__[1:]]}
    if isinstance(thing, property) or type(thing).__name__ == "property":
        return "property"
    if callable(thing):
        inside = "." in name and not isinstance(
            inspect.getattr_static(getattr(module, name.partition(".")[0]), name.split(".")[1]),
            staticmethod,
        )
        return {"parameters": _parameters(thing)[inside:]}
    return int(thing)


def _parameters(function: Any) -> list[str]:
    """Its parameters; `?` behind those that may be left out, argN where one has no name."""
    try:
        signature = inspect.signature(function)
    except ValueError:
        line = next(line for line in function.__doc__.splitlines() if "->" in line)
        required, _, optional = line.partition("->")[0].partition("[")
        return _PARAMETER.findall(required) + [f"{name}?" for name in _PARAMETER.findall(optional)]
    texts = {inspect.Parameter.VAR_POSITIONAL: "*", inspect.Parameter.VAR_KEYWORD: "**"}
    return [
        texts.get(p.kind, "") + p.name + ("?" if p.default is not inspect.Parameter.empty else "")
        for p in signature.parameters.values()
    ]


def record() -> None:
    with tempfile.TemporaryDirectory() as folder:
        subprocess.run([FOLDER / "build_libcuda", folder], check=True)
        ctypes.CDLL(f"{folder}/libcuda.so.1", mode=ctypes.RTLD_GLOBAL)
    # Python puts the script's folder first, and there the simulation is called pycuda, too.
    sys.path.remove(str(FOLDER))
    import pycuda
    import pycuda.driver

    names = {name: described(pycuda.driver, name) for name in names_of(simulated_driver())}
    text = json.dumps({"version": pycuda.VERSION_TEXT, "names": names}, indent=1, sort_keys=True)
    RECORD.write_text(text + "\n")


if __name__ == "__main__":
    record()
