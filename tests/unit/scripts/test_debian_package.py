"""What the package promises is read from its own parts, without building it."""

from __future__ import annotations

import re
import struct
from typing import TYPE_CHECKING

import pytest
from debian_package.control import _filled
from debian_package.elf import MACHINES, faults, read_library
from debian_package.targets import TARGETS, UNUSED, target_named
from debian_package.tree import _lay_out_systemd, units
from debian_package.wheels import _project

if TYPE_CHECKING:
    from pathlib import Path

    from debian_package.targets import Target

NEEDED = b"\0libc.so.6\0libextra.so.1\0libcuda.so.1\0"
OLD, NEW = b"GLIBC_2.17\0GLIBC_2.35\0", b"GLIBC_2.4\0GLIBC_2.36\0"


def library(
    *, machine: int = 62, shift: int = 0, needed: tuple[int, ...] = (1,), versions: bytes = OLD
) -> bytes:
    """An ELF file with one loaded segment of 4 KiB alignment; `shift` moves it within its page.

    `needed`: offsets of names in NEEDED.
    """
    headers, page = 64 + 2 * 56, 4096
    dynamic = b"".join(struct.pack("<qQ", 1, offset) for offset in needed)
    strings = NEEDED + versions
    dynamic += struct.pack("<qQqQQQ", 5, page + headers, 10, len(strings), 0, 0)
    end = headers + len(strings) + len(dynamic)
    elf = b"\x7fELF\x02\x01\x01" + bytes(9)
    elf += struct.pack("<HHIQQQIHHHHHH", 3, machine, 1, 0, 64, 0, 0, 64, 56, 2, 0, 0, 0)
    elf += struct.pack("<IIQQQQQQ", 1, 5, 0, page + shift, 0, end, end, page)
    elf += struct.pack("<IIQQQQQQ", 2, 6, headers + len(strings), 0, 0, len(dynamic), 0, 8)
    return elf + strings + dynamic


@pytest.mark.parametrize(
    ("content", "says"),
    [
        (library(), []),
        (library(machine=183), ["m.so: is for another architecture than x86_64"]),
        (library(shift=16, needed=()), ["m.so: a segment is not page-aligned (was it stripped?)"]),
        (
            library(needed=(1, 11)),
            ["m.so: needs libextra.so.1, which no dependency of the package provides"],
        ),
        (library(versions=NEW), ["m.so: needs glibc 2.36, newer than the target's 2.35"]),
        # Only a board's package depends on the driver.
        (
            library(needed=(25,)),
            ["m.so: needs libcuda.so.1, which no dependency of the package provides"],
        ),
        # A kernel, which the GPU's driver loads.
        (library(machine=190), []),
        (b"#!/bin/sh\n", []),
    ],
)
def test_a_library_that_the_target_cannot_load_is_named(
    tmp_path: Path, content: bytes, says: list[str]
) -> None:
    (tmp_path / "m.so").write_bytes(content)
    assert list(faults(tmp_path, "x86_64", "2.35", {"libc6"})) == says


def test_a_library_may_need_another_of_the_package(tmp_path: Path) -> None:
    (tmp_path / "m.so").write_bytes(library(needed=(11,)))
    (tmp_path / "libextra.so.1").write_bytes(library())
    assert list(faults(tmp_path, "x86_64", "2.35", {"libc6"})) == []


def test_a_library_that_is_cut_short_is_named(tmp_path: Path) -> None:
    path = tmp_path / "m.so"
    path.write_bytes(library()[:100])
    with pytest.raises(ValueError, match=r"m\.so: this ELF file is cut short"):
        read_library(path)


@pytest.mark.parametrize("target", TARGETS.values(), ids=TARGETS)
def test_every_wheel_of_a_lock_has_a_hash_and_none_is_of_what_apt_brings(target: Target) -> None:
    lock = target.lock.read_text()
    wheels = re.findall(
        r"^([a-z0-9-]+)==\S+ \\\n    --hash=sha256:[0-9a-f]{64}", lock, re.MULTILINE
    )
    assert len(wheels) == len(re.findall(r"^[a-z]", lock, re.MULTILINE))
    assert {"numpy", "grpcio", "tritonclient", "onnxruntime"} <= set(wheels)
    assert not set(UNUSED) & set(wheels)
    # On a Jetson a wheel would hide JetPack's own.
    assert ("opencv-python-headless" in wheels) == (target.architecture == "amd64")
    assert "tensorrt" not in wheels


def test_an_unknown_target_is_refused_with_those_there_are() -> None:
    with pytest.raises(SystemExit, match="no target woody-mips; there are jammy-arm64"):
        target_named("woody-mips")


def test_a_target_names_architecture_and_platform() -> None:
    target = target_named("jammy-arm64")
    assert target.platform == "aarch64-manylinux_2_35"
    assert target.machine in MACHINES


def test_every_file_of_systemd_has_its_place(tmp_path: Path) -> None:
    _lay_out_systemd(tmp_path)
    # What nothing but another unit starts is not enabled, and an installation starts none of it.
    assert {"edge-server.service", "edge-server-argus.path"} <= set(units(tmp_path))
    assert "edge-server-argus.service" not in units(tmp_path)
    assert (tmp_path / "usr/lib/sysusers.d/edge-server.conf").is_file()
    # Only settings are conffiles.
    assert [path.name for path in (tmp_path / "etc").rglob("*.*")] == ["config.toml"]


@pytest.mark.parametrize("name", ["postinst", "prerm", "postrm"])
def test_maintainer_scripts_are_filled_and_leave_the_shells_own_alone(name: str) -> None:
    values = {
        "UNITS": "edge-server.service",
        "TEMPLATE": "edge-server@*.service",
        "DAEMON": "edge-server.service",
        "OTHERS": "edge-server-plans.service",
        "HOME": "/usr/lib/edge-server",
        "PYTHON": "3.10",
    }
    script = _filled(name, values)
    assert "edge-server.service" in script
    assert not re.search(r"@[A-Z]+@", script)
    assert '"$1"' in script
    assert script.splitlines()[0] == "#!/bin/sh"


@pytest.mark.parametrize("target", TARGETS.values(), ids=str)
def test_every_package_that_the_project_asks_for_is_locked(target: Target) -> None:
    locked = set(re.findall(r"^([a-z0-9-]+)==", target.lock.read_text(), re.MULTILINE))
    wanted = {
        re.split(r"[\[<>=;]", each)[0]
        for each in _project()["dependencies"]
        if "python_version" not in each
    }
    assert wanted <= locked
