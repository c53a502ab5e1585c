"""What a launch is told, and what cannot be launched."""

from __future__ import annotations

import ctypes
import subprocess
from typing import TYPE_CHECKING

from edge_server.gpu import preprocess_kernel
from edge_server.gpu.preprocess_kernel import MAX_FRAMES, PreprocessArgs

if TYPE_CHECKING:
    from pathlib import Path


def test_the_struct_is_the_headers(tmp_path: Path, kernels: Path, compiler: str) -> None:
    """Size and every field's offset, as a compiler lays the header's struct out."""
    fields = [name for name, *_ in PreprocessArgs._fields_]
    prints = "".join(
        f'std::printf("%zu %zu\\n", offsetof(PreprocessArgs, {name}), '
        f"sizeof(PreprocessArgs::{name}));"
        for name in fields
    )
    program = tmp_path / "layout.cpp"
    program.write_text(
        '#include <cstddef>\n#include <cstdio>\n#include "preprocess_args.h"\n'
        f"int main() {{ {prints} "
        'std::printf("%zu %d\\n", sizeof(PreprocessArgs), PREPROCESS_MAX_FRAMES);'
        'std::printf("%d %d %d %d", PREPROCESS_LANES, PREPROCESS_STAGED_BYTES, '
        "PREPROCESS_MAX_TILE_WIDTH, PREPROCESS_MAX_TILE_HEIGHT); }"
    )
    subprocess.run([compiler, "-I", kernels, program, "-o", tmp_path / "layout"], check=True)
    told = subprocess.run([tmp_path / "layout"], capture_output=True, text=True, check=True)
    expected = [
        f"{getattr(PreprocessArgs, name).offset} {getattr(PreprocessArgs, name).size}"
        for name in fields
    ]
    expected.append(f"{ctypes.sizeof(PreprocessArgs)} {MAX_FRAMES}")
    tile = f"{preprocess_kernel._TILE_WIDTHS[0]} {preprocess_kernel._TILE_HEIGHTS[0]}"
    expected.append(f"{preprocess_kernel._LANES} {preprocess_kernel._STAGED_BYTES} {tile}")
    assert told.stdout.splitlines() == expected
    assert sum(getattr(PreprocessArgs, name).size for name in fields) == ctypes.sizeof(
        PreprocessArgs
    )
