"""What lies where in the package."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from typing import TYPE_CHECKING

from debian_package.wheels import CHECKOUT, install_wheels

if TYPE_CHECKING:
    from pathlib import Path

    from debian_package.targets import Target

# In /usr, not in /opt: the package is part of the system's image, which an update replaces as a
# whole and may mount read-only; Debian's policy leaves /opt to software without a package.
HOME = "usr/lib/edge-server"
MODELS = "usr/share/edge_server/models"

# An environment as `python3 -m venv --system-site-packages` would make it; its interpreter is a
# link to the distribution's, so it also fits a build for another architecture. What apt installed
# (TensorRT, OpenCV, PyGObject) comes after its own.
_PYVENV = """\
home = /usr/bin
include-system-site-packages = true
version = {python}
"""

# Isolated: a shell's PYTHONPATH (of ROS, say), a home's packages and the current folder change
# nothing. That also hides PYTHONFAULTHANDLER=1 of the unit.
_LAUNCHER = f"""\
#!/bin/sh
exec /{HOME}/bin/python3 -I -X faulthandler -m edge_server "$@"
"""

# Where systemd finds each kind of file of systemd/, all named edge-server*.
_SYSTEMD = {
    ".service": "usr/lib/systemd/system",
    ".path": "usr/lib/systemd/system",
    ".timer": "usr/lib/systemd/system",
    ".sysusers": "usr/lib/sysusers.d",
    ".tmpfiles": "usr/lib/tmpfiles.d",
    ".preset": "usr/lib/systemd/system-preset",
    ".generator": "usr/lib/systemd/system-generators",
    ".catalog": "usr/lib/systemd/catalog",
    ".devices": "usr/share/edge_server/devices",
}
# What systemd wants of their names.
_NAMED = {".sysusers": ".conf", ".tmpfiles": ".conf", ".devices": ".conf", ".generator": ""}


# Where each shell finds what the packages of others complete.
_COMPLETIONS = {
    "bash": "usr/share/bash-completion/completions/edge-server",
    "zsh": "usr/share/zsh/vendor-completions/_edge-server",
    "fish": "usr/share/fish/vendor_completions.d/edge-server.fish",
}


def lay_out(target: Target, root: Path) -> None:
    """Fill the empty folder `root` with all that the package installs but its documentation.

    Raises:
        SystemExit: a wheel is not there or not as locked, or a file of `systemd/` has no place.
    """
    _lay_out_environment(target, root)
    _lay_out_models(target, root)
    _lay_out_systemd(root)
    _lay_out_completions(site_packages(target, root), root)


def site_packages(target: Target, root: Path) -> Path:
    return root / HOME / f"lib/python{target.python}/site-packages"


def units(root: Path) -> list[str]:
    """The names of the package's units that can be enabled, without templates."""
    found = (root / _SYSTEMD[".service"]).iterdir()
    enabled = (path.name for path in found if "\n[Install]\n" in path.read_text())
    return sorted(name for name in enabled if "@" not in name)


def _lay_out_environment(target: Target, root: Path) -> None:
    site = site_packages(target, root)
    site.mkdir(parents=True)
    install_wheels(target, site)
    (root / HOME / "pyvenv.cfg").write_text(_PYVENV.format(python=target.python))
    interpreter = root / HOME / "bin/python3"
    interpreter.parent.mkdir()
    interpreter.symlink_to(f"../../../bin/python{target.python}")
    launcher = root / "usr/bin/edge-server"
    launcher.parent.mkdir()
    launcher.write_text(_LAUNCHER)


def _lay_out_models(target: Target, root: Path) -> None:
    # A version directory that has nothing to load from needs no file to exist here.
    shutil.copytree(
        CHECKOUT / "models", root / MODELS, ignore=shutil.ignore_patterns(".gitkeep", "__pycache__")
    )
    inside = site_packages(target, root) / "edge_server/models"
    shutil.rmtree(inside)
    inside.symlink_to(os.path.relpath(root / MODELS, inside.parent))


def _lay_out_systemd(root: Path) -> None:
    for path in sorted((CHECKOUT / "systemd").iterdir()):
        if path.suffix == ".toml":
            place = root / "etc/edge_server/config.toml"
        elif path.suffix not in _SYSTEMD:
            raise SystemExit(f"build_deb: systemd/{path.name}: no place is known for {path.suffix}")
        else:
            name = path.stem + _NAMED.get(path.suffix, path.suffix)
            place = root / _SYSTEMD[path.suffix] / name
        place.parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(path, place)


def _lay_out_completions(site: Path, root: Path) -> None:
    """Write what the packaged command line itself says of its verbs and flags; that imports nothing
    of the other architecture."""
    for shell, name in _COMPLETIONS.items():
        place = root / name
        place.parent.mkdir(parents=True, exist_ok=True)
        command = (sys.executable, "-B", "-m", "edge_server", "completion", shell)
        with place.open("wb") as file:
            subprocess.run(command, stdout=file, check=True, env={"PYTHONPATH": str(site)})
