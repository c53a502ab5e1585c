"""A package as a signed Mender artifact: written, verified and installed with the real tools.

`mender install` runs the update module in the order of its protocol, with real dpkg on a root of
its own; only the daemon behind `edge-server health` is a stand-in here, which tests/integration/
test_health.py has for real.
"""

from __future__ import annotations

import os
import shlex
import shutil
import subprocess
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from collections.abc import Sequence

UPDATE = Path(__file__).parents[2] / "jetpack" / "update"
TIMEOUT_S = 60
PATH = f"{os.environ['PATH']}:/usr/sbin:/sbin"

pytestmark = pytest.mark.skipif(
    os.geteuid() != 0 or shutil.which("mender-artifact") is None,
    reason="as root: apt install mender-artifact",
)


def run(*command: str | Path, path: str = PATH) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        command,
        capture_output=True,
        text=True,
        timeout=TIMEOUT_S,
        check=False,
        env={**os.environ, "PATH": path},
    )


class Device:
    """A device with a Mender client, and a dpkg that has version 1.0 installed.

    Args:
        folder: empty.
        client: the program `mender`.
    """

    def __init__(self, folder: Path, client: Path) -> None:
        self.folder = folder
        self._client = client
        self.key = folder / "release.key"
        assert run("openssl", "genrsa", "-traditional", "-out", self.key, "2048").returncode == 0
        run("openssl", "rsa", "-in", self.key, "-pubout", "-out", folder / "release.pub")
        self._root, self._bin = folder / "root", folder / "bin"
        self._bin.mkdir()
        self.kept = folder / "kept"
        self.kept.mkdir()
        admin = self._root / "var/lib/dpkg"
        for name in ("info", "updates", "triggers"):
            (admin / name).mkdir(parents=True)
        (admin / "status").write_text("")
        for name in ("dpkg", "dpkg-query"):
            self._program(name, f'exec /usr/bin/{name} --root={self._root} "$@"')
        self._program("apt-get", "exit 100")
        self.make_healthy(healthy=True)
        (self.kept / "current.deb").write_bytes(self.package("1.0").read_bytes())
        self.install(self.kept / "current.deb")

    def install(self, package: Path) -> None:
        """Install a package as a person does, without Mender."""
        assert run(self._bin / "dpkg", "--install", package).returncode == 0

    def make_healthy(self, *, healthy: bool) -> None:
        line = (
            f"[ $1 = health ] || set $1 $2 $3; echo $* >>{self.folder}/calls; "
            f"[ $1 = update ] || exit {0 if healthy else 69}"
        )
        self._program("edge-server", line)

    def package(self, version: str) -> Path:
        tree = self.folder / f"tree-{version}"
        (tree / "DEBIAN").mkdir(parents=True, exist_ok=True)
        (tree / "DEBIAN/control").write_text(
            f"Package: edge-server\nVersion: {version}\nArchitecture: all\n"
            "Maintainer: tests <tests@example.com>\nDescription: a stand-in\n"
        )
        (tree / "version").write_text(version)
        out = self.folder / f"edge-server_{version}_all.deb"
        assert run("dpkg-deb", "--build", "--root-owner-group", tree, out).returncode == 0
        return out

    def artifact(self, version: str) -> Path:
        out = self.folder / f"{version}.mender"
        done = run(
            UPDATE / "build_mender",
            *("--deb", self.package(version), "--device-type", "orin", "--key", self.key, out),
        )
        assert done.returncode == 0, done.stderr
        return out

    def mender(self, *arguments: str | Path) -> subprocess.CompletedProcess[str]:
        """Run the client, which sees our module where a device has it."""
        data, usr, etc = (self.folder / name for name in ("data", "usr-share", "etc"))
        data.mkdir(exist_ok=True)
        (data / "device_type").write_text("device_type=orin\n")
        (usr / "mender/modules/v3").mkdir(parents=True, exist_ok=True)
        shutil.copy(UPDATE / "mender/edge-server-deb", usr / "mender/modules/v3")
        (etc / "mender").mkdir(parents=True, exist_ok=True)
        (etc / "mender/artifact_info").write_text("artifact_name=flashed\n")
        config = self.folder / "mender.conf"
        config.write_text(f'{{"ArtifactVerifyKey": "{self.folder}/release.pub"}}')
        client = [str(self._client), "--config", str(config), "--data", str(data)]
        mounts = (
            f"mount -t overlay overlay -o lowerdir={ours}:{place} {place}"
            for ours, place in ((usr, "/usr/share"), (etc, "/etc"))
        )
        script = (
            f"{' && '.join(mounts)} && export EDGE_SERVER_KEPT={self.kept} && "
            f"export EDGE_COMMIT_ENV={self.folder}/commit.env && "
            f"exec {shlex.join([*client, *map(str, arguments)])}"
        )
        return run("unshare", "--mount", "sh", "-c", script, path=f"{self._bin}:{PATH}")

    @property
    def version(self) -> str:
        return (self._root / "version").read_text()

    @property
    def calls(self) -> list[str]:
        """What the module has called edge-server with."""
        return (self.folder / "calls").read_text().splitlines()

    @property
    def files(self) -> set[str]:
        return {path.name for path in self.kept.iterdir()}

    def _program(self, name: str, line: str) -> None:
        (self._bin / name).write_text(f"#!/bin/sh\n{line}\n")
        (self._bin / name).chmod(0o755)


@pytest.fixture(scope="module")
def client(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The client's program, unpacked: installed, it would run in every container of the tests."""
    folder = tmp_path_factory.mktemp("client")
    command = ["apt-get", "download", "mender-client"]
    done = subprocess.run(command, cwd=folder, capture_output=True, check=False, text=True)
    if done.returncode:
        pytest.skip(f"no Mender client here: {done.stderr.strip()}")
    (package,) = folder.glob("*.deb")
    assert run("dpkg-deb", "--extract", package, folder).returncode == 0
    return folder / "usr/bin/mender"


@pytest.fixture
def device(tmp_path: Path, client: Path) -> Device:
    return Device(tmp_path, client)


def ended(done: subprocess.CompletedProcess[str], expected: Sequence[int]) -> None:
    assert done.returncode in expected, done.stdout + done.stderr


def test_a_healthy_package_is_committed_and_is_the_way_back_from_the_next(device: Device) -> None:
    ended(device.mender("install", device.artifact("2.0")), [0])
    assert device.version == "2.0"
    ended(device.mender("commit"), [0])
    assert device.version == "2.0"
    assert device.files == {"current.deb"}
    calls = ["update record pending", "health --wait 120", "update record committed"]
    assert device.calls == calls
    field = run("dpkg-deb", "--field", device.kept / "current.deb", "Version")
    assert field.stdout.strip() == "2.0"


def test_a_package_that_is_not_healthy_is_replaced_by_the_one_before(device: Device) -> None:
    ended(device.mender("install", device.artifact("2.0")), [0])
    device.make_healthy(healthy=False)
    assert device.mender("commit").returncode != 0
    assert device.version == "1.0"
    assert device.files == {"current.deb"}
    assert device.calls[-1] == "update record rolled_back"


def test_going_back_by_hand_is_a_downgrade(device: Device) -> None:
    ended(device.mender("install", device.artifact("2.0")), [0])
    ended(device.mender("rollback"), [0])
    assert device.version == "1.0"


def test_a_changed_artifact_and_one_of_another_key_are_refused(device: Device) -> None:
    artifact = device.artifact("2.0")
    data = bytearray(artifact.read_bytes())
    data[len(data) // 2] ^= 1
    artifact.write_bytes(data)
    assert device.mender("install", artifact).returncode != 0
    assert run("openssl", "genrsa", "-traditional", "-out", device.key, "2048").returncode == 0
    assert device.mender("install", device.artifact("2.1")).returncode != 0
    assert device.version == "1.0"


def test_without_a_way_back_nothing_is_installed(device: Device) -> None:
    (device.kept / "current.deb").unlink()
    done = device.mender("install", device.artifact("2.0"))
    assert done.returncode != 0
    assert device.version == "1.0"


def test_a_refused_update_leaves_a_version_that_mender_did_not_bring(device: Device) -> None:
    """Mender rolls back after a refusal, too; what it kept is older than what runs."""
    device.install(device.package("1.5"))
    assert device.mender("install", device.artifact("2.0")).returncode != 0
    assert device.version == "1.5"
    assert device.calls == ["update record failed"]


@pytest.mark.parametrize("quote", ["", '"'])
def test_the_way_back_is_taken_whatever_the_settings_of_the_commit_have(
    device: Device, quote: str
) -> None:
    """systemd takes both forms; as a shell's text the first would be a command."""
    (device.folder / "commit.env").write_text(
        f"WAIT=5\nREQUIRE={quote}--require no-such-command{quote}\n"
    )
    ended(device.mender("install", device.artifact("2.0")), [0])
    device.make_healthy(healthy=False)
    assert device.mender("commit").returncode != 0
    assert device.version == "1.0"
    assert "health --wait 120 --require no-such-command" in device.calls
