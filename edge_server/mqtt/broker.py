"""What the `[mqtt]` settings name: the broker's address, the password, certificates.

The files are read for every connection, so that a changed file takes effect.
"""

from __future__ import annotations

import ssl
import time
from typing import TYPE_CHECKING

from edge_server.settings.text_file import read_text_file

if TYPE_CHECKING:
    from edge_server.settings import Mqtt

# X509_V_ERR_CERT_NOT_YET_VALID and X509_V_ERR_CERT_HAS_EXPIRED of OpenSSL.
_OF_ANOTHER_TIME = (9, 10)


def address_of(mqtt: Mqtt) -> str:
    """Return the broker's address for people."""
    return f"{mqtt.host}:{mqtt.port}"


def password_of(mqtt: Mqtt) -> str | None:
    """Return the present contents of `password_file` without its line end; None without a file.

    Raises:
        OSError: the file cannot be read.
        UnicodeDecodeError: the file is not UTF-8.
    """
    if not mqtt.password_file:
        return None
    return read_text_file(mqtt.password_file).rstrip("\r\n")


def tls_of(mqtt: Mqtt) -> ssl.SSLContext | None:
    """Return TLS 1.2 or newer, to a broker that presents a certificate of `ca_file` for its host;
    None without a `ca_file`.

    Raises:
        OSError: a file cannot be read, or is not PEM.
    """
    if not mqtt.ca_file:
        return None
    context = ssl.create_default_context(cafile=mqtt.ca_file)
    context.minimum_version = ssl.TLSVersion.TLSv1_2
    if mqtt.cert_file:
        _load_own_certificate(context, mqtt)
    return context


def faults_of(mqtt: Mqtt) -> list[str]:
    """Return why no connection can be tried: contradictions of the settings, or their files'
    faults."""
    if not mqtt.host:
        return ["mqtt: host must not be empty"]
    if not mqtt.port:
        return ["mqtt: port must be 1 to 65535, not 0"]
    if mqtt.password_file and mqtt.username is None:
        return ["mqtt: password_file needs a username beside it"]
    faults = []
    try:
        password_of(mqtt)
    except OSError as error:
        faults.append(f"mqtt.password_file: {mqtt.password_file}: cannot be read: {error.strerror}")
    except UnicodeDecodeError as error:
        faults.append(f"mqtt.password_file: {mqtt.password_file}: not UTF-8 at byte {error.start}")
    if mqtt.ca_file:
        try:
            ssl.create_default_context(cafile=mqtt.ca_file)
        except ssl.SSLError:
            faults.append(f"mqtt.ca_file: {mqtt.ca_file}: holds no certificate in PEM form")
        except OSError as error:
            faults.append(f"mqtt.ca_file: {mqtt.ca_file}: cannot be read: {error.strerror}")
    if mqtt.cert_file:
        try:
            _load_own_certificate(ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT), mqtt)
        except OSError as error:  # ssl.SSLError is one
            faults.append(
                f"mqtt.cert_file, mqtt.key_file: {mqtt.cert_file}, {mqtt.key_file}: cannot be "
                f"used: {error.strerror or error}; give a certificate and its key in PEM form, "
                "without a password"
            )
    return faults


def _load_own_certificate(context: ssl.SSLContext, mqtt: Mqtt) -> None:
    # The empty password keeps OpenSSL from asking for one on a terminal.
    context.load_cert_chain(mqtt.cert_file or "", mqtt.key_file, password="")


def reason_of(error: Exception) -> str:
    """Return why no connection was made; the clock may be the reason where a certificate is not
    valid at this time."""
    reason = str(getattr(error, "strerror", None) or error)
    if isinstance(error, ssl.SSLCertVerificationError) and error.verify_code in _OF_ANOTHER_TIME:
        today = time.strftime("%Y-%m-%d", time.gmtime())
        return f"{reason}; is the clock of this device right? It shows {today}"
    return reason
