"""Builds edge-server's Debian package, on any x86-64 Debian or Ubuntu.

    scripts/build_deb [--target TARGET]      dist/edge-server_VERSION-1~SUITE_ARCHITECTURE.deb
    scripts/build_deb --update-locks         the newest wheels, for every target or the one named

Beside the package lie its checksum (.sha256) and its bill of materials (.cdx.json, CycloneDX). The
same commit, locks and SOURCE_DATE_EPOCH (default: the time of the commit) give the same bytes.
"""

from __future__ import annotations

import argparse
import os
import shutil
import subprocess
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING

from debian_package.archive import pack, sha256
from debian_package.control import PACKAGE, dependencies, write_control, write_documentation
from debian_package.elf import faults
from debian_package.sbom import bill_of_materials
from debian_package.targets import TARGETS, target_named
from debian_package.tree import lay_out
from debian_package.wheels import CHECKOUT, project_version, update_lock, update_tools

if TYPE_CHECKING:
    from collections.abc import Sequence

    from debian_package.targets import Target

_COMPRESSIONS = {
    # dpkg of Ubuntu 22.04 and Debian 12 read it; a board unpacks it in a fraction of xz's time.
    "zstd": ("-Zzstd", "-z9"),
    "xz": ("-Zxz", "-z1"),  # what lintian can read
    "fast": ("-Zzstd", "-z1"),  # a third larger, in a fifth of the time: to try an installation
}


def build_package(target: Target, out: Path, revision: str, compression: str, epoch_s: int) -> Path:
    """Build the package of a target into the folder `out`; the .deb's path.

    Raises:
        SystemExit: a wheel is not as locked, or has a library that the target cannot load.
    """
    version = f"{project_version()}-{revision}~{target.suite}"
    deb = out / f"{PACKAGE}_{version}_{target.architecture}.deb"
    out.mkdir(parents=True, exist_ok=True)
    os.umask(0o022)
    with tempfile.TemporaryDirectory(prefix="build_deb.") as folder:
        root = Path(folder, "root")
        root.mkdir()
        lay_out(target, root)
        packages = {each.split()[0] for each in dependencies(target)}
        if found := list(faults(root, target.machine, target.glibc, packages)):
            raise SystemExit("\n".join(f"build_deb: {line}" for line in found))
        write_documentation(target, root, version, epoch_s)
        bill = bill_of_materials(target, root, version)
        write_control(target, root, version)
        pack(root, Path(folder, deb.name), epoch_s, _COMPRESSIONS[compression])
        shutil.move(Path(folder, deb.name), deb)
    deb.with_suffix(".cdx.json").write_text(bill)
    Path(f"{deb}.sha256").write_text(f"{sha256(deb)}  {deb.name}\n")
    return deb


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        prog="build_deb",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    parser.add_argument("--target", metavar="TARGET", help=f"here (default), {', '.join(TARGETS)}")
    parser.add_argument("--out", metavar="FOLDER", type=Path, default=CHECKOUT / "dist")
    parser.add_argument("--revision", default="1", help="of the packaging; default: 1")
    parser.add_argument("--compression", choices=_COMPRESSIONS, default="zstd")
    parser.add_argument("--update-locks", action="store_true", help="and build nothing")
    options = parser.parse_args(arguments)
    if options.update_locks:
        update_tools()
        for name in [options.target] if options.target else TARGETS:
            update_lock(target_named(name))
            print(target_named(name).lock)
        return
    target = target_named(options.target or "here")
    deb = build_package(target, options.out, options.revision, options.compression, _epoch_s())
    print(deb)


def _epoch_s() -> int:
    if given := os.environ.get("SOURCE_DATE_EPOCH"):
        return int(given)
    command = ("git", "log", "-1", "--format=%ct")
    done = subprocess.run(command, cwd=CHECKOUT, capture_output=True, text=True, check=False)
    if done.returncode:
        raise SystemExit("build_deb: this is no git checkout; set SOURCE_DATE_EPOCH to its time")
    return int(done.stdout)


if __name__ == "__main__":
    main()
