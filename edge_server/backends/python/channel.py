"""Messages between the daemon and a model's process, over a stream socket."""

from __future__ import annotations

import select
import socket
import threading
import time
from typing import Any, Generic, TypeVar

import msgspec

_LENGTH_BYTES = 4
LONGEST_BYTES = 1 << 28
_CHUNK_BYTES = 1 << 16

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
        kind: the type of received messages, a union of tagged structs.
        longest_sent_bytes, longest_received_bytes: size limits of one message.
    """

    def __init__(
        self,
        connection: socket.socket,
        kind: Any,
        *,
        longest_sent_bytes: int = LONGEST_BYTES,
        longest_received_bytes: int = LONGEST_BYTES,
    ) -> None:
        self._connection = connection
        self._longest_sent_bytes = longest_sent_bytes
        self._longest_received_bytes = longest_received_bytes
        self._encoder = msgspec.msgpack.Encoder()
        self._decoder: msgspec.msgpack.Decoder[M] = msgspec.msgpack.Decoder(kind)
        self._sending = threading.Lock()
        self._received = bytearray()

    def send(self, message: msgspec.Struct, patience_s: float = 5.0) -> None:
        """Send a message.

        Raises:
            ChannelClosed: the peer did not read the message within `patience_s`.
            MessageTooLong: the message exceeds the limit and was not sent.
        """
        body = self._encoder.encode(message)
        if len(body) > self._longest_sent_bytes:
            raise MessageTooLong(
                f"names, texts and parameters of {len(body)} bytes at once; at most "
                f"{self._longest_sent_bytes} are taken"
            )
        left = memoryview(len(body).to_bytes(_LENGTH_BYTES, "little") + body)
        give_up_at = time.monotonic() + patience_s
        with self._sending:
            while left:
                try:
                    sent = self._connection.send(left, socket.MSG_DONTWAIT | socket.MSG_NOSIGNAL)
                except BlockingIOError:
                    self._wait_for_room(give_up_at)
                except OSError as error:
                    raise ChannelClosed(f"the other side is gone: {error}") from error
                else:
                    left = left[sent:]

    def receive(self) -> list[M]:
        """Block until data arrives; return the messages that the data completes, in order.

        Raises:
            ChannelClosed: the peer is gone.
            NotUnderstood: the data is no valid message.
        """
        try:
            chunk = self._connection.recv(_CHUNK_BYTES)
        except OSError as error:
            raise ChannelClosed(f"the other side is gone: {error}") from error
        if not chunk:
            raise ChannelClosed("the other side is gone")
        self._received += chunk
        messages = []
        begin = 0
        while (body := begin + _LENGTH_BYTES) <= len(self._received):
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
            return self._decoder.decode(body)
        except msgspec.DecodeError as error:
            raise NotUnderstood(f"a message that is none: {error}") from error
        finally:
            body.release()

    def _wait_for_room(self, give_up_at: float) -> None:
        left_s = give_up_at - time.monotonic()
        poll = select.poll()
        poll.register(self._connection, select.POLLOUT)
        if left_s <= 0 or not poll.poll(1e3 * left_s):
            raise ChannelClosed("the other side does not listen")
