"""Encryption: the certificates of a listener, and what becomes of them where files change."""

from __future__ import annotations

import errno
import logging
import os
from typing import TYPE_CHECKING, Any

from edge_server.api.http.server import Encryption
from edge_server.settings import Tls

if TYPE_CHECKING:
    import pytest


def test_certificates_that_cannot_be_loaded_for_now_are_loaded_later(
    authority: Any, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    certificate, key = authority.issue("server")
    tls = Tls(enabled=True, certificate=str(certificate), key=str(key))
    encryption = Encryption("http", tls)
    before = encryption.context
    authority.issue("server")  # into the same files

    def without_a_descriptor(_: str) -> int:
        raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))

    with monkeypatch.context() as patched, caplog.at_level(logging.ERROR):
        patched.setattr(os, "memfd_create", without_a_descriptor)
        encryption.renew()
    assert encryption.context is before
    assert "certificates stay as they were: [Errno 24] Too many open files" in caplog.text
    encryption.renew()
    assert encryption.context is not before
