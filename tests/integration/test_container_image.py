"""The image of jetpack/Containerfile, built by buildah on a root of Debian 12 in the place of
NVIDIA's, and run."""

from __future__ import annotations

import os
import shutil
import subprocess
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from collections.abc import Callable

CHECKOUT = Path(__file__).parents[2]
BASE, IMAGE = "localhost/base", "localhost/edge-server"

pytestmark = pytest.mark.long


@pytest.fixture
def buildah(tmp_path: Path) -> Callable[..., str]:
    if os.geteuid() != 0:
        pytest.skip("needs root: it mounts what it builds")
    for tool in ("buildah", "mmdebstrap"):
        if shutil.which(tool) is None:
            pytest.skip(f"{tool} is missing: apt install {tool}")
    options = ["--root", str(tmp_path / "images"), "--runroot", str(tmp_path / "run")]

    def run(*arguments: str | Path) -> str:
        done = subprocess.run(
            ["buildah", *options, "--storage-driver", "vfs", *arguments],
            # Without a container's runtime: what it runs is in a chroot with namespaces of its own.
            env={**os.environ, "BUILDAH_ISOLATION": "chroot", "TMPDIR": str(tmp_path)},
            capture_output=True,
            text=True,
            check=False,
        )
        assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-4000:]
        return done.stdout.strip() + done.stderr.strip() * (arguments[0] == "run")

    return run


def test_it_is_built_on_another_image_and_shows_lanes(
    buildah: Callable[..., str], tmp_path: Path
) -> None:
    context = tmp_path / "context"
    command = [
        CHECKOUT / "scripts/build_deb",
        "--target",
        "bookworm-amd64",
        "--compression",
        "fast",
    ]
    subprocess.run([*command, "--out", context], check=True, capture_output=True)
    base = tmp_path / "base.tar"
    debian = ("--variant=minbase", "--include=ca-certificates", "bookworm")
    subprocess.run(["mmdebstrap", "--quiet", *debian, base], check=True)
    root = buildah("from", "scratch")
    buildah("add", "--quiet", root, base, "/")
    buildah("commit", "--quiet", "--rm", root, BASE)
    containerfile = CHECKOUT / "jetpack/Containerfile"
    buildah("build", "--build-arg", f"FROM={BASE}", "-f", containerfile, "-t", IMAGE, context)
    container = buildah("from", IMAGE)

    def inside(*arguments: str) -> str:
        return buildah("run", "--workingdir", "/var/lib/edge_server", container, "--", *arguments)

    assert inside("id", "--name", "--user") == "edge-server"
    # The driver of a board counts as installed, and the journal has its library.
    assert "nvidia-l4t-cuda" in inside("dpkg-query", "--show", "--showformat=${Provides}\\n")
    inside("/usr/lib/edge-server/bin/python3", "-I", "-c", "import systemd.journal")
    inside("edge-server", "check", "--config", "/etc/edge_server/config.toml")
    shown = inside("edge-server", "demo", "--frames", "20")
    # Camera, frames, frames per second, age, ms of the model, lanes.
    counts = [int(row.split()[5]) for row in shown.splitlines() if row.lstrip().startswith("road ")]
    assert max(counts) >= 2, shown
