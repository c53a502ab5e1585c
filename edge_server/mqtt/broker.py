"""What the `[mqtt]` settings name: the broker's address, the password, certificates; and the socket
to it.

The files are read for every connection, so that a changed file takes effect.
"""

from __future__ import annotations

import errno
import socket
import ssl
import time
from typing import TYPE_CHECKING, Any, Final

from edge_server.settings.read import read_text_file

if TYPE_CHECKING:
    from paho.mqtt.client import Client

    from edge_server.settings import Mqtt

# X509_V_ERR_CERT_NOT_YET_VALID and X509_V_ERR_CERT_HAS_EXPIRED of OpenSSL.
_OF_ANOTHER_TIME = (9, 10)

# The broker only sends back the states of this device.
MOST_PACKET_BYTES: Final = 64 * 1024
# The first bytes of what a broker may send a client that subscribes with QoS 0 and publishes with
# QoS 0 and 1: CONNACK, PUBLISH without and with retain, PUBACK, SUBACK, PINGRESP, DISCONNECT.
_EXPECTED: Final = frozenset({0x20, 0x30, 0x31, 0x40, 0x90, 0xD0, 0xE0})
_PUBLISH: Final = 0x30


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


def log_in(client: Client, mqtt: Mqtt) -> None:
    """Have `client` connect with the user and the password of `mqtt`, and where that has a
    `ca_file`, with TLS 1.2 or newer to a broker that presents a certificate of it for its host. Its
    sockets end the connection at the header of a packet that it has not agreed to; see `fault_of`.

    Raises:
        OSError: a file cannot be read, or is not PEM.
        UnicodeDecodeError: see `password_of`.
    """
    if mqtt.username is not None:
        client.username_pw_set(mqtt.username, password_of(mqtt))
    context: ssl.SSLContext = _Unencrypted(ssl.PROTOCOL_TLS_CLIENT)
    if mqtt.ca_file:
        context = ssl.create_default_context(cafile=mqtt.ca_file)
        context.minimum_version = ssl.TLSVersion.TLSv1_2
        if mqtt.cert_file:
            _load_own_certificate(context, mqtt)
    context.sslsocket_class = _TlsSocket
    client.tls_set_context(context)


def fault_of(sock: object) -> str:
    """Return why a socket of `log_in` has ended its connection; empty where it has not."""
    return sock.fault if isinstance(sock, _PacketSocket) else ""


class _PacketSocket(socket.socket):
    """Ends the connection at the fixed header of a packet that is larger than announced, or is not
    of `_EXPECTED`: paho would take 256 MiB for one, and keep every message of QoS 2 that is never
    released.

    Attributes:
        fault: what the broker sent; empty while that was right.
    """

    fault = ""
    _header = b""
    _body_bytes = 0

    def recv(self, buflen: int = 1024, flags: int = 0) -> bytes:
        data = super().recv(buflen, flags)
        at = 0
        while at < len(data):
            if self._body_bytes:
                skipped = min(self._body_bytes, len(data) - at)
                self._body_bytes -= skipped
                at += skipped
            else:
                self._header += data[at : at + 1]
                at += 1
                self._judge()
        return data

    def _judge(self) -> None:
        first, *size = self._header
        if first not in _EXPECTED:
            quality = first >> 1 & 3
            if first & 0xF0 == _PUBLISH and quality:
                self._refuse(f"a message of QoS {quality}, and QoS 0 is subscribed")
            self._refuse(f"a packet of the kind 0x{first:02x}, which this client has no use for")
        if not size or size[-1] > 127:
            return
        body_bytes = sum((byte & 127) << 7 * place for place, byte in enumerate(size))
        packet_bytes = len(self._header) + body_bytes
        if packet_bytes > MOST_PACKET_BYTES:
            self._refuse(
                f"a packet of {packet_bytes} bytes, and {MOST_PACKET_BYTES} are the most that "
                "this client takes"
            )
        self._header, self._body_bytes = b"", body_bytes

    def _refuse(self, what: str) -> None:
        self.fault = f"a protocol error: the broker sends {what}"
        raise OSError(errno.EPROTO, self.fault)


class _PlainSocket(_PacketSocket):
    def do_handshake(self) -> None:
        """Without TLS there is none."""


class _TlsSocket(_PacketSocket, ssl.SSLSocket):
    """Closes itself when the handshake fails; paho leaves that to the garbage collector."""

    def do_handshake(self, block: bool = False) -> None:
        try:
            super().do_handshake(block)
        except BaseException:
            self.close()
            raise


class _Unencrypted(ssl.SSLContext):
    """No TLS at all: a context is paho's only public way to a socket of one's choice."""

    def wrap_socket(self, sock: socket.socket, *_: Any, **__: Any) -> Any:
        return _PlainSocket(fileno=sock.detach())


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
