"""An examination is told to people with marks or words, and to machines as JSON."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

import pytest

from edge_server.board.board import read_board
from edge_server.board.doctor.examination import Examination
from edge_server.board.doctor.hardware import (
    Configuration,
    Evidence,
    ProbeResult,
    fault,
    ok,
    warning,
)
from edge_server.cli.doctor import as_json, matrix, text
from edge_server.cli.main import run_command

if TYPE_CHECKING:
    from support.fake_board import FakeBoard


@pytest.fixture
def examination(fake_board: FakeBoard) -> Examination:
    fake_board.jetson("NVIDIA Jetson Orin NX", "p3767-0000", "36.4.3")
    evidence = Evidence(
        read_board(fake_board.root, 4e9),
        Configuration(None, None),
        None,
        {"driver": ProbeResult({"init": 0}), "opencv": ProbeResult(failure="no answer")},
        "3.10.12",
        "0.1",
    )
    findings = {
        "jetpack": ok("JetPack 6.2"),
        "power_mode": warning("15W", "sudo nvpmodel -m 0"),
        "driver": fault("does not start", "restart"),
    }
    return Examination(evidence, findings)


def test_people_get_a_mark_a_finding_and_the_remedy(examination: Examination) -> None:
    assert list(text(examination, marks=True, colour=False)) == [
        "edge-server 0.1, Python 3.10.12, Linux 5.15.148-tegra",
        "✔ jetpack     JetPack 6.2",
        "‼ power_mode  15W",
        "              → sudo nvpmodel -m 0",
        "✘ driver      does not start",
        "              → restart",
        "1 fault, 1 warning; rights are those of user edge-server",
    ]


def test_without_a_terminal_words_tell_it_in_ascii(examination: Examination) -> None:
    lines = list(text(examination, marks=False, colour=False))
    assert lines[2:4] == ["warning power_mode  15W", "                    -> sudo nvpmodel -m 0"]
    assert "\n".join(lines).isascii()


def test_only_the_mark_is_coloured(examination: Examination) -> None:
    lines = list(text(examination, marks=True, colour=True))
    assert lines[4] == "\x1b[31m✘\x1b[0m driver      does not start"


def test_machines_get_all_checks_and_facts(examination: Examination) -> None:
    told = json.loads(as_json(examination))
    assert told["ok"] is False
    assert told["checks"][1] == {
        "name": "power_mode",
        "level": "warning",
        "found": "15W",
        "remedy": "sudo nvpmodel -m 0",
    }
    assert told["board"]["module"]["nvdla_cores"] == 2
    assert told["board"]["jetpack"]["tensorrt"] == "10.3.0"
    assert told["probes"]["opencv"] == {"says": {}, "trouble": "no answer"}


def test_the_matrix_tells_where_nvdla_can_be_used() -> None:
    rows = {line.split()[0]: line for line in matrix()}
    assert rows["6.2"].endswith("AGX, NX")
    assert rows["7.2"].endswith("no")
    assert "11.4.1" in rows["7.2.2"]


def test_the_matrix_is_told_without_looking_at_the_machine(
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert run_command(["doctor", "--matrix"]) == 0
    assert "TensorRT" in capsys.readouterr().out


def test_a_mistyped_flag_is_a_usage_error_with_the_nearest(
    capsys: pytest.CaptureFixture[str],
) -> None:
    with pytest.raises(SystemExit) as ended:
        run_command(["doctor", "--jsno"])
    assert ended.value.code == 2
    assert "did you mean --json?" in capsys.readouterr().err
