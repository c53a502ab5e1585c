"""Where libc has the choice it is made; the numbers are in its range."""

from __future__ import annotations

import platform
import subprocess
import sys

import pytest


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="this libc has no mallopt")
def test_glibc_takes_every_number() -> None:
    done = subprocess.run(
        [
            sys.executable,
            "-c",
            "from edge_server.process.allocator import keep_large_buffers\n"
            "import sys; sys.exit(0 if keep_large_buffers() else 1)",
        ],
        check=False,
    )
    assert done.returncode == 0
