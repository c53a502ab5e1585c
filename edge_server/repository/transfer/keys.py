"""The keys that sign models."""

from __future__ import annotations

import os
import stat
from pathlib import Path
from typing import TYPE_CHECKING, Any

from edge_server.errors import SettingsError
from edge_server.repository.signature import NEEDS_EXTRA

if TYPE_CHECKING:
    from types import ModuleType


class SigningKey:
    """A private Ed25519 key."""

    def __init__(self, path: Path) -> None:
        """Read the key from the PEM file `path`.

        Raises:
            SettingsError: the file is unreadable, accessible to others, encrypted or holds no
                Ed25519 key, or the package for keys is missing; the text names file and remedy.
        """
        ed25519, serialization = _cryptography()
        try:
            with path.open("rb") as file:
                mode = stat.S_IMODE(os.fstat(file.fileno()).st_mode)
                data = file.read()
        except OSError as error:
            raise SettingsError(f"{path}: cannot be read: {error.strerror}") from error
        if b"PUBLIC KEY" in data:
            raise SettingsError(f"{path}: is a public key; what signs is the private one")
        if mode & 0o077:
            raise SettingsError(
                f"{path}: others may read or change this private key (mode {mode:o}): chmod 600 it"
            )
        try:
            key = serialization.load_pem_private_key(data, password=None)
        except TypeError:
            raise SettingsError(
                f"{path}: is encrypted with a password; decrypt it: openssl pkey -in {path} -out "
                "OTHER"
            ) from None
        except Exception:  # noqa: BLE001 - the errors for an invalid key are undocumented
            raise SettingsError(f"{path}: holds no private key in PEM form") from None
        if not isinstance(key, ed25519.Ed25519PrivateKey):
            raise SettingsError(
                f"{path}: is not a key for Ed25519; `edge-server models keygen` makes one"
            )
        self._key: Any = key

    def sign(self, manifest: bytes) -> bytes:
        """Return the signature of these bytes, always the same for the same bytes."""
        signature: bytes = self._key.sign(manifest)
        return signature

    def has_signed(self, manifest: bytes | None, signature: bytes | None) -> bool:
        """Return whether both are given and this key made the signature of these bytes."""
        return manifest is not None and self.sign(manifest) == signature


def make_keys(path: Path) -> Path:
    """Write a new private key to `path` for its owner only, and the public key beside it.

    Returns:
        The file of the public key: `path` with the suffix `.pub`.

    Raises:
        SettingsError: one of the files exists already or cannot be written; neither file is
            changed in this case.
    """
    ed25519, serialization = _cryptography()
    key = ed25519.Ed25519PrivateKey.generate()
    private = key.private_bytes(
        serialization.Encoding.PEM,
        serialization.PrivateFormat.PKCS8,
        serialization.NoEncryption(),
    )
    public = key.public_key().public_bytes(
        serialization.Encoding.PEM, serialization.PublicFormat.SubjectPublicKeyInfo
    )
    public_path = Path(f"{path}.pub")
    _write_new(path, private, 0o600)
    try:
        _write_new(public_path, public, 0o644)
    except SettingsError:
        path.unlink()
        raise
    return public_path


def _write_new(path: Path, data: bytes, mode: int) -> None:
    try:
        descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, mode)
    except FileExistsError:
        raise SettingsError(
            f"{path}: exists already, and a key is never overwritten; give another name, or move "
            "it away first"
        ) from None
    except OSError as error:
        raise SettingsError(f"{path}: cannot be written: {error.strerror}") from error
    with os.fdopen(descriptor, "wb") as file:
        file.write(data)
        file.flush()
        os.fsync(file.fileno())


def _cryptography() -> tuple[ModuleType, ModuleType]:
    try:
        from cryptography.hazmat.primitives import serialization  # noqa: PLC0415
        from cryptography.hazmat.primitives.asymmetric import ed25519  # noqa: PLC0415
    except ImportError:
        raise SettingsError(NEEDS_EXTRA) from None
    return ed25519, serialization
