"""A container with a real systemd, and the unit in it."""

from __future__ import annotations

import base64
import contextlib
import json
import os
import shutil
import signal
import subprocess
import sys
import time
import uuid
from pathlib import Path

import pytest
from debian_package.tree import _lay_out_systemd

from support.waiting import wait_until

CONFIG = "/etc/edge_server/config.toml"


def skip_where_no_container_can_be_made() -> None:
    if os.geteuid() != 0:
        pytest.skip("needs root: a container with a real systemd is started")
    for tool in ("systemd-nspawn", "systemd-sysusers", "unshare", "setpriv", "nsenter"):
        if shutil.which(tool) is None:
            pytest.skip(f"{tool} is missing: apt install systemd systemd-container util-linux")


def make_root(name: str) -> Path:
    """A root of another distribution, made by the first test that needs it; see `make_root`."""
    script = Path(__file__).parents[1] / "integration" / "make_root"
    made = subprocess.run([script, name], capture_output=True, text=True, check=False)
    if made.returncode:
        pytest.skip(f"no root {name}: {made.stderr.strip()}")
    return Path(made.stdout.strip())


class Container:
    """A container with systemd as its PID 1; see `systemd_container`."""

    def __init__(self, folder: Path, *arguments: str, root: Path = Path("/")) -> None:
        self.name = f"edge-server-{uuid.uuid4().hex[:12]}"
        self._console = folder / "console"
        (folder / "mount").mkdir()
        script = Path(__file__).parents[1] / "integration" / "systemd_container"
        with self._console.open("wb") as console:
            self._process = subprocess.Popen(
                ["bash", script, self.name, folder / "mount", root, *arguments],
                stdin=subprocess.DEVNULL,
                stdout=console,
                stderr=subprocess.STDOUT,
            )

    def wait_until_up(self) -> None:
        """Skips the test where no container can be made."""
        while not self._is_up():
            if self._process.poll() is not None:
                said = self._console.read_text(errors="replace")
                if self._process.returncode == 77:
                    pytest.skip(f"no container here: {'; '.join(said.splitlines())}")
                pytest.fail(f"the container ended with {self._process.returncode}:\n{said}")
            time.sleep(0.1)

    def run(self, *command: str, stdin: str = "") -> subprocess.CompletedProcess[str]:
        """Run a command in there and wait for it."""
        inside = ("nsenter", "-t", str(self._leader()), "-m", "-u", "-i", "-n", "-p", "-C", "--")
        return subprocess.run(
            [*inside, "env", "-i", "PATH=/usr/sbin:/usr/bin:/sbin:/bin", *command],
            input=stdin,
            capture_output=True,
            text=True,
            check=False,
        )

    def do(self, *command: str, stdin: str = "") -> str:
        """Like `run`, for what must succeed; what it said."""
        ran = self.run(*command, stdin=stdin)
        assert ran.returncode == 0, f"{command}: {ran.stderr}"
        return ran.stdout.strip()

    def write(self, path: str, text: str) -> None:
        self.do("install", "-D", "-m", "644", "/dev/stdin", path, stdin=text)

    def write_bytes(self, path: str, data: bytes) -> None:
        self.write(f"{path}.base64", base64.b64encode(data).decode())
        self.do("sh", "-c", f"base64 -d {path}.base64 >{path} && rm {path}.base64")

    def close(self) -> None:
        """Everything in it ends at once, and its control groups are removed."""
        with contextlib.suppress(LookupError, OSError):
            os.kill(self._init(), signal.SIGKILL)
            self._process.wait(5)
        self._process.kill()
        self._process.wait()
        for hierarchy in ("systemd", "unified", "."):
            group = Path("/sys/fs/cgroup", hierarchy, self.name)
            if group.is_dir():
                wait_until(lambda group=group: _removed(group), every_s=0.1)

    def _is_up(self) -> bool:
        try:
            return self.run("systemctl", "is-active", "basic.target").returncode == 0
        except (LookupError, OSError):
            return False

    def _init(self) -> int:
        """PID 1 of the namespace that everything runs in."""
        return _children(self._process.pid)[0]

    def _leader(self) -> int:
        """The container's own PID 1, as this machine sees it."""
        return _children(self._init())[0]


CHECKOUT = Path(__file__).parents[2]
SHIPPED_MODELS = "/usr/share/edge_server/models"
# The units are run as shipped but for this. Of restarts at once more come within 10 s than systemd
# allows by default. Where other tests keep the cores busy, what runs
# behind everything would wait for minutes. The checkout and its Python may lie in a home, which
# ProtectHome=yes hides; an installed package lies in /usr.
DROP_IN = """
[Service]
RestartSec=100ms
Nice=0
CPUWeight=100
ProtectHome=tmpfs
BindReadOnlyPaths={seen}
"""


def checkout_binds() -> list[str]:
    """Arguments of systemd-nspawn, by which a container sees what the daemon is made of here."""
    models = f"--bind-ro={CHECKOUT / 'models'}:{SHIPPED_MODELS}"
    return [*(f"--bind-ro={path}" for path in _seen_paths()), models]


def install_units(container: Container, root: Path) -> None:
    """Put all files of systemd/, the user and the command where the package puts them.

    Args:
        container: a machine that sees `checkout_binds`.
        root: an empty folder.
    """
    _lay_out_systemd(root)
    for file in filter(Path.is_file, (root / "usr").rglob("*")):
        container.write(f"/{file.relative_to(root)}", file.read_text())
    container.do("chmod", "755", "/usr/lib/systemd/system-generators/edge-server-devices")
    for name in ("edge-server", "edge-server@", "edge-server-plans", "edge-server-power"):
        drop_in = DROP_IN.format(seen=" ".join(_seen_paths()))
        container.write(f"/etc/systemd/system/{name}.service.d/test.conf", drop_in)
    container.do("systemd-sysusers", "edge-server.conf")
    container.do("systemd-tmpfiles", "--create", "edge-server.conf")
    container.do("journalctl", "--update-catalog")
    command = Path(sys.executable).parent / "edge-server"
    container.do("ln", "-sf", str(command), "/usr/bin/edge-server")
    container.do("systemctl", "daemon-reload")


def _seen_paths() -> list[str]:
    """What the daemon is made of here; outside /usr, which it always sees."""
    paths = {str(CHECKOUT), sys.prefix, sys.base_prefix, *_environments()}
    outside = {path for path in paths if not path.startswith("/usr")}
    inside = {path for path in outside for other in outside if path.startswith(f"{other}/")}
    return sorted(outside - inside)


def _environments() -> set[str]:
    """Where packages lie that another environment shares with this one."""
    return {path for path in sys.path if Path(path).name == "site-packages"}


class Unit:
    """A service in a container."""

    def __init__(self, container: Container, name: str = "edge-server") -> None:
        self.container = container
        self.name = name

    def __getitem__(self, name: str) -> str:
        """A property, as `systemctl show` knows it."""
        return self.container.do("systemctl", "show", "--value", "-p", name, self.name)

    def start_with(self, config: str) -> int:
        """Start it anew with a configuration; the return code of `systemctl`."""
        self.container.write(CONFIG, config)
        self.container.run("systemctl", "stop", self.name)
        self.container.run("systemctl", "reset-failed", self.name)
        return self.container.run("systemctl", "start", self.name).returncode

    def kill(self, name: str) -> None:
        """Send a signal to the daemon."""
        self.container.do("systemctl", "kill", "-s", name, "--kill-who=main", self.name)

    def restarted(self, before: str) -> bool:
        """Whether it is active again, as another process than `before`."""
        return self["ActiveState"] == "active" and self["MainPID"] not in (before, "0")

    def journal(self) -> list[tuple[int, str]]:
        """Microseconds of the monotonic clock and text of each line."""
        self.container.do("journalctl", "--sync")
        lines = self.container.do("journalctl", "-u", self.name, "-o", "json").splitlines()
        entries = [json.loads(line) for line in lines]
        return [(int(e["__MONOTONIC_TIMESTAMP"]), str(e["MESSAGE"])) for e in entries]


def _children(pid: int) -> list[int]:
    """Raises LookupError where there are none."""
    text = Path(f"/proc/{pid}/task/{pid}/children").read_text()
    if not text:
        raise LookupError(f"process {pid} has no child")
    return [int(child) for child in text.split()]


def _removed(group: Path) -> bool:
    """Remove a tree of control groups; False while a process is left in it."""
    try:
        for folder, _, _ in os.walk(group, topdown=False):
            Path(folder).rmdir()
    except OSError:
        return False
    return True
