"""A model is trusted for a good signature over its manifest, and for nothing else."""

from __future__ import annotations

import logging
import sys
from typing import TYPE_CHECKING

import pytest

from edge_server.errors import ModelConfigError, SettingsError
from edge_server.repository.manifest import SignaturePolicy, SigningKey, make_keys

if TYPE_CHECKING:
    from pathlib import Path

MANIFEST = b'{"model": "m"}\n'


class Signer:
    def __init__(self, path: Path) -> None:
        self.public = make_keys(path)
        self.sign = SigningKey(path).sign


@pytest.fixture
def ours(tmp_path: Path) -> Signer:
    return Signer(tmp_path / "ours")


@pytest.fixture
def theirs(tmp_path: Path) -> Signer:
    return Signer(tmp_path / "theirs")


def test_a_signature_of_any_trusted_key_is_good(ours: Signer, theirs: Signer) -> None:
    policy = SignaturePolicy("require", [theirs.public, ours.public])
    policy.check("m", (MANIFEST, ours.sign(MANIFEST)))
    policy.check("m", (MANIFEST, theirs.sign(MANIFEST)))


def test_each_way_of_not_being_signed_is_an_error_with_its_remedy(
    ours: Signer, theirs: Signer
) -> None:
    policy = SignaturePolicy("require", [ours.public])
    good = ours.sign(MANIFEST)
    for manifest, signature, says in (
        (None, None, "it has neither manifest.json nor manifest.json.sig"),
        (None, good, "manifest.json.sig is there, but manifest.json, which it signs, is missing"),
        (MANIFEST, None, "manifest.json is there, but manifest.json.sig is missing"),
        (MANIFEST, good[:-1], "is damaged: it has 63 bytes, a signature has 64"),
        (MANIFEST, b"", "is damaged: it has 0 bytes"),
        (MANIFEST, theirs.sign(MANIFEST), f"is not good under {ours.public}: another key"),
        (MANIFEST + b" ", good, "or manifest.json or the signature was changed since"),
    ):
        with pytest.raises(ModelConfigError) as caught:
            policy.check("m", (manifest, signature))
        assert str(caught.value).startswith("model 'm': ")
        assert says in str(caught.value)
        assert "push it with `edge-server models push --sign KEY`" in str(caught.value)


def test_a_signature_with_any_one_bit_changed_is_refused(ours: Signer) -> None:
    policy = SignaturePolicy("require", [ours.public])
    good = ours.sign(MANIFEST)
    for data in (MANIFEST, good):
        for bit in range(8 * len(data)):
            bad = bytearray(data)
            bad[bit // 8] ^= 1 << bit % 8
            pair = (bytes(bad), good) if data is MANIFEST else (MANIFEST, bytes(bad))
            with pytest.raises(ModelConfigError):
                policy.check("m", pair)


def test_off_looks_at_nothing_not_even_the_keys(tmp_path: Path) -> None:
    SignaturePolicy("off", [tmp_path / "nowhere"]).check("m", (None, b"x"))


def test_warn_logs_each_new_fault_once_and_refuses_nothing(
    ours: Signer, caplog: pytest.LogCaptureFixture
) -> None:
    policy = SignaturePolicy("warn", [ours.public])
    with caplog.at_level(logging.WARNING):
        for signature in (None, None, b"", b"", ours.sign(MANIFEST), None):
            policy.check("m", (MANIFEST, signature))
    told = [record.getMessage() for record in caplog.records]
    assert [("is missing" in text, "damaged" in text) for text in told] == [
        (True, False),
        (False, True),
        (True, False),
    ]
    assert all(text.startswith("model m: ") for text in told)


def test_warn_without_keys_logs_that_it_cannot_check(
    ours: Signer, caplog: pytest.LogCaptureFixture
) -> None:
    SignaturePolicy("warn", []).check("m", (MANIFEST, ours.sign(MANIFEST)))
    assert "signature cannot be checked: repository.signature_keys names no" in caplog.text


def test_require_without_a_key_is_a_fault_of_the_settings() -> None:
    with pytest.raises(SettingsError, match=r"repository\.signatures: 'require' needs a public"):
        SignaturePolicy("require", [])


def test_a_file_that_is_no_public_key_is_named(tmp_path: Path, ours: Signer) -> None:
    junk = tmp_path / "junk"
    junk.write_text("junk")
    for path, says in (
        (tmp_path / "nowhere", "cannot be read"),
        (junk, "holds no public key in PEM form"),
        (tmp_path / "ours", "holds no public key in PEM form"),
    ):
        with pytest.raises(SettingsError, match=f"{path}: {says}"):
            SignaturePolicy("require", [path])


def test_a_key_of_another_kind_is_refused(tmp_path: Path) -> None:
    from cryptography.hazmat.primitives import serialization
    from cryptography.hazmat.primitives.asymmetric import ec

    path = tmp_path / "ec.pub"
    key = ec.generate_private_key(ec.SECP256R1()).public_key()
    path.write_bytes(
        key.public_bytes(
            serialization.Encoding.PEM, serialization.PublicFormat.SubjectPublicKeyInfo
        )
    )
    with pytest.raises(SettingsError, match="is not a key for Ed25519"):
        SignaturePolicy("require", [path])


def test_without_the_package_the_extra_is_named(
    ours: Signer, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    # What an import statement finds where the package is not installed.
    for name in [name for name in sys.modules if name.startswith("cryptography")]:
        monkeypatch.setitem(sys.modules, name, None)
    for act in (
        lambda: SignaturePolicy("require", [ours.public]),
        lambda: make_keys(tmp_path / "new"),
        lambda: SigningKey(tmp_path / "ours"),
    ):
        with pytest.raises(SettingsError, match=r"pip install 'edge-server\[signing\]'"):
            act()


def test_what_a_client_brings_is_not_signed(ours: Signer, caplog: pytest.LogCaptureFixture) -> None:
    with pytest.raises(ModelConfigError, match=r"'m': is loaded with a configuration or files"):
        SignaturePolicy("require", [ours.public]).check("m", None)
    SignaturePolicy("off", []).check("m", None)
    assert not caplog.text
    SignaturePolicy("warn", []).check("m", None)
    assert "model m: is loaded with a configuration or files that a client sent" in caplog.text
