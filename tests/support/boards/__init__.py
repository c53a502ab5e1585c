"""Trees of kernel files of boards, shaped by NVIDIA's and the kernel's documentation.

None was recorded from a board: names and units are those that the documentation and public reports
of these releases give, the numbers are made up. A line of a tree is `path = content`.
"""

from __future__ import annotations

from pathlib import Path

_TREES = Path(__file__).parent


def plant(name: str, root: Path) -> Path:
    """Write the files of the board `name` (`orin_nx_jetpack6`) below `root`; return `root`."""
    for line in (_TREES / f"{name}.txt").read_text().splitlines():
        if line and not line.startswith("#"):
            path, _, content = line.partition(" = ")
            file = root / path
            file.parent.mkdir(parents=True, exist_ok=True)
            file.write_text(content.replace("\\0", "\0").replace("\\n", "\n") + "\n")
    return root
