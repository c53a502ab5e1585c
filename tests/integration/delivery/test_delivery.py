"""Models are delivered by the real command, over a real sshd, and killed at each system call."""

from __future__ import annotations

import io
import json
import os
import shutil
import signal
import subprocess
import sys
from collections import Counter
from typing import TYPE_CHECKING

import pytest
from integration.delivery.verbs import (
    CONFIG,
    TIMEOUT_S,
    done,
    is_whole,
    make_model,
    models,
    push,
)
from support.waiting import wait_until

from edge_server.cli.model_push import pack
from edge_server.repository.manifest import SigningKey, make_keys
from edge_server.repository.transfer import roll_back, write_archive

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

    import tritonclient.grpc as triton
    from support.daemon_process import Process


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
        (["sing"], 2, "unknown verb models sing; did you mean sign?"),
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
import edge_server.cli.model_push
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


@pytest.mark.parametrize(
    ("pushes_before", "exchange"),
    [
        pytest.param(0, True, marks=pytest.mark.long),
        pytest.param(1, True, marks=pytest.mark.long),
        (2, True),
        (1, False),
        pytest.param(2, False, marks=pytest.mark.long),
    ],
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


def test_interrupted_from_the_keyboard_it_takes_everything_back(
    repository: Path, tmp_path: Path
) -> None:
    made = make_model(tmp_path / "made", "1")
    with (made / "1" / "large").open("wb") as file:
        file.truncate(1 << 30)
    process = subprocess.Popen(
        [sys.executable, "-m", "edge_server", "models", "push", made, "--to", repository],
        stderr=subprocess.PIPE,
        text=True,
    )
    wait_until(lambda: process.poll() is not None or list(repository.glob(".incoming-*/1/large")))
    assert process.poll() is None
    process.send_signal(signal.SIGINT)
    _, said = process.communicate(timeout=TIMEOUT_S)
    assert (process.returncode, said) == (130, "edge-server: interrupted; no half model is left\n")
    assert list(repository.iterdir()) == []
