"""`pb_utils.Logger`: lines for the daemon's log."""

from __future__ import annotations

import logging

from edge_server.backends.python.child.given import printable
from edge_server.backends.python.child.link import daemon
from edge_server.backends.python.messages import LogLine


class Logger:
    INFO = logging.INFO
    WARNING = logging.WARNING
    ERROR = logging.ERROR
    VERBOSE = logging.DEBUG

    @staticmethod
    def log(message: str, level: int = logging.INFO) -> None:
        daemon().send(LogLine(int(level), printable(message)))

    @staticmethod
    def log_info(message: str) -> None:
        Logger.log(message, Logger.INFO)

    @staticmethod
    def log_warn(message: str) -> None:
        Logger.log(message, Logger.WARNING)

    @staticmethod
    def log_error(message: str) -> None:
        Logger.log(message, Logger.ERROR)

    @staticmethod
    def log_verbose(message: str) -> None:
        Logger.log(message, Logger.VERBOSE)
