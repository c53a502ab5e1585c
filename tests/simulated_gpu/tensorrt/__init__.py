"""SIMULATION of TensorRT: the arithmetic is ONNX Runtime's, on the CPU.

What it keeps of the real one: names, parameters, what returns False or None instead of raising,
what is only said to the logger, what is asked of addresses, contexts and profiles, what happens in
the order of a stream (`libcuda.c` beside this folder has streams) and what at once. It has only
what the version that it plays has, by the tables of the real classes (tests/support/tensorrt_api).
A plan is an ONNX file with a head: see `simulated_plan`.

EDGE_SIMULATED_TENSORRT says which TensorRT it is and what shall go wrong: `simulated_settings`.

Without a driver the real Runtime cannot be touched, nor let go of, and up to 10.12 the bindings
cannot raise in calls that let other threads run: this one then ends the process with 139, as the
shell calls a segmentation fault. That the real ones do is seen in
tests/integration/test_tensorrt_refusals.py.
"""

from __future__ import annotations

import importlib

from tensorrt.simulated_settings import has_name, settings


def __getattr__(name: str) -> object:
    """The module's own names, as far as the version that is played has them."""
    if name == "__version__":
        return settings.version
    for module in (
        ("simulated_types", "simulated_runtime", "simulated_builder")
        if not name.startswith("_")
        else ()
    ):
        found = vars(importlib.import_module(f"tensorrt.{module}")).get(name)
        if found is not None and has_name("", name):
            return found
    raise AttributeError(f"TensorRT {settings.version} has no {name}")
