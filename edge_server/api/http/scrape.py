"""Scrape: reads the metrics of a running daemon, as Prometheus does."""

from __future__ import annotations

import http.client
import math
import socket
import threading
import time
from contextlib import suppress
from typing import TYPE_CHECKING

from prometheus_client import parser

from edge_server.board.listening import client_host, host_and_port
from edge_server.errors import Unavailable

if TYPE_CHECKING:
    from collections.abc import Iterator

_TIMEOUT_S = 3.0
_LONGEST_S = 10.0
_PART_BYTES = 65536
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

    def by_label(self, name: str, label: str) -> dict[str, float]:
        """Return the values of a metric by one of its labels."""
        return {found[label]: value for value, found in self._with(name, {}) if label in found}

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
    where = f"http://{host_and_port(host, port)}/metrics"
    connection = http.client.HTTPConnection(host, port, timeout=_TIMEOUT_S)
    # The timeout is that of one read; who sends a byte now and then would keep this for hours, of
    # the head too.
    until_s = time.monotonic() + _LONGEST_S
    cut = threading.Timer(_LONGEST_S, _cut, [connection])
    cut.daemon = True
    cut.start()
    try:
        connection.request("GET", "/metrics", headers={"Accept": "text/plain"})
        response = connection.getresponse()
        read = bytearray()
        while len(read) < _LONGEST_BYTES and (part := response.read1(_PART_BYTES)):
            read += part
            if time.monotonic() > until_s:
                break
        text = read.decode()
        if time.monotonic() > until_s:
            raise TimeoutError
        if response.status != http.client.OK:
            raise Unavailable(f"{where}: status {response.status}")
    except (OSError, http.client.HTTPException, ValueError) as error:
        if time.monotonic() > until_s:
            raise Unavailable(f"{where}: no whole answer within {_LONGEST_S:g} s") from error
        reason = getattr(error, "strerror", None) or str(error) or type(error).__name__
        raise Unavailable(f"{where}: {reason}") from error
    else:
        return text
    finally:
        cut.cancel()
        connection.close()


def _cut(connection: http.client.HTTPConnection) -> None:
    """End what is read; the body has no socket here, and looks at the clock itself."""
    if (sock := connection.sock) is not None:
        with suppress(OSError):
            sock.shutdown(socket.SHUT_RDWR)
