"""`edge-server provision` as a command: signatures of openssl, and what `check` says."""

from __future__ import annotations

import base64
import subprocess
from typing import TYPE_CHECKING

import pytest
from support.verb import run_verb

if TYPE_CHECKING:
    from pathlib import Path

FILE = '[device]\nid = "truck-17"\n[cameras.front]\nuri = "synthetic://road?seed=7&fps=10"\n'


class Device:
    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.config = folder / "etc/config.toml"
        self.data = folder / "data"
        self.config.parent.mkdir()
        self.data.mkdir()
        self.config.write_text('[repository]\npaths = ["models"]\n[grpc]\nport = 0\n')

    def provision(self, *arguments: str | Path) -> subprocess.CompletedProcess[str]:
        return run_verb("provision", "--config", self.config, "--data", self.data, *arguments)

    def file(self, text: str) -> Path:
        path = self.folder / "edge-server.toml"
        path.write_text(text)
        return path


@pytest.fixture
def device(tmp_path: Path) -> Device:
    return Device(tmp_path)


@pytest.fixture
def key(tmp_path: Path) -> Path:
    """A private key; the public one lies beside it, with `.pub`."""
    path = tmp_path / "provision"
    make = ("openssl", "genpkey", "-algorithm", "ed25519", "-out", path)
    subprocess.run(make, check=True)
    public = ("openssl", "pkey", "-in", path, "-pubout", "-out", f"{path}.pub")
    subprocess.run(public, check=True)
    return path


def signed(text: str, key: Path) -> str:
    """As docs/flash.md has it."""
    plain = key.with_name("plain.toml")
    plain.write_text(text)
    raw = subprocess.run(
        ["openssl", "pkeyutl", "-sign", "-rawin", "-inkey", key, "-in", plain],
        capture_output=True,
        check=True,
    ).stdout
    return f"{text}# signature: {base64.b64encode(raw).decode()}\n"


def test_what_it_writes_passes_check(device: Device) -> None:
    done = device.provision(device.file(FILE))
    assert done.returncode == 0, done.stderr
    checked = run_verb(
        "check", "--config", device.config, "--metrics-port", "0", "--http-port", "0"
    )
    assert checked.returncode == 0, checked.stderr
    assert "front" in checked.stdout
    again = device.provision(device.file(FILE))
    assert again.returncode == 0
    assert "applied before; nothing changed" in again.stdout


def test_a_key_in_the_image_lets_only_its_files_count(device: Device, key: Path) -> None:
    pub = ("--key", f"{key}.pub")
    before = device.config.read_text()
    for text, fault in (
        (FILE, "is not signed"),
        (signed(FILE, key).replace("truck-17", "truck-18"), "the signature is not that of"),
        (signed(FILE, key) + "# more\n", "is not signed"),
    ):
        done = device.provision(device.file(text), *pub)
        assert done.returncode == 78
        assert fault in done.stderr
        assert device.config.read_text() == before
    other = FILE.replace("truck-17", "truck-18")
    newer = f"{other}[file]\nserial = 7\n"
    for text in (FILE, newer):
        done = device.provision(device.file(signed(text, key)), *pub)
        assert done.returncode == 0, done.stderr
    # Whoever kept an older file cannot bring it back.
    for text in (FILE, f"{FILE}[file]\nserial = 6\n"):
        assert device.provision(device.file(signed(text, key)), *pub).returncode == 78
    assert "truck-18" in device.config.read_text()
