"""The real Python bindings of TensorRT, without TensorRT: what each version's classes have.

    python tests/support/tensorrt_api/real_bindings.py [--write]

Takes the wheels of the bindings from the package registry (they hold no library), builds empty
libraries for them to be imported with, asks each in a process of its own, and compares, or with
`--write` renews, `names.json`. A wheel that is not made for this Python is not looked at.
"""

from __future__ import annotations

import argparse
import functools
import hashlib
import json
import os
import re
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

HERE = Path(__file__).parent
NAMES = HERE / "names.json"
# Version → the wheel of its bindings and the major version that its libraries are named with.
WHEELS = {
    "8.6": ("tensorrt-bindings==8.6.1", 8),
    "10.3": ("tensorrt-cu12-bindings==10.3.0", 10),
    "10.7": ("tensorrt-cu12-bindings==10.7.0", 10),
    "10.13": ("tensorrt-cu12-bindings==10.13.3.9", 10),
    "10.16": ("tensorrt-cu12-bindings==10.16.1.11", 10),
    "11.4": ("tensorrt-cu12-bindings==11.4.0.106", 11),
}
VERSIONS = tuple(WHEELS)
# The runtime alone, as `tensorrt_lean_bindings`; it has no builder, parser or plugins.
LEAN = ("tensorrt-lean-cu12-bindings==10.3.0", 10)
LIBRARIES = ("nvinfer", "nvonnxparser", "nvinfer_plugin", "nvinfer_lean")

Classes = dict[str, dict[str, str]]


class NotHere(Exception):
    """The wheel cannot be had, or cannot be imported, here; the text says why."""


def names(path: Path = NAMES) -> dict[str, Classes]:
    """Version → class → member → what it gives, as written down."""
    found: dict[str, Classes] = {version: {} for version in VERSIONS}
    for name, groups in json.loads(path.read_text()).items():
        for versions, members in groups.items():
            for version in versions.split():
                table = found[version].setdefault(name, {})
                table.update(_member(text) for text in members.split())
    return found


def written(found: dict[str, Classes]) -> str:
    """The text of `names.json`: class → the versions that have a member → the members."""
    lines = []
    for name in sorted({name for classes in found.values() for name in classes}):
        groups: dict[str, list[str]] = {}
        members = {m for classes in found.values() for m in classes.get(name, {}).items()}
        for member, given in sorted(members):
            having = [v for v in VERSIONS if found[v].get(name, {}).get(member) == given]
            groups.setdefault(" ".join(having), []).append(f"{member}:{given}".rstrip(":"))
        inner = ",\n".join(
            f"  {json.dumps(versions)}: {json.dumps(' '.join(members))}"
            for versions, members in sorted(groups.items())
        )
        lines.append(f" {json.dumps(name)}: {{\n{inner}\n }}")
    return "{\n" + ",\n".join(lines) + "\n}\n"


def look(version: str, folder: Path) -> Classes:
    """What the real classes of `version` have; `folder` keeps what was downloaded and built.

    Raises:
        NotHere: there is no such wheel for this Python, or no registry, or no compiler.
    """
    done = subprocess.run(
        [sys.executable, str(HERE / "dump.py"), "tensorrt_bindings"],
        env={**os.environ, **importing(version, folder)},
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    if done.returncode:
        raise NotHere(f"TensorRT {version} cannot be imported: {done.stderr.strip()[-400:]}")
    classes: Classes = json.loads(done.stdout)["classes"]
    classes[""] = {name: "" for name in classes[""] if is_used(name)}
    return {name: members for name, members in classes.items() if is_used(name) and members}


def importing(version: str, folder: Path) -> dict[str, str]:
    """The environment in which `tensorrt_bindings` is that version; `lean`, see `LEAN`.

    Raises:
        NotHere: see `look`.
    """
    requirement, major = LEAN if version == "lean" else WHEELS[version]
    wheel = _unpacked(requirement, folder)
    libraries = _libraries(major, HERE / "stub.c", folder)
    return {"PYTHONPATH": str(wheel), "LD_LIBRARY_PATH": str(libraries)}


def refusing(version: str, folder: Path) -> dict[str, str]:
    """As `importing`, and behind the bindings is a TensorRT 8.6 or 10 that can be told to refuse:
    `fake_nvinfer.c`.

    Raises:
        NotHere: see `look`.
    """
    found = importing(version, folder)
    libraries = _libraries(WHEELS[version][1], HERE / "fake_nvinfer.c", folder)
    return {**found, "LD_LIBRARY_PATH": str(libraries)}


def is_used(name: str) -> bool:
    """Layers, plugins and other formats' parsers are no concern of this project."""
    unused = re.search("Layer$|Plugin|Loop|Caffe|Uff|Algorithm|Attention|MoE|Condition", name)
    return name == "ILayer" or unused is None


def _member(text: str) -> tuple[str, str]:
    name, _, given = text.partition(":")
    return name, given


def _unpacked(requirement: str, folder: Path) -> Path:
    found = _download(requirement, folder)
    if isinstance(found, str):
        raise NotHere(f"{requirement}: no wheel for this Python: {found}")
    return found


@functools.cache
def _download(requirement: str, folder: Path) -> Path | str:
    """Return where its files are, or what pip says why there are none."""
    python = f"{sys.version_info[0]}{sys.version_info[1]}"
    target = folder / f"{requirement.replace('==', '-')}-cp{python}"
    if target.is_dir():
        return target
    unpacking = target.with_name(f"{target.name}.{os.getpid()}")
    done = subprocess.run(
        [
            *(sys.executable, "-m", "pip", "download", "--quiet", "--disable-pip-version-check"),
            *(
                "--no-deps",
                "--only-binary=:all:",
                "--retries",
                "1",
                "--dest",
                str(unpacking),
                requirement,
            ),
        ],
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    name, version = requirement.split("==")
    found = sorted(unpacking.glob(f"{name.replace('-', '_')}-{version}-cp{python}-*.whl"))
    if done.returncode or not found:
        return " ".join(line for line in done.stderr.splitlines() if line.startswith("ERROR"))
    with zipfile.ZipFile(found[-1]) as archive:
        archive.extractall(unpacking)
    try:
        unpacking.rename(target)
    except OSError:
        # Another worker was faster.
        shutil.rmtree(unpacking)
    return target


def _libraries(major: int, source: Path, folder: Path) -> Path:
    """Each library that the bindings want, made of `source`."""
    compiler = shutil.which("gcc") or shutil.which("cc")
    if compiler is None:
        raise NotHere("no C compiler for the libraries; apt install gcc")
    digest = hashlib.sha256(source.read_bytes()).hexdigest()[:12]
    target = folder / f"libraries-{major}-{source.stem}-{digest}"
    target.mkdir(parents=True, exist_ok=True)
    for name in (*LIBRARIES, *(("nvparsers",) if major == 8 else ())):
        library = target / f"lib{name}.so.{major}"
        if not library.exists():
            being_built = library.with_suffix(f".{os.getpid()}")
            soname = f"-Wl,-soname,{library.name}"
            subprocess.run(
                [
                    *(compiler, "-shared", "-fPIC", f"-DMAJOR={major}", soname),
                    *("-o", being_built, source),
                ],
                check=True,
                timeout=60,
            )
            being_built.rename(library)
    return target


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0], allow_abbrev=False)
    parser.add_argument("--write", action="store_true", help="what was found, beside this file")
    write = parser.parse_args().write
    folder = HERE.parents[2] / "build" / "tensorrt_bindings"
    found = names() if NAMES.exists() else {version: {} for version in VERSIONS}
    renewed = dict(found)
    for version in WHEELS:
        try:
            renewed[version] = look(version, folder)
        except NotHere as error:
            print(f"TensorRT {version}: not looked at: {error}", file=sys.stderr)
        else:
            print(f"TensorRT {version}: {len(renewed[version])} classes", file=sys.stderr)
    if write:
        NAMES.write_text(written(renewed))
        return 0
    return 0 if renewed == found else 1


if __name__ == "__main__":
    sys.exit(main())
