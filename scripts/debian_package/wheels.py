"""The wheels of a target: locked with hashes, installed for another machine than this one."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, Any

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

from debian_package.targets import LOCKS, UNUSED

if TYPE_CHECKING:
    from debian_package.targets import Target

CHECKOUT = Path(__file__).parents[2]

TOOLS_LOCK = LOCKS / "tools.txt"
_TOOLS = ("uv", "cyclonedx-bom", "setuptools>=77", "tomli; python_version < '3.11'")
_TOOLS_HEADER = "# What builds the package; `scripts/build_deb --update-locks` writes this file.\n"

_LOCK_HEADER = """\
# The wheels of {name}; `scripts/build_deb --update-locks` writes this file.
# Left out, as nothing here needs it: {unused}.
"""

# Tests, what compilers and type checkers read, commands, and how and whence a wheel came here.
# Metadata and licences stay.
_SUPERFLUOUS_FOLDERS = ("tests", "bin", "__pycache__")
# What of ONNX Runtime needs the packages of UNUSED, or none of what is here.
_CONVERTERS = ("transformers", "quantization", "tools", "datasets")
_SUPERFLUOUS_FILES = (
    *("*.pyi", "*.pxd", "*.pyx", "*.h", "*.hpp", "*.a", "*.lib", "*.c", "*.f90"),
    *("RECORD", "INSTALLER", "REQUESTED", "direct_url.json", "uv_cache.json", ".lock"),
)

_AUTHORITIES = "/etc/ssl/certs/ca-certificates.crt"


def project_version() -> str:
    return str(_project()["version"])


def update_lock(target: Target) -> None:
    """Write the target's lock anew, each version the newest that fits."""
    wanted = [*_project()["dependencies"], *target.requirements]
    unused = "".join(f"{name}; sys_platform == 'none'\n" for name in UNUSED)
    with tempfile.TemporaryDirectory() as folder:
        override = Path(folder, "unused.txt")
        override.write_text(unused)
        locked = _uv(
            *("pip", "compile", "--quiet", "--upgrade", "--generate-hashes", "--no-header"),
            *("--no-annotate", "--override", str(override), *_fits(target), "-"),
            stdin="\n".join(wanted),
        )
    header = _LOCK_HEADER.format(name=target.name, unused=", ".join(UNUSED))
    target.lock.write_text(header + locked)


def update_tools() -> None:
    """Write anew the lock of what builds the package, for any Python and machine."""
    locked = _uv(
        *("pip", "compile", "--quiet", "--upgrade", "--generate-hashes", "--no-header"),
        *("--no-annotate", "--universal", "--python-version", "3.10", "-"),
        stdin="\n".join(_TOOLS),
    )
    TOOLS_LOCK.write_text(_TOOLS_HEADER + locked)


def install_wheels(target: Target, site: Path) -> None:
    """Put the locked wheels, and edge_server itself, into `site`: only what runs is left of them.

    Raises:
        SystemExit: there is no lock, or a wheel is not what the lock says.
    """
    if not target.lock.is_file():
        raise SystemExit(f"build_deb: {target.lock} is missing; --update-locks writes it")
    into = ("--target", str(site), "--link-mode", "copy", "--no-deps", *_fits(target))
    _uv("pip", "install", "--quiet", "--require-hashes", *into, "-r", str(target.lock))
    compiled = sorted(target.own_wheels.glob("*.whl"))
    with tempfile.TemporaryDirectory() as folder:
        wheels = (_own_wheel(Path(folder)), *compiled)
        _uv("pip", "install", "--quiet", *into, *map(str, wheels))
    for path in sorted(site.rglob("*"), reverse=True):
        if path.is_dir() and not path.is_symlink():
            converts = path.parent == site / "onnxruntime" and path.name in _CONVERTERS
            if path.name in _SUPERFLUOUS_FOLDERS or converts:
                shutil.rmtree(path)
        elif any(path.match(pattern) for pattern in _SUPERFLUOUS_FILES) and not _is_own(path, site):
            path.unlink()
    # Whom a collector's certificate must be signed by, the machine's administrator says.
    for bundle in site.glob("certifi/cacert.pem"):
        bundle.unlink()
        bundle.symlink_to(_AUTHORITIES)
    (own,) = site.glob("edge_server-*.dist-info")
    # edge_server reads it when it names a remedy: apt's, not pip's.
    (own / "INSTALLER").write_text("dpkg\n")


def _is_own(path: Path, site: Path) -> bool:
    """edge_server's headers are the sources of its kernels, which `doctor` names."""
    return path.relative_to(site).parts[0] == "edge_server"


def _own_wheel(folder: Path) -> Path:
    source = folder / "source"
    ignore = shutil.ignore_patterns("__pycache__", "*.egg-info")
    for name in ("edge_server", "models"):
        shutil.copytree(CHECKOUT / name, source / name, symlinks=True, ignore=ignore)
    for name in ("pyproject.toml", "README.md"):
        shutil.copy(CHECKOUT / name, source)
    build = "import setuptools.build_meta as b; b.build_wheel('..')"
    subprocess.run([sys.executable, "-c", build], cwd=source, check=True, capture_output=True)
    (wheel,) = folder.glob("*.whl")
    return wheel


def _fits(target: Target) -> tuple[str, ...]:
    return (
        *("--python-version", target.python, "--python-platform", target.platform),
        *("--only-binary", ":all:"),
    )


def _project() -> dict[str, Any]:
    with (CHECKOUT / "pyproject.toml").open("rb") as file:
        return dict(tomllib.load(file)["project"])


def _uv(*arguments: str, stdin: str = "") -> str:
    done = subprocess.run(
        [Path(sys.executable).with_name("uv"), *arguments],
        input=stdin,
        capture_output=True,
        text=True,
        check=False,
        # No other Python is needed: nothing is compiled.
        env={**os.environ, "UV_PYTHON_DOWNLOADS": "never"},
    )
    if done.returncode:
        raise SystemExit(f"build_deb: uv {' '.join(arguments[:2])}: {done.stderr.strip()}")
    return done.stdout
