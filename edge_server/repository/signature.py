"""The signature policy: checks that a trusted key signed a model's manifest before its load."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING, Any, Literal

from edge_server.errors import ModelConfigError, SettingsError
from edge_server.repository.manifest import NAME, SIGNATURE_NAME

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

log = logging.getLogger(__name__)

# A raw Ed25519 signature, as `openssl pkeyutl -verify -rawin` accepts it.
SIGNATURE_BYTES = 64
NEEDS_EXTRA = (
    "signatures need the package 'cryptography', which is not installed; install edge-server with "
    "its extra: pip install 'edge-server[signing]'"
)
_BROUGHT = (
    "is loaded with a configuration or files that a client sent, which nobody signed; put the "
    "model into the repository, signed, and load it without parameters"
)
_PUSH = "push it with `edge-server models push --sign KEY`"


class SignaturePolicy:
    """Accepts only models with a signature of a trusted key, depending on its mode.

    The signature covers the exact bytes of manifest.json, which names the model and the SHA-256 of
    every file. A signature has no time, so an older signed model is accepted as well.
    """

    def __init__(self, mode: Literal["off", "warn", "require"], keys: Sequence[Path]) -> None:
        """Read the public keys.

        Args:
            mode: `off` checks nothing, `warn` logs the faults that `require` refuses.
            keys: the PEM files of Ed25519 public keys; a signature of any of them is valid.

        Raises:
            SettingsError: `require` has no keys, a file holds no key, or the package that reads
                keys is missing.
        """
        self.mode = mode
        self._keys = {} if mode == "off" else {path: _public_key(path) for path in keys}
        self._told: dict[str, str] = {}
        if mode == "require" and not self._keys:
            raise SettingsError(
                "repository.signatures: 'require' needs a public key to check signatures with; "
                "name its file in repository.signature_keys (`edge-server models keygen` makes one)"
            )

    def check(self, name: str, manifest: bytes | None, signature: bytes | None) -> None:
        """Check model `name` against the policy; mode `warn` logs each new fault.

        Args:
            name: the model.
            manifest: the exact bytes of its manifest.json; None if there is none.
            signature: the exact bytes of its manifest.json.sig; None if there is none.

        Raises:
            ModelConfigError: the model violates `require`; the text names the fault and the remedy.
        """
        if self.mode != "off":
            self._tell(name, self._fault(manifest, signature))

    def check_loaded(self, name: str, said: tuple[bytes | None, bytes | None] | None) -> None:
        """Check a model that is about to be loaded, as `check` does.

        Args:
            name: the model.
            said: its manifest and its signature; None if a client sent the configuration or the
                files.

        Raises:
            ModelConfigError: the model violates `require`.
        """
        if said is not None:
            self.check(name, *said)
        elif self.mode != "off":
            self._tell(name, _BROUGHT)

    def _tell(self, name: str, fault: str) -> None:
        if fault and self.mode == "require":
            raise ModelConfigError(f"model '{name}': {fault}")
        if fault and self._told.get(name) != fault:
            log.warning("model %s: %s", name, fault)
        self._told[name] = fault

    def _fault(self, manifest: bytes | None, signature: bytes | None) -> str:
        if manifest is None:
            if signature is None:
                return f"is not signed: it has neither {NAME} nor {SIGNATURE_NAME}; {_PUSH}"
            return f"{SIGNATURE_NAME} is there, but {NAME}, which it signs, is missing; {_PUSH}"
        if signature is None:
            return f"is not signed: {NAME} is there, but {SIGNATURE_NAME} is missing; {_PUSH}"
        return self._signature_fault(manifest, signature)

    def _signature_fault(self, manifest: bytes, signature: bytes) -> str:
        if len(signature) != SIGNATURE_BYTES:
            return (
                f"{SIGNATURE_NAME} is damaged: it has {len(signature)} bytes, a signature has "
                f"{SIGNATURE_BYTES}; {_PUSH}"
            )
        if not self._keys:
            return "its signature cannot be checked: repository.signature_keys names no public key"
        if not any(_is_signed_by(key, manifest, signature) for key in self._keys.values()):
            keys = ", ".join(map(str, self._keys))
            return (
                f"{SIGNATURE_NAME} is not good under {keys}: another key signed it, or {NAME} or "
                f"the signature was changed since; {_PUSH}, or trust the key that it was signed "
                "with"
            )
        return ""


def _is_signed_by(key: Any, manifest: bytes, signature: bytes) -> bool:
    from cryptography.exceptions import InvalidSignature  # noqa: PLC0415

    try:
        key.verify(signature, manifest)
    except InvalidSignature:
        return False
    return True


def _public_key(path: Path) -> Any:
    try:
        from cryptography.hazmat.primitives.asymmetric import ed25519  # noqa: PLC0415
        from cryptography.hazmat.primitives.serialization import (  # noqa: PLC0415
            load_pem_public_key,
        )
    except ImportError:
        raise SettingsError(NEEDS_EXTRA) from None
    from cryptography.exceptions import UnsupportedAlgorithm  # noqa: PLC0415

    try:
        key = load_pem_public_key(path.read_bytes())
    except OSError as error:
        raise SettingsError(f"{path}: cannot be read: {error.strerror}") from error
    except (ValueError, UnsupportedAlgorithm):
        raise SettingsError(
            f"{path}: holds no public key in PEM form; give the .pub file that `edge-server models "
            "keygen` writes"
        ) from None
    if not isinstance(key, ed25519.Ed25519PublicKey):
        raise SettingsError(
            f"{path}: is not a key for Ed25519; `edge-server models keygen` makes one"
        )
    return key
