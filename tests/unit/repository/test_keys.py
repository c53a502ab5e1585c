"""A private key is for its owner alone, and no key is ever lost to another one."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from edge_server.errors import SettingsError
from edge_server.repository.manifest import SigningKey, make_keys

if TYPE_CHECKING:
    from pathlib import Path


def test_the_private_key_is_for_its_owner_alone(tmp_path: Path) -> None:
    key = tmp_path / "key"
    public = make_keys(key)
    assert public == tmp_path / "key.pub"
    assert key.stat().st_mode & 0o777 == 0o600
    assert b"PRIVATE" not in public.read_bytes()


@pytest.mark.parametrize("there", ["key", "key.pub"])
def test_an_existing_file_is_never_overwritten(tmp_path: Path, there: str) -> None:
    (tmp_path / there).write_text("mine")
    with pytest.raises(SettingsError, match=f"{there}: exists already"):
        make_keys(tmp_path / "key")
    assert [path.name for path in tmp_path.iterdir()] == [there]
    assert (tmp_path / there).read_text() == "mine"


def test_what_cannot_sign_is_named_with_the_remedy(tmp_path: Path) -> None:
    key = tmp_path / "key"
    make_keys(key)
    junk = tmp_path / "junk"
    junk.touch(mode=0o600)
    public = tmp_path / "key.pub"
    for path, says in (
        (tmp_path / "nowhere", "cannot be read"),
        (junk, "holds no private key in PEM form"),
        (public, "is a public key; what signs is the private one"),
    ):
        with pytest.raises(SettingsError, match=f"{path}: {says}"):
            SigningKey(path)
    key.chmod(0o640)
    with pytest.raises(SettingsError, match=r"others may read .* \(mode 640\): chmod 600 it"):
        SigningKey(key)


def test_a_key_with_a_password_is_refused_with_the_way_out(tmp_path: Path) -> None:
    from cryptography.hazmat.primitives import serialization as pem
    from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

    key = tmp_path / "key"
    key.touch(mode=0o600)
    locked = pem.BestAvailableEncryption(b"secret")
    key.write_bytes(
        Ed25519PrivateKey.generate().private_bytes(
            pem.Encoding.PEM, pem.PrivateFormat.PKCS8, locked
        )
    )
    with pytest.raises(SettingsError, match="is encrypted with a password; decrypt it: openssl"):
        SigningKey(key)
