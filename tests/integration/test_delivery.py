"""Models are delivered by the real command, over a real sshd, and killed at each system call."""

from __future__ import annotations

import getpass
import io
import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections import Counter
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple, Protocol

import pytest

from edge_server.cli.models.listing import faults_of
from edge_server.cli.models.push import pack
from edge_server.repository.signature import SigningKey, make_keys
from edge_server.repository.transfer.entries import write_archive
from edge_server.repository.transfer.incoming import receive, roll_back
from edge_server.repository.transfer.inventory import take_inventory

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    import tritonclient.grpc as triton

    from tests.integration.conftest import Process

TIMEOUT_S = 60.0
CONFIG = (
    'backend: "identity" input { name: "a" data_type: TYPE_FP32 dims: -1 } '
    'output { name: "b" data_type: TYPE_FP32 dims: -1 }'
)


def models(*arguments: str | Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "edge_server", "models", *map(str, arguments)],
        capture_output=True,
        text=True,
        timeout=TIMEOUT_S,
        check=False,
    )


def done(*arguments: str | Path) -> str:
    """What the command prints when all is well."""
    process = models(*arguments)
    assert process.returncode == 0, process.stderr
    return process.stdout


def make_model(folder: Path, text: str) -> Path:
    directory = folder / "m"
    (directory / "1").mkdir(parents=True, exist_ok=True)
    (directory / "config.pbtxt").write_text(CONFIG)
    (directory / "1" / "weights").write_text(text)
    return directory


def push(model: Path, repository: Path) -> None:
    receive(repository, pack(model).entries())


@pytest.fixture
def repository(tmp_path: Path) -> Path:
    path = tmp_path / "repository"
    path.mkdir()
    return path


def test_the_verbs_from_key_to_rollback(repository: Path, tmp_path: Path) -> None:
    key, public = tmp_path / "key", tmp_path / "key.pub"
    done("keygen", "--out", key)
    made = make_model(tmp_path / "made", "old")
    assert ": new\n" in done("push", made, "--to", repository, "--sign", key)
    make_model(tmp_path / "made", "new")
    assert "rollback brings the former one back" in done("push", made, "--to", repository)
    assert done("verify", repository / "m") == "m: is what its manifest says\n"
    unsigned = models("verify", repository / "m", "--key", public)
    assert unsigned.returncode == 1
    assert "manifest.json.sig is missing" in unsigned.stderr
    done("rollback", "m", "--to", repository)
    assert done("verify", repository / "m", "--key", public).endswith("is signed by that key\n")
    (row,) = json.loads(done("list", repository, "--key", public, "--json"))
    assert (row["name"], row["versions"], row["manifest"], row["signature"], row["previous"]) == (
        ("m", [1], "fits", "good", True)
    )
    assert row["digest"][:12] in done("list", repository)
    done("pull", "m", "--from", repository, "--to", tmp_path / "back")
    done("verify", tmp_path / "back" / "m", "--key", public)
    done("sign", made, "--key", key)
    done("verify", made, "--key", public)
    (made / "1/weights").write_text("x")
    changed = models("verify", made)
    assert changed.returncode == 1
    assert changed.stderr == f"edge-server: {made}: 1/weights has 1 bytes, not 3\n"
    done("push", made, "--to", repository, "--version", "1", "--in-place")
    done("verify", made)


@pytest.mark.parametrize(
    ("arguments", "code", "says"),
    [
        (["push", "{made}", "--to", "{nowhere}"], 78, "nowhere: the model repository cannot be"),
        (["push", "{nowhere}", "--to", "{repository}"], 78, "nowhere: no such directory"),
        (["push", "{repository}", "--to", "{repository}"], 78, "Could not determine backend"),
        (["push", "{made}", "--to", "host:/m", "--ssh", "false --"], 1, "without a reason"),
        (["push", "{made}", "--to", "host:/m", "--ssh", "/no/ssh"], 69, "install OpenSSH's client"),
        (["push", "{made}", "--to", "{repository}", "--version", "01"], 2, "a whole number from 1"),
        (["push", "{made}", "--to", "{repository}", "--sing", "k"], 2, "did you mean --sign?"),
        (["push", "{made}", "--to", "{repository}", "--sign", "{nowhere}"], 78, "cannot be read"),
        (["pull", "n", "--from", "{repository}", "--to", "{nowhere}"], 78, "there is no model 'n'"),
        (["list", "{nowhere}"], 78, "nowhere: the model repository cannot be read"),
        (["verify", "{nowhere}"], 78, "nowhere: no such directory"),
        (["verify", "{made}"], 1, "it has no manifest.json; push it with"),
        (["verify", "{made}", "--key", "{nowhere}"], 78, "nowhere: cannot be read"),
        (["rollback", "m", "--to", "{repository}"], 1, "there is nothing to go back to"),
        (["keygen", "--out", "{made}"], 78, "exists already"),
        (["sign", "{nowhere}", "--key", "{nowhere}"], 78, "cannot be read"),
        (["sing"], 2, "invalid choice: 'sing'"),
    ],
)
def test_each_kind_of_failure_has_its_exit_code(
    repository: Path, tmp_path: Path, arguments: list[str], code: int, says: str
) -> None:
    places = {
        "made": make_model(tmp_path / "made", "1"),
        "nowhere": tmp_path / "nowhere",
        "repository": repository,
    }
    process = models(*(each.format(**places) for each in arguments))
    assert (process.returncode, says in process.stderr) == (code, True), process.stderr
    assert "Traceback" not in process.stderr


def test_a_daemon_serves_what_was_pushed_and_sees_nothing_else(
    repository: Path,
    tmp_path: Path,
    start: Callable[..., Process],
    client: Callable[[Process], triton.InferenceServerClient],
) -> None:
    for batch in (1, 2):
        made = make_model(tmp_path / "made", "1")
        (made / "config.pbtxt").write_text(f"max_batch_size: {batch} {CONFIG}")
        done("push", made, "--to", repository, "--allow-interface-change")
    # As a push that was interrupted leaves it.
    shutil.copytree(made, repository / ".incoming-m-1")
    process = start("--model-repository", str(repository), "--model-control-mode", "explicit")
    server = client(process)
    for batch in (2, 1):
        server.load_model("m")
        assert server.get_model_config("m").config.max_batch_size == batch
        done("rollback", "m", "--to", repository)
    index = server.get_model_repository_index()
    assert [model.name for model in index.models] == ["m"]


def test_help_imports_nothing_heavy() -> None:
    done = subprocess.run(
        [
            sys.executable,
            "-c",
            "import sys\n"
            "from edge_server.cli.main import run_command\n"
            "try: run_command(['models', 'push', '--help'])\n"
            "except SystemExit: pass\n"
            "heavy = {'numpy', 'msgspec', 'google', 'cryptography', 'tarfile'} & set(sys.modules)\n"
            "sys.exit(f'imported: {heavy}' if heavy else 0)\n",
        ],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert done.returncode == 0, done.stderr


def test_openssl_finds_the_same_signature_good(tmp_path: Path) -> None:
    public = make_keys(tmp_path / "key")
    (tmp_path / "text").write_bytes(b"text")
    (tmp_path / "sig").write_bytes(SigningKey(tmp_path / "key").sign(b"text"))
    files = ["-inkey", public, "-in", tmp_path / "text", "-sigfile", tmp_path / "sig"]
    done = subprocess.run(
        ["openssl", "pkeyutl", "-verify", "-rawin", "-pubin", *files],
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert "Verified Successfully" in done.stdout


# --- killed at each system call -------------------------------------------------------------------

# Not every machine has those with a question mark.
_CHANGES = (
    "?mkdir,mkdirat,write,utimensat,fsync,?rename,?renameat,renameat2,?unlink,unlinkat,?rmdir,flock"
)
_NO_EXCHANGE = "inject=renameat2:error=EINVAL"


def archive_of(model: Path) -> bytes:
    """What `accept` reads at a push of `model`."""
    stream = io.BytesIO()
    write_archive(stream, pack(model).entries())
    return stream.getvalue()


# Loads the code once for all processes; each begins when it is continued.
_FORKS = """
import os, signal, sys
import edge_server.cli.models.outcome
from edge_server.cli.main import run_command
for repository in sys.stdin:
    process = os.fork()
    if process == 0:
        os.kill(os.getpid(), signal.SIGSTOP)
        os.dup2(os.open(sys.argv[1], os.O_RDONLY), 0)
        os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
        os.dup2(os.open(sys.argv[2], os.O_WRONLY), 2)
        sys.stdin = open(0)
        os._exit(run_command(["models", "accept", "--no-wait", "--to", repository.strip()]))
    os.waitpid(process, os.WUNTRACED)
    print(process, flush=True)
    print(os.waitstatus_to_exitcode(os.waitpid(process, 0)[1]), flush=True)
"""


class Accepting:
    """Runs `models accept`, each time in a process that strace looks at."""

    def __init__(self, strace: str, folder: Path) -> None:
        self._strace = strace
        self._archive, self._errors = folder / "archive", folder / "errors"
        command = [sys.executable, "-c", _FORKS, self._archive, self._errors]
        pipe = subprocess.PIPE
        self._process = subprocess.Popen(command, stdin=pipe, stdout=pipe, text=True)

    def accept(self, repository: Path, data: bytes, *injections: str) -> tuple[int, str]:
        """The exit code, and what it printed as an error."""
        self._archive.write_bytes(data)
        self._errors.write_bytes(b"")
        assert self._process.stdin is not None
        self._process.stdin.write(f"{repository}\n")
        self._process.stdin.flush()
        process = self._number()
        flags = [flag for each in (f"trace={_CHANGES}", *injections) for flag in ("-e", each)]
        command = [self._strace, "-o", os.devnull, *flags, "-p", str(process)]
        with subprocess.Popen(command, stderr=subprocess.PIPE, text=True) as tracer:
            assert tracer.stderr is not None
            assert "attached" in (line := tracer.stderr.readline()), line
            os.kill(process, signal.SIGCONT)
            tracer.communicate(timeout=TIMEOUT_S)
        return self._number(), self._errors.read_text()

    def close(self) -> None:
        self._process.communicate()

    def _number(self) -> int:
        assert self._process.stdout is not None
        return int(self._process.stdout.readline())


@pytest.fixture(scope="module")
def accepting(strace: str, in_memory: Callable[[], Path]) -> Iterator[Accepting]:
    started = Accepting(strace, in_memory())
    yield started
    started.close()


def is_whole(repository: Path, name: str) -> bool:
    return faults_of(take_inventory(repository, name)) == []


@pytest.mark.parametrize(
    ("pushes_before", "exchange"), [(0, True), (1, True), (2, True), (1, False), (2, False)]
)
def test_killed_at_any_system_call_a_push_leaves_no_half_model(
    accepting: Accepting, in_memory: Callable[[], Path], exchange: bool, pushes_before: int
) -> None:
    repository, folder = in_memory(), in_memory()
    texts = ["one", "two"][:pushes_before]
    data = archive_of(make_model(folder / "new", "new"))
    killed: Counter[str] = Counter()
    for call in _CHANGES.split(","):
        if call == "renameat2" and not exchange:
            continue
        while True:
            shutil.rmtree(repository)
            repository.mkdir()
            for text in texts:
                push(make_model(folder / "made", text), repository)
            kill = f"inject={call}:signal=SIGKILL:when={killed[call] + 1}"
            code, reply = accepting.accept(
                repository, data, kill, *([] if exchange else [_NO_EXCHANGE])
            )
            if code == 0:
                assert (repository / "m/1/weights").read_text() == "new"
                break
            assert code == -signal.SIGKILL, reply
            killed[call] += 1
            is_there = (repository / "m").exists()
            # Only where names cannot be exchanged is there a moment without any.
            assert is_there or not texts or not exchange
            if is_there:
                assert is_whole(repository, "m")
                assert (repository / "m/1/weights").read_text() in {*texts[-1:], "new"}
            assert all(path.name == "m" or path.name[0] == "." for path in repository.iterdir())
            if texts:
                # A second push puts right whatever there was …
                push(make_model(folder / "made", "next"), repository)
                assert (repository / "m/1/weights").read_text() == "next"
                assert {path.name for path in repository.iterdir()} == {"m", ".previous-m"}
                # … and what it replaced is a whole model too.
                roll_back(repository, "m")
                assert is_whole(repository, "m")
                assert (repository / "m/1/weights").read_text() in {"one", "two", "new"}
    # Of each file, each directory and the repository; and the names.
    assert killed["fsync"] == 6
    assert killed["write"] >= 3
    assert killed["?rename"] + killed["?renameat"] + killed["renameat2"] >= min(
        1 + pushes_before, 2
    )


@pytest.mark.parametrize(
    ("refusal", "says"),
    [
        ("?mkdir,mkdirat:error=ENOSPC", "No space left on device"),
        ("write:error=ENOSPC", "No space left on device"),
        ("fsync:error=EIO", "Input/output error"),
        ("renameat2:error=EROFS", "Read-only file system"),
    ],
)
def test_what_the_file_system_refuses_changes_nothing(
    accepting: Accepting, repository: Path, tmp_path: Path, refusal: str, says: str
) -> None:
    push(make_model(tmp_path / "made", "old"), repository)
    data = archive_of(make_model(tmp_path / "new", "new"))
    code, reply = accepting.accept(repository, data, f"inject={refusal}:when=1")
    assert code == 1
    assert f"cannot be written: {says}" in reply
    assert [path.name for path in repository.iterdir()] == ["m"]
    assert (repository / "m/1/weights").read_text() == "old"


@pytest.fixture
def heeding() -> Iterator[None]:
    """Children heed an interrupt, also where a shell runs the tests in its background."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


@pytest.mark.usefixtures("heeding")
def test_interrupted_from_the_keyboard_it_takes_everything_back(
    repository: Path, tmp_path: Path
) -> None:
    made = make_model(tmp_path / "made", "1")
    with (made / "1" / "large").open("wb") as file:
        file.truncate(4 << 30)
    process = subprocess.Popen(
        [sys.executable, "-m", "edge_server", "models", "push", made, "--to", repository],
        stderr=subprocess.PIPE,
        text=True,
    )
    deadline = time.monotonic() + TIMEOUT_S
    while not list(repository.glob(".incoming-*/1/large")):
        assert time.monotonic() < deadline
        assert process.poll() is None
        time.sleep(0.01)
    process.send_signal(signal.SIGINT)
    _, said = process.communicate(timeout=TIMEOUT_S)
    assert (process.returncode, said) == (130, "edge-server: interrupted; no half model is left\n")
    assert list(repository.iterdir()) == []


# --- over a simulated ssh -------------------------------------------------------------------------


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


@pytest.mark.parametrize("most_bytes", [0, 100, 512, 1_000_000, 3_002_000])
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
        ("exit 255", 69, "host: ssh could not connect, or was not let in"),
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


# --- over a real sshd -----------------------------------------------------------------------------


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
    if os.getuid() == 0:
        Path("/run/sshd").mkdir(mode=0o755, exist_ok=True)
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        port = listener.getsockname()[1]
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
    away = models("list", "127.0.0.1:/nowhere", "--ssh", ssh)
    assert (away.returncode, "the model repository cannot be read" in away.stderr) == (78, True)


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
        assert "127.0.0.1: ssh could not connect, or was not let in" in process.stderr
