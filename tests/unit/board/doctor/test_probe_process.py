"""Whatever a question does to the process that answers it, asking ends in time with an answer."""

from __future__ import annotations

import os
import signal
import subprocess
import sys

import pytest

from edge_server.board.account import Account
from edge_server.board.doctor.probe_process import Probe, ProbeResult, ask


def test_the_dict_of_the_function_is_the_answer() -> None:
    assert ask(Probe("json:loads", ('{"a": [1, null]}',))) == ProbeResult({"a": [1, None]})


def test_what_a_library_prints_is_no_part_of_the_answer() -> None:
    noisy = "__import__('os').write(1, b'noise') and print('more') or {'a': 1}"
    assert ask(Probe("builtins:eval", (noisy,))) == ProbeResult({"a": 1})


def test_a_crash_is_told_by_its_signal() -> None:
    assert "SIGABRT" in ask(Probe("os:abort")).trouble
    assert "SIGSEGV" in ask(Probe("builtins:eval", ("__import__('ctypes').string_at(0)",))).trouble


def test_a_hang_costs_its_patience() -> None:
    assert ask(Probe("signal:pause", patience_s=0.5)).trouble == "no answer within 0.5 s"


def test_an_exception_and_an_exit_are_told() -> None:
    assert ask(Probe("json:loads", ("{",))).trouble.startswith("json.decoder.JSONDecodeError")
    assert ask(Probe("edge_server.nowhere:at_all")).trouble.startswith("ModuleNotFoundError")
    assert ask(Probe("sys:exit")).trouble == "the process that tried ended with 1"


def test_an_answer_that_is_no_dict_is_none() -> None:
    assert ask(Probe("os:getcwd")).trouble


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can ask as another user")
def test_root_asks_as_the_account_that_is_named() -> None:
    ids = "(lambda os: {'ids': [*os.getresuid(), *os.getgroups()]})(__import__('os'))"
    for account, expected in (
        (Account("edge-server", 990, frozenset({990, 44})), [990, 990, 990, 44, 990]),
        (Account("root", 0, frozenset({0})), [0, 0, 0, *os.getgroups()]),
    ):
        answer = ask(Probe("builtins:eval", (ids,), account=account))
        assert answer == ProbeResult({"ids": expected})


def test_a_process_whose_asker_is_gone_ends_itself() -> None:
    start = "import sys; from edge_server.board.doctor.child import main; main()"
    done = subprocess.run(
        [sys.executable, "-c", start, "signal:pause", "0.1", ""], timeout=30, check=False
    )
    assert done.returncode == -signal.SIGALRM
