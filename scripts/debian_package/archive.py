"""The .deb of a laid-out tree: the same tree gives the same bytes."""

from __future__ import annotations

import gzip
import hashlib
import os
import subprocess
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from pathlib import Path


def pack(root: Path, deb: Path, epoch_s: int, compression: tuple[str, ...]) -> None:
    """Write `deb` of the tree `root` with its DEBIAN folder; modes and times are made uniform.

    Args:
        epoch_s: the time of every file, in seconds since 1970.
        compression: options of dpkg-deb.
    """
    (root / "DEBIAN/md5sums").write_text(_md5sums(root))
    for path in (root, *root.rglob("*")):
        if not path.is_symlink():
            path.chmod(0o755 if path.is_dir() or _is_program(path, root) else 0o644)
        os.utime(path, (epoch_s, epoch_s), follow_symlinks=False)
    uniform = {"SOURCE_DATE_EPOCH": str(epoch_s), "LC_ALL": "C", "TZ": "UTC"}
    subprocess.run(
        ["dpkg-deb", "--root-owner-group", *compression, "--build", root, deb],
        check=True,
        stdout=subprocess.DEVNULL,
        env={**os.environ, **uniform, "DPKG_DEB_THREADS_MAX": "1"},
    )


def write_gzip(path: Path, text: str) -> None:
    """Compress without a name or a time in it."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(gzip.compress(text.encode(), 9, mtime=0))


def sha256(path: Path) -> str:
    digest = hashlib.sha256()
    with path.open("rb") as file:
        while chunk := file.read(1 << 20):
            digest.update(chunk)
    return digest.hexdigest()


def _is_program(path: Path, root: Path) -> bool:
    if path.parent == root / "DEBIAN":
        return path.name in ("postinst", "prerm", "postrm")
    return path.parent in (root / "usr/bin", root / "usr/lib/systemd/system-generators")


def _md5sums(root: Path) -> str:
    lines = []
    for path in sorted(root.rglob("*")):
        name = path.relative_to(root)
        if path.is_file() and not path.is_symlink() and name.parts[0] not in ("DEBIAN", "etc"):
            # What dpkg verifies an installation with; nothing is trusted because of it.
            digest = hashlib.md5(path.read_bytes(), usedforsecurity=False).hexdigest()
            lines.append(f"{digest}  {name}\n")
    return "".join(lines)
