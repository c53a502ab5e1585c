"""A whole release, made of a copy of the checkout; the checks and the packages are stand-ins."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tarfile
import tempfile
import zipfile
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from collections.abc import Iterator

ROOT = Path(__file__).parents[2]
VERSION = "0.1.0"
KEY = "releases@test.invalid"
# As scripts/build_deb is called; the package is empty, its bill of materials too.
BUILD_DEB = """\
#!/bin/sh -e
name=edge-server_0.1.0-1~${2%-*}_${2#*-}
mkdir -p "build/$name/DEBIAN"
cat >"build/$name/DEBIAN/control" <<CONTROL
Package: edge-server
Version: 0.1.0-1~${2%-*}
Architecture: ${2#*-}
Maintainer: tests <tests@test.invalid>
Description: stands in
CONTROL
dpkg-deb --root-owner-group --build "build/$name" "$4/$name.deb"
echo '{}' >"$4/$name.cdx.json"
"""

pytestmark = pytest.mark.long


@pytest.fixture
def environment(monkeypatch: pytest.MonkeyPatch) -> Iterator[dict[str, str]]:
    """An environment in which gpg signs as `KEY`, and pip needs no network."""
    for tool, package in (("gpg", "gnupg"), ("apt-ftparchive", "apt-utils")):
        if shutil.which(tool) is None:
            pytest.skip(f"{tool} is missing: apt install {package}")
    # A socket's path has at most 107 characters.
    with tempfile.TemporaryDirectory(prefix="gpg.", dir="/tmp") as home:
        variables = {
            **os.environ,
            "GNUPGHOME": home,
            "GIT_CONFIG_GLOBAL": os.devnull,
            "EMAIL": KEY,
            "PIP_NO_BUILD_ISOLATION": "0",
        }
        make = ["gpg", "--batch", "--passphrase", "", "--quick-generate-key", KEY, "ed25519"]
        subprocess.run(make, env=variables, check=True, capture_output=True)
        yield variables
        subprocess.run(["gpgconf", "--kill", "gpg-agent"], env=variables, check=True)


@pytest.fixture
def checkout(tmp_path: Path, environment: dict[str, str]) -> Path:
    """A repository with the checkout's files, as one commit that is ready for a release."""
    copy = tmp_path / "checkout"
    copy.mkdir()
    listed = subprocess.run(["git", "ls-files"], cwd=ROOT, check=True, capture_output=True)
    pack = subprocess.run(
        ["tar", "-c", "-T", "-"], cwd=ROOT, input=listed.stdout, check=True, capture_output=True
    )
    subprocess.run(["tar", "-x"], cwd=copy, input=pack.stdout, check=True)
    for script, text in (("check", "#!/bin/sh\n"), ("build_deb", BUILD_DEB)):
        (copy / "scripts" / script).write_text(text)
    changes = copy / "CHANGELOG.md"
    changes.write_text(changes.read_text().replace("## Not released", f"## {VERSION} (today)"))
    for target in ("jammy-arm64", "noble-arm64"):
        wheel = copy / "dist/wheels" / target / "pycuda-0-any.whl"
        wheel.parent.mkdir(parents=True)
        wheel.touch()
    for name in {".venv-package", ".venv-3.12", ".venv-{}.{}".format(*sys.version_info)}:
        (copy / name).symlink_to(sys.prefix)
    for command in (["init", "--quiet"], ["add", "."], ["commit", "--quiet", "--message=all"]):
        subprocess.run(["git", *command], cwd=copy, env=environment, check=True)
    return copy


def test_one_command_makes_a_release_that_verifies(
    checkout: Path, environment: dict[str, str]
) -> None:
    def run(*command: str | Path, cwd: Path = checkout) -> str:
        done = subprocess.run(
            command, cwd=cwd, env=environment, capture_output=True, text=True, check=False
        )
        assert done.returncode == 0, done.stdout + done.stderr
        return done.stdout

    release = ("scripts/release", "--key", KEY, VERSION)
    assert run(*release).splitlines()[-1] == f"dist/release/{VERSION}"
    out = checkout / "dist/release" / VERSION
    run("gpg", "--verify", "SHA256SUMS.asc", "SHA256SUMS", cwd=out)
    run("sha256sum", "--check", "SHA256SUMS", cwd=out)
    run("git", "tag", "--verify", f"v{VERSION}")
    targets = [path.stem for path in (ROOT / "scripts/debian_package/locks").glob("*-*.txt")]
    debs = [f"edge-server_{VERSION}-1~{'_'.join(target.split('-'))}" for target in targets]
    wheels = [f"edge_{name}-{VERSION}-py3-none-any.whl" for name in ("server", "lanes")]
    archives = [f"edge_lanes-cpp-{VERSION}.tar.gz", f"edge-server-site-{VERSION}.tar.gz"]
    summed = {line.split()[1] for line in (out / "SHA256SUMS").read_text().splitlines()}
    assert summed == {
        *(f"{deb}{suffix}" for deb in debs for suffix in (".deb", ".cdx.json")),
        *(*wheels, *archives, "NOTES.md"),
    }
    assert {path.name for path in out.iterdir()} - summed == {
        *("SHA256SUMS", "SHA256SUMS.asc", "repository")
    }
    notes = (out / "NOTES.md").read_text()
    assert notes.startswith(f"## {VERSION} (today)\n")
    assert notes.count("\n## ") == 0
    assert {path.name for path in out.glob("repository/dists/*")} == {"jammy", "noble", "bookworm"}
    assert (
        "edge_server/models/laneDetect_model/1/model.onnx"
        in zipfile.ZipFile(out / wheels[0]).namelist()
    )
    for archive, inside in zip(
        archives,
        (f"edge_lanes-cpp-{VERSION}/clients/cpp/CMakeLists.txt", "site/index.html"),
        strict=True,
    ):
        with tarfile.open(out / archive) as packed:
            assert inside in packed.getnames()
    again = subprocess.run(
        release, cwd=checkout, env=environment, capture_output=True, text=True, check=False
    )
    assert again.returncode == 1
    assert f"release: tag v{VERSION} exists: choose another version" in again.stderr
