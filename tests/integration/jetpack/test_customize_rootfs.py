"""customize_rootfs.sh, on an overlay over this machine's root, and on a new Debian that boots."""

from __future__ import annotations

import hashlib
import shutil
import subprocess
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from support.flashed_board import FlashedBoard, skip_where_no_disk_can_be_made
from support.systemd_machine import Container, skip_where_no_container_can_be_made
from support.waiting import wait_until

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

pytestmark = pytest.mark.early

CHECKOUT = Path(__file__).parents[3]
SCRIPT = CHECKOUT / "jetpack/customize_rootfs.sh"
L4T = "# R36 (release), REVISION: 5.0, GCID: 1, BOARD: generic, EABI: aarch64, DATE: x\n"
# What apt and dpkg write down of their own runs.
ENDS = ("running", "degraded")
LOGS = ("var/log/", "var/cache/", "var/lib/apt/")


def state(folder: Path) -> dict[str, tuple[int, int, int, str]]:
    """Mode, owner and content of everything below, but logs and caches."""
    found = {}
    for path in sorted(folder.rglob("*")):
        name = str(path.relative_to(folder))
        if name.startswith(LOGS):
            continue
        of = path.lstat()
        if path.is_symlink():
            content = str(path.readlink())
        elif path.is_file():
            content = hashlib.sha256(path.read_bytes()).hexdigest()
        else:
            content = ""
        found[name] = (of.st_mode, of.st_uid, of.st_gid, content)
    return found


def nvidia_package(folder: Path) -> Path:
    """An empty package with the name of one of NVIDIA's."""
    control = folder / "nvidia-l4t-core/DEBIAN/control"
    control.parent.mkdir(parents=True)
    control.write_text(
        "Package: nvidia-l4t-core\nVersion: 36.5.0\nArchitecture: all\nMaintainer: a test\n"
        "Description: stands in for NVIDIA's\n"
    )
    deb = folder / "nvidia-l4t-core_36.5.0_all.deb"
    command = ("dpkg-deb", "--build", "--root-owner-group", control.parents[1], deb)
    subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
    return deb


class Overlay:
    """A root file system like this machine's; what is written to it lies in `upper` alone."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self.upper = folder / "layer/upper"
        self.root = folder / "rootfs"
        self.root.mkdir()
        (folder / "layer").mkdir()
        # The upper layer must not lie on an overlay itself.
        self._mount("tmpfs", "tmpfs", "mode=755", folder / "layer")
        (folder / "layer/upper/etc").mkdir(parents=True)
        (folder / "layer/work").mkdir()
        layers = f"lowerdir=/,upperdir={self.upper},workdir={folder}/layer/work"
        self._mount("overlay", "overlay", layers, self.root)
        (self.root / "etc/nv_tegra_release").write_text(L4T)
        # None of this machine's users, which may have passwords.
        for name in ("passwd", "shadow"):
            lines = (self.root / f"etc/{name}").read_text().splitlines()
            users = [line.split(":") for line in lines]
            kept = [u for u in users if name == "shadow" or int(u[2]) < 1000 or u[0] == "nobody"]
            for user in kept if name == "shadow" else ():
                user[1] = "*"
            (self.root / f"etc/{name}").write_text("".join(f"{':'.join(u)}\n" for u in kept))

    def close(self) -> None:
        subprocess.run(["umount", self.root], check=False)
        subprocess.run(["umount", self._folder / "layer"], check=False)

    def _mount(self, kind: str, what: str, options: str, where: Path) -> None:
        command = ["mount", "-t", kind, "-o", options, what, where]
        if subprocess.run(command, check=False, capture_output=True).returncode:
            pytest.skip(f"{kind} mounts are not allowed here")


@pytest.fixture
def overlay(tmp_path: Path) -> Iterator[Overlay]:
    skip_where_no_container_can_be_made()
    for tool in ("sudo", "sshd", "mcopy", "sfdisk", "openssl", "apt-get"):
        if shutil.which(tool, path="/usr/sbin:/usr/bin:/sbin:/bin") is None:
            pytest.skip(f"{tool} is missing: apt install sudo openssh-server mtools fdisk openssl")
    made = Overlay(tmp_path)
    yield made
    made.close()


def customize(root: Path, *arguments: str | Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [SCRIPT, root, *arguments], capture_output=True, text=True, check=False, timeout=900
    )


def ssh_key(folder: Path) -> Path:
    make = ("ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", folder / "key")
    subprocess.run(make, check=True)
    return folder / "key.pub"


def test_a_second_run_changes_nothing(overlay: Overlay, tmp_path: Path) -> None:
    arguments = ("--deb", nvidia_package(tmp_path), "--ssh-key", ssh_key(tmp_path))
    root = overlay.root
    (root / "etc/ssh/ssh_host_rsa_key").write_text("a key that every board would share")
    (root / "etc/machine-id").write_text("0123456789abcdef0123456789abcdef\n")
    done = customize(root, *arguments)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "held nvidia-l4t-core" in done.stdout
    assert (root / "etc/machine-id").read_bytes() == b""
    assert not list((root / "etc/ssh").glob("ssh_host_*"))
    assert (root / "etc/sudoers.d/50-edge-server").stat().st_mode & 0o777 == 0o440
    assert (root / "etc/systemd/system/default.target").readlink().name == "multi-user.target"
    assert not (overlay.upper / "usr/sbin/policy-rc.d").is_file()
    shadow = dict(line.split(":")[:2] for line in (root / "etc/shadow").read_text().splitlines())
    assert shadow["edge"] == "*"
    assert all(word.startswith(("*", "!")) for word in shadow.values())
    before = state(overlay.upper)
    again = customize(root, *arguments)
    assert again.stdout.splitlines()[-1] == "0 changes"
    assert state(overlay.upper) == before


def test_what_no_image_may_have_is_refused(overlay: Overlay, tmp_path: Path) -> None:
    root = overlay.root
    key = ssh_key(tmp_path)
    for arguments, fault in (
        (("--ssh-key", key.with_suffix("")), "this is the private key; give the .pub"),
        (("--ssh-key", SCRIPT), "no public key of ssh"),
        (("--provision-key", SCRIPT), "no Ed25519 public key in PEM"),
        (("--deb", "/no/such.deb"), "no such file"),
        (("--compatible", "x"), "--compatible and --keyring belong together"),
        (("--bed", "x"), "--bed: unknown"),
    ):
        done = customize(root, *arguments)
        assert done.returncode == 1
        assert fault in done.stderr
    assert "this machine's own root" in customize(Path("/")).stderr
    library = next((root / "usr/lib").glob("*-linux-gnu")) / "libnvinfer.so.10"
    library.write_text("no library")
    done = customize(root)
    assert "TensorRT does not load in the image" in done.stderr
    assert "nvidia-l4t-dla-compiler" in done.stderr
    library.unlink()
    with (root / "etc/shadow").open("a") as shadow:
        shadow.write("nvidia:$6$salt$hash:20000:0:99999:7:::\n")
    assert "user nvidia has a password that every board would share" in customize(root).stderr
    (root / "etc/nv_tegra_release").unlink()
    assert "run apply_binaries.sh first" in customize(root).stderr


@pytest.fixture(scope="module")
def image(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A minimal Debian with the package of this checkout, customised."""
    skip_where_no_container_can_be_made()
    if shutil.which("mmdebstrap") is None:
        pytest.skip("mmdebstrap is missing: apt install mmdebstrap")
    folder = tmp_path_factory.mktemp("image")
    root = folder / "rootfs"
    packages = "systemd,systemd-sysv,udev,openssh-server,openssl,fdisk,mtools,sudo,dbus"
    command = ["mmdebstrap", "--quiet", "--variant=minbase", f"--include={packages}", "bookworm"]
    subprocess.run([*command, root], check=True)
    (root / "etc/nv_tegra_release").write_text(L4T)
    build = [CHECKOUT / "scripts/build_deb", "--target", "bookworm-amd64", "--out", folder]
    subprocess.run(build, check=True)
    (deb,) = folder.glob("*.deb")
    arguments = ("--deb", deb, "--ssh-key", ssh_key(folder))
    done = customize(root, *arguments)
    assert done.returncode == 0, done.stdout + done.stderr
    before = state(root)
    assert customize(root, *arguments).stdout.splitlines()[-1] == "0 changes"
    assert state(root) == before
    return root


@pytest.fixture
def boot(image: Path, tmp_path: Path) -> Iterator[Callable[..., Container]]:
    started: list[Container] = []

    def start(name: str, device: str) -> Container:
        folder = tmp_path / name
        folder.mkdir()
        disk = device.rpartition("p")[0]
        container = Container(
            folder,
            f"--bind={device}",
            f"--bind={disk}",
            f"systemd.setenv=EDGE_DATA_DEVICE={device}",
            root=image,
        )
        started.append(container)
        container.wait_until_up()
        wait_until(
            lambda: container.run("systemctl", "is-system-running").stdout.strip() in ENDS, 300
        )
        return container

    yield start
    for container in started:
        container.close()


@pytest.mark.long
def test_the_image_boots_serves_and_keeps_its_identity_over_an_image_update(
    boot: Callable[..., Container], tmp_path: Path
) -> None:
    skip_where_no_disk_can_be_made()
    board = FlashedBoard(tmp_path, disk_mib=256)
    board.attach()
    kept = ("/etc/machine-id", "/etc/hostname", "/etc/ssh/ssh_host_ed25519_key.pub")
    kept += ("/data/identity/device.csr",)
    try:
        first = boot("slot_a", board.device)
        assert first.do("systemctl", "is-active", "edge-server") == "active"
        assert first.run("systemctl", "--failed", "--quiet").stdout.strip() == ""
        identity = [first.do("cat", name) for name in kept]
        report = first.do("cat", "/data/report")
        assert "health: ok" in report
        mounted = first.do("findmnt", "--noheadings", "--output", "SOURCE", "/var/lib/edge_server")
        assert board.device in mounted
        sshd = first.do("sshd", "-T")
        for line in ("passwordauthentication no", "permitrootlogin no"):
            assert line in sshd
        first.do("sh", "-c", "echo '# changed here' >>/etc/edge_server/config.toml")
        first.do("sync")
        # The power goes.
        first.close()

        # A new image in the other slot: the same root file system as it was built.
        second = boot("slot_b", board.device)
        assert [second.do("cat", name) for name in kept] == identity
        assert "# changed here" in second.do("cat", "/etc/edge_server/config.toml")
        assert second.do("systemctl", "is-active", "edge-server") == "active"
        second.close()
    finally:
        board.detach()
