"""Scrape: reads the metrics of a running daemon, as Prometheus does."""

from __future__ import annotations

import math
import socket
import time
from typing import TYPE_CHECKING

from prometheus_client import parser

from edge_server.board.listening import client_host, host_and_port
from edge_server.errors import Unavailable

if TYPE_CHECKING:
    from collections.abc import Iterator

_TIMEOUT_S = 3.0
_LONGEST_S = 10.0
_PART_BYTES = 65536
_REQUEST = b"GET /metrics HTTP/1.0\r\nHost: %s\r\nAccept: text/plain\r\n\r\n"
_LONGEST_BYTES = 16 * 1024 * 1024


class Scrape:
    """The samples of one moment, without those that are no number (NaN, infinite).

    Args:
        text: in Prometheus' text format.
    """

    def __init__(self, text: str) -> None:
        self._samples = [
            sample
            for family in parser.text_string_to_metric_families(text)
            for sample in family.samples
            if math.isfinite(sample.value)
        ]

    def value(self, name: str, **labels: str) -> float | None:
        """Return the value of the sample with all these labels; None without one."""
        return next((value for value, _ in self._with(name, labels)), None)

    def labels(self, name: str, value: float, **labels: str) -> list[dict[str, str]]:
        """Return the labels of the samples that have `value`."""
        return [found for v, found in self._with(name, labels) if v == value]

    def total(self, name: str, **labels: str) -> float:
        """Return the sum of the samples that have all these labels."""
        return sum(value for value, _ in self._with(name, labels))

    def by_label(self, name: str, label: str, **labels: str) -> dict[str, float]:
        """Return the values of the samples that have all these labels, by another one."""
        return {found[label]: value for value, found in self._with(name, labels) if label in found}

    def _with(self, name: str, labels: dict[str, str]) -> Iterator[tuple[float, dict[str, str]]]:
        for sample in self._samples:
            if sample.name == name and labels.items() <= sample.labels.items():
                yield sample.value, sample.labels


def scrape(host: str, port: int) -> Scrape:
    """Return the present metrics of the daemon that serves them there.

    Raises:
        Unavailable: nothing answers there, or something else does.
    """
    try:
        return Scrape(read_metrics(host, port))
    except ValueError as error:
        where = host_and_port(host, port)
        raise Unavailable(f"http://{where}/metrics: {error}") from error


def read_metrics(host: str, port: int) -> str:
    """Return the text that `/metrics` answers with, some seconds later at most.

    Raises:
        Unavailable: nothing answers there, or not with a whole text.
    """
    host = client_host(host)
    where = host_and_port(host, port)
    until_s = time.monotonic() + _LONGEST_S
    received = bytearray()
    try:
        with socket.create_connection((host, port), _TIMEOUT_S) as connection:
            connection.sendall(_REQUEST % where.encode())
            while part := connection.recv(_PART_BYTES):
                received += part
                # The timeout is that of one read: who sends a byte now and then would take hours.
                if time.monotonic() > until_s:
                    raise Unavailable(
                        f"http://{where}/metrics: no whole answer within {_LONGEST_S:g} s"
                    )
                if len(received) > _LONGEST_BYTES:
                    break
        head, _, body = received.partition(b"\r\n\r\n")
        status = head.split(maxsplit=2)[1:2]
        if not head.startswith(b"HTTP/1.") or status != [b"200"]:
            said = b"".join(status) or b"none"
            raise Unavailable(f"http://{where}/metrics: status {said.decode('latin-1')}")
        return body.decode()
    except (OSError, ValueError) as error:
        reason = getattr(error, "strerror", None) or str(error) or type(error).__name__
        raise Unavailable(f"http://{where}/metrics: {reason}") from error
