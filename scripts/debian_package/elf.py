"""Gates on the libraries of wheels: the target can load them and has what they are linked to."""

from __future__ import annotations

import re
import struct
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Collection, Iterator
    from pathlib import Path

MACHINES = {"x86_64": 62, "aarch64": 183}
_CUDA = 190  # kernels, which the GPU's driver loads

# Library and the package that provides it, of those that a wheel may expect from the system.
PROVIDED = {
    **dict.fromkeys(
        (
            *("libc.so.6", "libm.so.6", "libpthread.so.0", "libdl.so.2", "librt.so.1"),
            *("ld-linux-aarch64.so.1", "ld-linux-x86-64.so.2", "libutil.so.1"),
        ),
        "libc6",
    ),
    "libstdc++.so.6": "libstdc++6",
    "libgcc_s.so.1": "libgcc-s1",
    "libz.so.1": "zlib1g",
    "libcuda.so.1": "nvidia-l4t-cuda",
}
_PT_LOAD, _PT_DYNAMIC = 1, 2
_DT_NEEDED, _DT_STRTAB, _DT_STRSZ = 1, 5, 10
_GLIBC = re.compile(rb"\0GLIBC_([0-9]+\.[0-9]+)")


@dataclass(frozen=True)
class Library:
    """What the loader wants to know of a file.

    Attributes:
        machine: ELF's number of the architecture.
        aligned: whether each loaded segment lies in the file as it lies in a page.
        needed: the names of the libraries that it is linked to.
        glibc: the newest version of glibc whose symbols it uses, (0, 0) without any.
    """

    machine: int
    aligned: bool
    needed: tuple[str, ...]
    glibc: tuple[int, int]


def read_library(path: Path) -> Library | None:
    """The library in a file; None of a file that is no 64-bit little-endian ELF.

    Raises:
        ValueError: the file is cut short.
    """
    data = path.read_bytes()
    if data[:6] != b"\x7fELF\x02\x01":
        return None
    try:
        return _read(data)
    except (struct.error, IndexError) as error:
        raise ValueError(f"{path}: this ELF file is cut short") from error


def faults(tree: Path, machine: str, glibc: str, packages: Collection[str]) -> Iterator[str]:
    """What keeps the target's loader from loading the libraries under `tree`, a line for each.

    Args:
        glibc: the target's version.
        packages: names of those that are installed with this one.
    """
    libraries = {
        path: library
        for path in sorted(tree.rglob("*"))
        if path.is_file() and not path.is_symlink() and (library := read_library(path))
        if library.machine != _CUDA
    }
    inside = {path.name for path in libraries}
    for path, library in libraries.items():
        name = path.relative_to(tree)
        if library.machine != MACHINES[machine]:
            yield f"{name}: is for another architecture than {machine}"
        if not library.aligned:
            yield f"{name}: a segment is not page-aligned (was it stripped?)"
        if library.glibc > _version(glibc):
            newer = ".".join(map(str, library.glibc))
            yield f"{name}: needs glibc {newer}, newer than the target's {glibc}"
        for needed in library.needed:
            if needed not in inside and PROVIDED.get(needed) not in packages:
                yield f"{name}: needs {needed}, which no dependency of the package provides"


def _read(data: bytes) -> Library:
    machine: int = struct.unpack_from("<H", data, 18)[0]
    (start,) = struct.unpack_from("<Q", data, 32)
    size, count = struct.unpack_from("<HH", data, 54)
    aligned = True
    loads: list[tuple[int, int, int]] = []
    dynamic = None
    for index in range(count):
        kind, _, offset, address, _, length, _, align = struct.unpack_from(
            "<IIQQQQQQ", data, start + index * size
        )
        if kind == _PT_LOAD:
            loads.append((address, offset, length))
            aligned &= align < 2 or (offset - address) % align == 0
        elif kind == _PT_DYNAMIC:
            dynamic = (offset, length)
    if dynamic is None:
        return Library(machine, aligned, (), (0, 0))
    entries, strings = _dynamic(data, dynamic, loads)
    needed = [strings[value:].split(b"\0", 1)[0] for tag, value in entries if tag == _DT_NEEDED]
    versions = (_version(each.decode()) for each in _GLIBC.findall(strings))
    return Library(
        machine, aligned, tuple(name.decode() for name in needed), max(versions, default=(0, 0))
    )


def _dynamic(
    data: bytes, dynamic: tuple[int, int], loads: list[tuple[int, int, int]]
) -> tuple[list[tuple[int, int]], bytes]:
    """The entries for the loader, and the table of their strings."""
    offset, length = dynamic
    entries = list(struct.iter_unpack("<qQ", data[offset : offset + length - length % 16]))
    values = dict(entries)
    address, size = values.get(_DT_STRTAB, 0), values.get(_DT_STRSZ, 0)
    begin = next(at + address - a for a, at, length in loads if a <= address < a + length)
    return entries, data[begin : begin + size]


def _version(text: str) -> tuple[int, int]:
    major, minor = text.split(".")[:2]
    return int(major), int(minor)
