"""Models are pushed over ssh: simulated, and a real sshd."""

from __future__ import annotations

import getpass
import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple, Protocol

import pytest
from integration.delivery.verbs import done, is_whole, make_model, models, push
from support.free_ports import free_ports

if TYPE_CHECKING:
    from collections.abc import Iterator


class SimulatedSsh(Protocol):
    def __call__(self, first: str = "") -> str: ...


@pytest.fixture
def simulated_ssh(tmp_path: Path) -> SimulatedSsh:
    """A command that takes what ssh takes and runs it here, as the login shell of a host would;
    `first` is shell text that runs before."""

    def make(first: str = "") -> str:
        command = tmp_path / "simulated_ssh"
        command.write_text(
            f"""#!/bin/sh
            PATH={Path(sys.executable).parent}:$PATH
            while [ "$1" != -- ]; do shift; done
            shift 2
            {first}
            exec sh -c "$*"
            """
        )
        command.chmod(0o755)
        return f"{command} -q"

    return make


def test_no_name_there_is_ever_a_command(
    tmp_path: Path, simulated_ssh: SimulatedSsh, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    odd = tmp_path / "a $(touch pwned) `touch pwned`; touch pwned '\""
    odd.mkdir()
    made = make_model(tmp_path / "made", "1")
    (made / "1" / "$(touch pwned)").write_text("x")
    done("push", made, "--to", f"host:{odd}", "--ssh", simulated_ssh())
    assert (odd / "m/1/$(touch pwned)").read_text() == "x"
    assert not list(tmp_path.rglob("pwned"))


@pytest.mark.parametrize(
    "most_bytes",
    [
        pytest.param(0, marks=pytest.mark.long),
        pytest.param(100, marks=pytest.mark.long),
        512,
        pytest.param(1_000_000, marks=pytest.mark.long),
        3_002_000,
    ],
)
def test_a_connection_that_breaks_changes_nothing(
    repository: Path, tmp_path: Path, simulated_ssh: SimulatedSsh, most_bytes: int
) -> None:
    push(make_model(tmp_path / "old", "old"), repository)
    new = make_model(tmp_path / "new", "new" * 1_000_000)
    ssh = simulated_ssh(f'head -c {most_bytes} | sh -c "$*"; exit')
    broken = models("push", new, "--to", f"host:{repository}", "--ssh", ssh)
    assert broken.returncode == 78
    assert "edge-server: host: the connection broke, or the other side ended" in broken.stderr
    assert [path.name for path in repository.iterdir()] == ["m"]
    assert (repository / "m/1/weights").read_text() == "old"
    # The other way, the output there ends.
    ssh = simulated_ssh(f'sh -c "$*" | head -c {most_bytes}; exit')
    broken = models("pull", "m", "--from", f"host:{repository}", "--to", tmp_path, "--ssh", ssh)
    if most_bytes < 3_000:
        assert (broken.returncode, "host: the connection broke" in broken.stderr) == (1, True)
    assert (tmp_path / "m").exists() == (broken.returncode == 0)
    assert not list(tmp_path.glob(".incoming*"))


@pytest.mark.parametrize(
    ("first", "code", "text"),
    [
        ("exit 255", 69, "host: ssh could not connect, or was refused"),
        ("exit 127", 69, "host: has no edge-server in its PATH"),
        ("exit 3", 1, "host: edge-server there ended with 3, without a reason"),
        ("echo 'edge-server: no' >&2; exit 75", 75, "edge-server: host: no"),
        ("echo a greeting; exit 0", 1, "host: the connection broke, or the other side ended"),
    ],
)
def test_a_host_that_does_not_do_it_has_its_exit_code(
    tmp_path: Path, simulated_ssh: SimulatedSsh, first: str, code: int, text: str
) -> None:
    made = make_model(tmp_path / "made", "1" * 1_000_000)
    for verb in (["push", made, "--to", "host:/m"], ["list", "host:/m"]):
        process = models(*verb, "--ssh", simulated_ssh(first))
        assert (process.returncode, text in process.stderr) == (code, True), process.stderr
        assert "Traceback" not in process.stderr


def test_a_greeting_of_a_shell_there_is_passed_over(
    repository: Path, tmp_path: Path, simulated_ssh: SimulatedSsh
) -> None:
    there = (f"host:{repository}", "--ssh", simulated_ssh("echo Welcome; printf 'no end of line'"))
    done("push", make_model(tmp_path / "made", "1"), "--to", *there)
    assert ": new\n" in done("pull", "m", "--from", *there, "--to", tmp_path / "back")
    assert "fits" in done("list", *there)


def test_errors_there_come_back_with_the_host_and_the_exit_code(
    repository: Path, tmp_path: Path, simulated_ssh: SimulatedSsh
) -> None:
    there, ssh = f"host:{repository}", ("--ssh", simulated_ssh())
    back = tmp_path / "back"
    for verb, code, text in (
        (["rollback", "m", "--to", there], 1, "there is nothing to go back to"),
        (["pull", "m", "--from", there, "--to", back], 78, "there is no model 'm'"),
        (["list", f"{there}/nowhere"], 78, "the model repository cannot be read"),
    ):
        process = models(*verb, *ssh)
        assert process.returncode == code
        assert process.stderr.startswith("edge-server: host: ")
        assert text in process.stderr
    assert list(back.iterdir()) == []


def test_a_repository_there_is_listed_as_it_is_here(
    repository: Path, tmp_path: Path, simulated_ssh: SimulatedSsh
) -> None:
    key, public = tmp_path / "key", tmp_path / "key.pub"
    done("keygen", "--out", key)
    made = make_model(tmp_path / "made", "old")
    done("push", made, "--to", repository)
    make_model(tmp_path / "made", "new")
    done("push", made, "--to", repository, "--sign", key)
    (repository / "c").mkdir()
    (repository / "d").symlink_to(repository / "m")
    (repository / "m/1/weights").write_text("bad")
    here = done("list", repository, "--json", "--key", public)
    there = f"host:{repository}"
    assert here == done("list", there, "--json", "--key", public, "--ssh", simulated_ssh())
    assert [row["name"] for row in json.loads(here)] == ["c", "d", "m"]


def test_an_archive_may_be_carried_by_hand(repository: Path, tmp_path: Path) -> None:
    done("push", make_model(tmp_path / "made", "1"), "--to", repository)
    archive, other = tmp_path / "m.tar", tmp_path / "other"
    other.mkdir()
    command = [sys.executable, "-m", "edge_server", "models"]
    with archive.open("wb") as file:
        pull = [*command, "pull", "m", "--from", str(repository), "--to", "-"]
        subprocess.run(pull, stdout=file, check=True)
    with archive.open("rb") as file:
        subprocess.run([*command, "accept", "--to", str(other)], stdin=file, check=True)
    done("verify", other / "m")
    # Nor is it other than an archive of tar.
    unpacked = tmp_path / "unpacked"
    unpacked.mkdir()
    subprocess.run(["tar", "-C", unpacked, "-xf", archive], check=True)
    assert (unpacked / "1/weights").read_text() == "1"


class Sshd(NamedTuple):
    """A real sshd on the loopback: the ssh command that reaches it, and who may log in."""

    ssh: str
    authorized: Path


@pytest.fixture
def sshd(tmp_path: Path) -> Iterator[Sshd]:
    """A process of this user, with keys of its own, that lets this user in."""
    # sshd wants to be called by its whole path; Debian puts it where only root looks.
    program = shutil.which("sshd", path=f"{os.environ.get('PATH', '')}:/usr/sbin")
    assert program is not None, "no sshd on this machine: apt install openssh-server"
    # Root's sshd asks for this one, which a service makes elsewhere.
    privileged = Path("/run/sshd") if os.getuid() == 0 else tmp_path
    made = not privileged.exists()
    privileged.mkdir(mode=0o755, exist_ok=True)
    (port,) = free_ports(1)
    for name in ("host", "user"):
        subprocess.run(
            ["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", tmp_path / name], check=True
        )
    authorized = tmp_path / "authorized"
    shutil.copy(tmp_path / "user.pub", authorized)
    options = {
        "ListenAddress": "127.0.0.1",
        "HostKey": tmp_path / "host",
        "AuthorizedKeysFile": authorized,
        "StrictModes": "no",
        "PidFile": "none",
        "PasswordAuthentication": "no",
        "PermitRootLogin": "prohibit-password",
        # An installed edge-server is in the usual PATH.
        "SetEnv": f"PATH={Path(sys.executable).parent}:/usr/bin:/bin",
    }
    flags = [f"-o{name}={value}" for name, value in options.items()]
    server = subprocess.Popen(
        [program, "-D", "-e", "-f", os.devnull, "-p", str(port), *flags],
        stderr=subprocess.PIPE,
        text=True,
    )
    assert server.stderr is not None
    log = ""
    for line in server.stderr:
        log += line
        if "listening" in line:
            break
    else:
        server.wait()
        pytest.fail(f"sshd does not start: {log}")
    command = f"ssh -q -p {port} -i {tmp_path / 'user'} -l {getpass.getuser()} -o BatchMode=yes"
    command += " -o StrictHostKeyChecking=no -o UserKnownHostsFile=/dev/null -F none"
    yield Sshd(command, authorized)
    server.terminate()
    server.communicate()
    if made:
        privileged.rmdir()


def test_over_ssh_it_is_the_same(sshd: Sshd, repository: Path, tmp_path: Path) -> None:
    there, ssh = f"127.0.0.1:{repository}", sshd.ssh
    made = make_model(tmp_path / "made", "old")
    (made / "1" / "large").write_bytes(os.urandom(20 << 20))
    (made / "1" / "a 'name' $HOME").write_text("x")
    assert ": new\n" in done("push", made, "--to", there, "--ssh", ssh)
    make_model(tmp_path / "made", "new")
    assert "replaced" in done("push", made, "--to", there, "--ssh", ssh)
    assert "nothing changed" in done("push", made, "--to", there, "--ssh", ssh)
    done("verify", repository / "m")
    assert (repository / "m/1/weights").read_text() == "new"
    done("rollback", "m", "--to", there, "--ssh", ssh)
    assert (repository / "m/1/weights").read_text() == "old"
    done("pull", "m", "--from", there, "--to", tmp_path / "back", "--ssh", ssh)
    for path in ("1/large", "1/weights", "1/a 'name' $HOME"):
        assert (tmp_path / "back/m" / path).read_bytes() == (repository / "m" / path).read_bytes()
    (row,) = json.loads(done("list", there, "--json", "--ssh", ssh))
    assert (row["name"], row["manifest"], row["previous"]) == ("m", "fits", True)
    (made / "2").mkdir()
    (made / "2" / "weights").write_text("two")
    done("push", made, "--to", there, "--ssh", ssh, "--version", "2")
    assert (repository / "m/1/weights").read_text() == "old"
    assert is_whole(repository, "m")


def test_a_key_can_be_for_pushes_alone(sshd: Sshd, repository: Path, tmp_path: Path) -> None:
    accept = f'restrict,command="edge-server models accept --to {repository}" '
    sshd.authorized.write_text(accept + sshd.authorized.read_text())
    made, ssh = make_model(tmp_path / "made", "1"), ("--ssh", sshd.ssh)
    assert ": new\n" in done("push", made, "--to", "127.0.0.1:/elsewhere", *ssh)
    done("verify", repository / "m")
    for verb in (
        ["list", f"127.0.0.1:{repository}"],
        ["rollback", "m", "--to", f"127.0.0.1:{repository}"],
        ["pull", "m", "--from", f"127.0.0.1:{repository}", "--to", tmp_path],
    ):
        process = models(*verb, *ssh)
        assert process.returncode != 0
        assert "Traceback" not in process.stderr
    assert [path.name for path in repository.iterdir()] == ["m"]


def test_an_sshd_that_is_not_there_or_refuses_the_key_is_unavailable(
    sshd: Sshd, repository: Path, tmp_path: Path
) -> None:
    there = f"127.0.0.1:{repository}"
    for wrong in (
        sshd.ssh.replace("-p ", "-p 1 -o Port="),
        sshd.ssh.replace("/user", "/nowhere"),
    ):
        process = models("list", there, "--ssh", wrong)
        assert process.returncode == 69
        assert "127.0.0.1: ssh could not connect, or was refused" in process.stderr
