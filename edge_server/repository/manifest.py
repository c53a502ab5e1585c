"""`manifest.json`, the list of a model's files, and its signature.

The manifest is written last, so that a partial copy shows.
"""

from __future__ import annotations

import logging
import os
import stat
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import msgspec

from edge_server.board.installation import remedy
from edge_server.errors import ModelConfigError, SettingsError
from edge_server.model_config.files import cannot_be_read
from edge_server.repository.scan import opened

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence
    from types import ModuleType

    from edge_server.repository.scan import ModelTree

log = logging.getLogger(__name__)

NAME = "manifest.json"
SIGNATURE_NAME = "manifest.json.sig"
# Neither file is content; both describe the content.
ABOUT_CONTENT = frozenset({NAME, SIGNATURE_NAME})
MOST_MANIFEST_BYTES = 4 << 20
# A raw Ed25519 signature, as `openssl pkeyutl -verify -rawin` accepts it.
SIGNATURE_BYTES = 64
_BROUGHT = (
    "is loaded with a configuration or files that a client sent, which are not signed; put the "
    "model into the repository, signed, and load it without parameters"
)
_NOT_ED25519 = "{}: is not a key for Ed25519; `edge-server models keygen` makes one"
_PUSH = "push it with `edge-server models push --sign KEY`"


class ManifestFile(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The content of one file: SHA-256 in hex, and size in bytes."""

    sha256: Annotated[str, msgspec.Meta(pattern=r"^[0-9a-f]{64}$")]
    size: Annotated[int, msgspec.Meta(ge=0)]


class Manifest(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The list of all files of a model except the manifest and its signature.

    Attributes:
        created: RFC 3339, for information only.
        empty_directories: such as the versions of an ensemble; left out if there are none.
        allow_interface_change: the model may break the callers of its predecessor; left out if
            unset, so that older daemons can read the manifest.
    """

    model: str
    files: dict[str, ManifestFile]
    format: Literal[1] = 1
    created: str = ""
    empty_directories: tuple[str, ...] | msgspec.UnsetType = msgspec.UNSET
    allow_interface_change: bool | msgspec.UnsetType = msgspec.UNSET

    @staticmethod
    def of(
        name: str,
        files: Mapping[str, ManifestFile],
        empty: Iterable[str],
        *,
        allow_interface_change: bool = False,
    ) -> Manifest:
        """Return the manifest of these files; equal content gives equal bytes, and so an equal
        signature.
        """
        return Manifest(
            name,
            {path: file for path, file in files.items() if path not in ABOUT_CONTENT},
            empty_directories=tuple(sorted(empty)) or msgspec.UNSET,
            allow_interface_change=allow_interface_change or msgspec.UNSET,
        )

    @staticmethod
    def parse(data: bytes) -> Manifest:
        try:
            return msgspec.json.decode(data, type=Manifest)
        except (msgspec.DecodeError, ValueError, RecursionError) as error:
            raise ModelConfigError(f"{NAME}: {error}; push the model again") from error

    def encode(self) -> bytes:
        data = msgspec.json.encode(self, order="sorted")
        return msgspec.json.format(data, indent=2) + b"\n"

    def missing(self, tree: ModelTree) -> str:
        """Return the first difference of `tree` by name or size, or "" if there is none. The text
        calls the manifest "it", to stand behind the manifest's name."""
        sizes = {file.path: file.size for file in tree.files}
        return self._difference(tree.name, sizes, tree.empty_directories, "it")

    def changed(self, files: Mapping[str, ManifestFile]) -> str:
        """Return the path of the first file of other content than in `files`, which holds all of
        them, or "" if there is none."""
        return next((p for p, file in sorted(self.files.items()) if files[p] != file), "")

    def unfit(self, name: str, files: Mapping[str, ManifestFile], empty: Iterable[str]) -> str:
        """Return the first difference of model `name` by content, or "" if there is none."""
        sizes = {path: file.size for path, file in files.items()}
        if difference := self._difference(name, sizes, empty, NAME):
            return difference
        path = self.changed(files)
        return f"{path} has other content than {NAME} says" if path else ""

    def _difference(
        self, name: str, sizes: Mapping[str, int], empty: Iterable[str], manifest: str
    ) -> str:
        if self.model != name:
            return f"{manifest} is of model '{self.model}'"
        there = {path: size for path, size in sizes.items() if path not in ABOUT_CONTENT}
        for path in sorted(self.files.keys() | there.keys()):
            if path not in there:
                return f"{path} is missing"
            if path not in self.files:
                return f"{path} is not in {manifest}"
            if there[path] != self.files[path].size:
                return f"{path} has {there[path]} bytes, not {self.files[path].size}"
        listed = set(self.empty_directories or ())
        for path in sorted(listed.symmetric_difference(empty)):
            problem = "is missing" if path in listed else f"is not in {manifest}"
            return f"directory {path}, which is empty, {problem}"
        return ""


def unfit(
    manifest: bytes, name: str, files: Mapping[str, ManifestFile], empty: Iterable[str]
) -> str:
    """Return the fault of `manifest`, or the first difference of the model as `Manifest.unfit`."""
    try:
        return Manifest.parse(manifest).unfit(name, files, empty)
    except ModelConfigError as error:
        return str(error)


def allows_interface_change(path: Path) -> bool:
    """Return whether the manifest at `path` allows its model to break its callers. A missing or
    invalid manifest does not."""
    try:
        with path.open("rb") as file:
            manifest = Manifest.parse(file.read(MOST_MANIFEST_BYTES))
    except (OSError, ModelConfigError):
        return False
    return manifest.allow_interface_change is True


def read_manifest(tree: ModelTree) -> Manifest:
    data = read_about(tree, NAME) or b""
    if len(data) > MOST_MANIFEST_BYTES:
        raise ModelConfigError(f"{NAME}: more than {MOST_MANIFEST_BYTES >> 20} MiB")
    return Manifest.parse(data)


def read_about(tree: ModelTree, path: str) -> bytes | None:
    """Return the manifest or the signature of `tree`, which is at `path`; None if there is none. A
    file that is too long is cut, but long enough to be found invalid."""
    if all(file.path != path for file in tree.files):
        return None
    try:
        with opened(tree, path) as descriptor, os.fdopen(descriptor, "rb", closefd=False) as file:
            return file.read(MOST_MANIFEST_BYTES + 1)
    except OSError as error:
        raise cannot_be_read(path, error) from error


class PublicKeys:
    """Ed25519 public keys; a signature of any of them is valid. Without keys it is false.
    Raises: SettingsError: a file holds no such key, or the package that reads keys is missing."""

    def __init__(self, paths: Sequence[Path]) -> None:
        self._keys = {path: _public_key(path) for path in paths}

    def __bool__(self) -> bool:
        return bool(self._keys)

    def __str__(self) -> str:
        return ", ".join(map(str, self._keys))

    def have_signed(self, data: bytes, signature: bytes) -> bool:
        return any(_is_signed_by(key, data, signature) for key in self._keys.values())


class SignaturePolicy:
    """Accepts only models with a signature of a trusted key, depending on its mode. The signature
    covers the exact bytes of manifest.json, which names the model and the SHA-256 of every file. A
    signature has no time, so an older signed model is accepted as well."""

    def __init__(self, mode: Literal["off", "warn", "require"], keys: Sequence[Path]) -> None:
        """Read the public keys from PEM files, but in mode `off`, which checks nothing; `warn` logs
        the faults that `require` refuses.
        Raises: SettingsError: as `PublicKeys`, or `require` has no keys."""
        self.mode = mode
        self._keys = PublicKeys(() if mode == "off" else keys)
        self._reported: dict[str, str] = {}
        if mode == "require" and not self._keys:
            raise SettingsError(
                "repository.signatures: 'require' needs a public key to check signatures with; "
                "name its file in repository.signature_keys (`edge-server models keygen` makes one)"
            )

    def check(self, name: str, signed: tuple[bytes | None, bytes | None] | None) -> None:
        """Check model `name`; mode `warn` logs each new fault.

        Args: signed: the exact bytes of its manifest and of its signature, None for a missing one;
            None for a model whose configuration or files a client sent.

        Raises: ModelConfigError: the model violates `require`."""
        if self.mode == "off":
            return
        fault = _BROUGHT if signed is None else self._fault(*signed)
        if fault and self.mode == "require":
            raise ModelConfigError(f"model '{name}': {fault}")
        if fault and self._reported.get(name) != fault:
            log.warning("model %s: %s", name, fault)
        self._reported[name] = fault

    def _fault(self, manifest: bytes | None, signature: bytes | None) -> str:
        if manifest is None or signature is None:
            if manifest is signature:
                fault = f"is not signed: it has neither {NAME} nor {SIGNATURE_NAME}"
            elif manifest is None:
                fault = f"{SIGNATURE_NAME} is there, but {NAME}, which it signs, is missing"
            else:
                fault = f"is not signed: {NAME} is there, but {SIGNATURE_NAME} is missing"
            return f"{fault}; {_PUSH}"
        if len(signature) != SIGNATURE_BYTES:
            return (
                f"{SIGNATURE_NAME} is damaged: it has {len(signature)} bytes, a signature has "
                f"{SIGNATURE_BYTES}; {_PUSH}"
            )
        if not self._keys:
            return "its signature cannot be checked: repository.signature_keys names no public key"
        if not self._keys.have_signed(manifest, signature):
            return (
                f"{SIGNATURE_NAME} is not good under {self._keys}: another key signed it, or "
                f"{NAME} or the signature was changed since; {_PUSH}, or trust the key that it was "
                "signed with"
            )
        return ""


class SigningKey:
    def __init__(self, path: Path) -> None:
        """Read the key from the PEM file `path`; SettingsError where it is none, or not safe."""
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
            raise SettingsError(_NOT_ED25519.format(path))
        self._key: Any = key

    def sign(self, manifest: bytes) -> bytes:
        signature: bytes = self._key.sign(manifest)
        return signature

    def has_signed(self, manifest: bytes | None, signature: bytes | None) -> bool:
        """Return whether both are given and this key made the signature of these bytes."""
        return manifest is not None and self.sign(manifest) == signature


def make_keys(path: Path) -> Path:
    """Write a new private key to `path` for its owner only, and the public key beside it.
    Returns: The file of the public key: `path` with the suffix `.pub`.
    Raises: SettingsError: a file exists or cannot be written; then neither is changed."""
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


def _is_signed_by(key: Any, manifest: bytes, signature: bytes) -> bool:
    from cryptography.exceptions import InvalidSignature  # noqa: PLC0415 - may be missing

    try:
        key.verify(signature, manifest)
    except InvalidSignature:
        return False
    return True


def _public_key(path: Path) -> Any:
    ed25519, serialization = _cryptography()
    from cryptography.exceptions import UnsupportedAlgorithm  # noqa: PLC0415 - likewise

    try:
        key = serialization.load_pem_public_key(path.read_bytes())
    except OSError as error:
        raise SettingsError(f"{path}: cannot be read: {error.strerror}") from error
    except (ValueError, UnsupportedAlgorithm):
        raise SettingsError(
            f"{path}: holds no public key in PEM form; give the .pub file that `edge-server models "
            "keygen` writes"
        ) from None
    if not isinstance(key, ed25519.Ed25519PublicKey):
        raise SettingsError(_NOT_ED25519.format(path))
    return key


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
        # Takes long to import, and a board whose models are not signed may lack it.
        from cryptography.hazmat.primitives import serialization  # noqa: PLC0415
        from cryptography.hazmat.primitives.asymmetric import ed25519  # noqa: PLC0415
    except ImportError:
        raise SettingsError(
            "signatures need the package 'cryptography', which is not installed: "
            f"{remedy('cryptography')}"
        ) from None
    return ed25519, serialization
