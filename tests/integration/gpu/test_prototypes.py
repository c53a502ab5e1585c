"""The driver's functions get the parameters that NVIDIA's own header declares."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from edge_server.gpu.device import PROTOTYPES

HEADERS = sorted(Path("/usr/local").glob("cuda*/include/cuda.h"))
LETTERS = {
    **dict.fromkeys(("int", "CUdevice", "CUresult", "CUdevice_attribute"), "i"),
    **dict.fromkeys(("CUstreamCaptureMode",), "i"),
    **dict.fromkeys(("CUdeviceptr", "unsigned long long", "cuuint64_t"), "q"),
    **dict.fromkeys(("CUcontext", "CUstream", "CUevent", "CUmodule"), "p"),
    **dict.fromkeys(("CUfunction", "CUgraph", "CUgraphExec"), "p"),
    "unsigned int": "u",
    "unsigned char": "b",
    "size_t": "n",
}


def letters(parameters: str) -> str:
    found = ""
    for parameter in parameters.split(","):
        kind = re.sub(r"\b(const|__\w+)\b|\w+\s*(\[\])?$", "", parameter.strip()).strip()
        if parameter.strip() != "void":
            found += "p" if "*" in parameter else LETTERS.get(kind, "?")
    return found


@pytest.mark.skipif(not HEADERS, reason="no CUDA toolkit here")
def test_every_function_is_called_as_the_header_declares_it() -> None:
    text = re.sub(
        r"/\*.*?\*/|//[^\n]*", "", HEADERS[-1].read_text(errors="replace"), flags=re.DOTALL
    )
    # The header renames a function to the version that the library exports.
    renamed = dict(re.findall(r"#define (cu\w+)\s+(?:\w+\()?(cu\w+)", text))
    declared: dict[str, str] = {}
    for name, parameters in re.findall(r"CUresult CUDAAPI (cu\w+)\(([^)]*)\);", text):
        # The versions of former headers follow below.
        declared.setdefault(renamed.get(name, name), letters(parameters))
    assert {name: declared[name] for name in PROTOTYPES} == PROTOTYPES
