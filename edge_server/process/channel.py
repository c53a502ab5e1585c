"""Messages over a socket, between a process and the one that it has started."""

from __future__ import annotations

import socket
import threading
from typing import Any, Generic, TypeVar

import msgspec

from edge_server.process.in_child import LENGTH_BYTES

LONGEST_BYTES = 1 << 28
# How much one read takes.
CHUNK_BYTES = 1 << 16

M = TypeVar("M")


class ChannelClosed(Exception):
    """The peer is gone, or does not read."""


class NotUnderstood(ChannelClosed):
    """The peer sent bytes that are no valid message."""


class MessageTooLong(ValueError):
    """The message was not sent; the channel is still usable."""


class Channel(Generic[M]):
    """Sends from any thread; one thread receives messages of type `M`.

    Args:
        connection: owned by the caller, who closes it.
        kind: the type of received messages.
        codec: `msgspec.msgpack` or `msgspec.json`.
        timeout_s: how long `send` waits for the peer to read, and `receive` for the peer to send;
            None is for ever.
        longest_sent_bytes, longest_received_bytes: size limits of one message.
    """

    def __init__(
        self,
        connection: socket.socket,
        kind: Any,
        *,
        codec: Any = msgspec.msgpack,
        timeout_s: float | None = 5.0,
        longest_sent_bytes: int = LONGEST_BYTES,
        longest_received_bytes: int = LONGEST_BYTES,
    ) -> None:
        connection.settimeout(timeout_s)
        self._connection = connection
        self._longest_sent_bytes = longest_sent_bytes
        self._longest_received_bytes = longest_received_bytes
        self._encoder = codec.Encoder()
        self._decoder = codec.Decoder(kind)
        self._sending = threading.Lock()
        self._received = bytearray()

    def send(self, message: object) -> None:
        """Send a message.

        Raises:
            ChannelClosed: the peer is gone, or did not read in time.
            MessageTooLong: it was not sent.
        """
        body = self._encoder.encode(message)
        if len(body) > self._longest_sent_bytes:
            raise MessageTooLong(
                f"names, texts and parameters of {len(body)} bytes at once; at most "
                f"{self._longest_sent_bytes} are taken"
            )
        length = len(body).to_bytes(LENGTH_BYTES, "little")
        try:
            with self._sending:
                self._connection.sendall(length + body, socket.MSG_NOSIGNAL)
        except TimeoutError:
            raise ChannelClosed("the peer does not read") from None
        except OSError as error:
            raise ChannelClosed(f"the peer is gone: {error}") from error

    def receive(self) -> list[M]:
        """Wait for data; return the messages that the data completes, in order."""
        try:
            chunk = self._connection.recv(CHUNK_BYTES)
        except TimeoutError:
            return []
        except OSError as error:
            raise ChannelClosed(f"the peer is gone: {error}") from error
        if not chunk:
            raise ChannelClosed("the peer is gone")
        self._received += chunk
        messages = []
        begin = 0
        while (body := begin + LENGTH_BYTES) <= len(self._received):
            length = int.from_bytes(self._received[begin:body], "little")
            if length > self._longest_received_bytes:
                raise NotUnderstood(
                    f"a message of {length} bytes; at most {self._longest_received_bytes} are taken"
                )
            if len(self._received) < body + length:
                break
            messages.append(self._decode(memoryview(self._received)[body : body + length]))
            begin = body + length
        del self._received[:begin]
        return messages

    def _decode(self, body: memoryview) -> M:
        try:
            return self._decoder.decode(body)  # type: ignore[no-any-return]  # of `kind`
        except msgspec.DecodeError as error:
            raise NotUnderstood(f"not a message: {error}") from error
        finally:
            body.release()
