"""The command line of trtexec that builds the same plan."""

from __future__ import annotations

import shlex
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    from edge_server.backends.tensorrt.build.profiles import Profile
    from edge_server.backends.tensorrt.build.build_options import BuildOptions, Shape


def trtexec_line(
    onnx: Path,
    plan: Path,
    options: BuildOptions,
    profiles: Sequence[Profile],
    version: tuple[int, int],
) -> str:
    """Return the command line of the same build; trtexec cannot calibrate from samples."""
    words = ["trtexec", f"--onnx={onnx}", f"--saveEngine={plan}"]
    if version < (11, 0):
        words += {"fp32": [], "fp16": ["--fp16"], "int8": ["--int8", "--fp16"]}[options.precision]
        if options.strongly_typed and version >= (10, 0):
            words.append("--stronglyTyped")
    for index, profile in enumerate(profiles):
        if len(profiles) > 1:
            words.append(f"--profile={index}")
        for flag, which in (("--minShapes", "min"), ("--optShapes", "opt"), ("--maxShapes", "max")):
            shapes = ",".join(
                f"{name}:{_text(getattr(found, which))}" for name, found in profile.items()
            )
            words.append(f"{flag}={shapes}")
    if options.dla_core is not None:
        words.append(f"--useDLACore={options.dla_core}")
        words += ["--allowGPUFallback"] if options.gpu_fallback else []
    words += [f"--memPoolSize=workspace:{options.workspace_mib}", "--profilingVerbosity=detailed"]
    words.append("--skipInference" if version >= (8, 6) else "--buildOnly")
    return shlex.join(words)


def _text(shape: Shape) -> str:
    return "x".join(map(str, shape))
