"""Writing of one MCAP file, of which a crash at any moment costs the open chunk alone."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

from mcap.writer import CompressionType, Writer

from edge_server.cameras.mcap_file import Records
from edge_server.pipeline.recorder.messages import schema_data
from edge_server.process.disk import atomic_replace

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path

    from edge_server.pipeline.recorder.messages import RecordedMessage, Topic

# Three pictures: what a crash costs.
_CHUNK_BYTES = 256 << 10
_FLAGS = os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_NOFOLLOW | os.O_CLOEXEC
PART = ".part"
RECOVERING = ".recovering"
RECORDING = "edge.recording"  # the metadata record: what the file is of


class _Output:
    """A file without a buffer of its own: what is written is the kernel's, at once.

    It is no `io.RawIOBase`: mcap would put a buffer before one, and lose its content.
    """

    def __init__(self, path: Path) -> None:
        self.size = 0
        self._descriptor = os.open(path, _FLAGS, 0o640)

    def write(self, data: bytes) -> int:
        rest = memoryview(data)
        while rest:
            written = os.write(self._descriptor, rest)
            self.size += written
            rest = rest[written:]
        return len(data)

    def tell(self) -> int:
        return self.size

    def sync(self) -> None:
        os.fdatasync(self._descriptor)

    def close(self) -> None:
        # Once: another thread may have been given the same number since.
        descriptor, self._descriptor = self._descriptor, -1
        if descriptor >= 0:
            os.close(descriptor)


class McapWriter:
    """Writes `path` with the suffix `.part`, and names it `path` when it is whole.

    Args:
        path: the file.
        metadata: of the recording.

    Raises:
        OSError: of every method too: the disk is full, or failed. Only `abandon` may follow.
    """

    def __init__(self, path: Path, metadata: Mapping[str, str]) -> None:
        self.path = path
        self.part = path.with_name(path.name + PART)
        self.messages = 0
        self._output = _Output(self.part)
        # JPEGs do not get smaller; compression would cost 1 ms for each.
        self._writer = Writer(self._output, _CHUNK_BYTES, CompressionType.NONE)
        self._schemas: dict[str, int] = {}
        self._channels: dict[Topic, int] = {}
        try:
            self._writer.start(library="edge-server")
            self._writer.add_metadata(RECORDING, dict(metadata))
        except BaseException:
            self.abandon()
            raise

    @property
    def size(self) -> int:
        """Bytes on disk; those of the open chunk are not."""
        return self._output.size

    def write(self, message: RecordedMessage) -> None:
        """Add a message; it is in the file with the end of its chunk."""
        topic = message.topic
        channel = self._channels.get(topic)
        if channel is None:
            schema = self._schema(topic.schema)
            channel = self._channels[topic] = self._writer.register_channel(
                topic.name, "protobuf", schema, dict(topic.metadata)
            )
        self.messages += 1
        self._writer.add_message(
            channel, message.log_ns, message.data, message.publish_ns, self.messages % 2**32
        )

    def sync(self) -> None:
        """Return when what is in the file is safe from a power cut."""
        self._output.sync()

    def finish(self, name: str = "") -> Path:
        """Complete the file, name it, and return its path.

        Args:
            name: instead of the one that it was made for.
        """
        self._writer.finish()
        self._output.close()
        path = self.path.with_name(name or self.path.name)
        atomic_replace(self.part, path)
        return path

    def abandon(self) -> None:
        """Leave the file as it is; one without a message is removed. Raises nothing."""
        try:
            self._output.close()
            if not self.size or not self.messages:
                self.part.unlink(missing_ok=True)
        except OSError:
            pass

    def _schema(self, name: str) -> int:
        if name not in self._schemas:
            data = schema_data(name)
            self._schemas[name] = self._writer.register_schema(name, "protobuf", data)
        return self._schemas[name]


def recover(part: Path) -> Path | None:
    """Make a whole file of one that was being written, with all its messages up to where it breaks
    off; return its path, or None where it has none. `part` is gone afterwards.

    Raises:
        OSError: the disk is full, or failed; `part` stays.
    """
    records = Records(part)
    whole = part.with_name(part.name + RECOVERING)
    output = _Output(whole)
    count = 0
    try:
        writer = Writer(output, _CHUNK_BYTES, CompressionType.NONE)
        writer.start(library="edge-server")
        schemas: dict[str, int] = {}
        channels: dict[int, int] = {}
        for schema, channel, message in records:
            if not count:
                about = records.metadata.get(RECORDING, {})
                writer.add_metadata(RECORDING, {**about, "recovered": "true"})
            count += 1
            if channel.id not in channels:
                name = "" if schema is None else schema.name
                if schema is not None and name not in schemas:
                    schemas[name] = writer.register_schema(name, schema.encoding, schema.data)
                channels[channel.id] = writer.register_channel(
                    channel.topic,
                    channel.message_encoding,
                    schemas.get(name, 0),
                    dict(channel.metadata),
                )
            writer.add_message(
                channels[channel.id],
                message.log_time,
                message.data,
                message.publish_time,
                message.sequence,
            )
        writer.finish()
        output.close()
    except BaseException:
        output.close()
        whole.unlink(missing_ok=True)
        raise
    path = part.with_name(part.name.removesuffix(PART))
    if count:
        atomic_replace(whole, path)
    else:
        whole.unlink()
    part.unlink()
    return path if count else None
