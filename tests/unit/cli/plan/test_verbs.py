"""The command line of plans is light until it has something to do, and says what is wrong."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

import pytest

from edge_server.backends.tensorrt.plan_options import BuildOptions, GivenShapes
from edge_server.backends.tensorrt.plan_process import Progressed, Step, TrtMessage
from edge_server.cli.main import command_line, run_command
from edge_server.errors import InvalidRequest
from edge_server.tools.plan import BuildBar, requested_options

if TYPE_CHECKING:
    from pathlib import Path


@pytest.mark.parametrize(
    ("arguments", "code", "expected_text"),
    [
        (["build", "nobody"], 78, "no model 'nobody' in "),
        (["inspect", "net"], 78, "model.plan: missing; run `edge-server plan build net`"),
        (["verify", "net", "--version", "3"], 78, "no version 3; there are: 1"),
        (["build", "net"], 78, "model.onnx: missing; a plan is built from an ONNX file"),
        (["build", "ensemble"], 78, "an ensemble has no plan of its own"),
        (["build", "none.onnx"], 78, "none.onnx: missing"),
    ],
)
def test_what_is_not_there_is_told(
    arguments: list[str],
    code: int,
    expected_text: str,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    (tmp_path / "net" / "1").mkdir(parents=True)
    (tmp_path / "net" / "config.pbtxt").write_text('platform: "tensorrt_plan"')
    (tmp_path / "ensemble" / "1").mkdir(parents=True)
    (tmp_path / "ensemble" / "config.pbtxt").write_text('platform: "ensemble"')
    assert run_command(["plan", *arguments, "--model-repository", str(tmp_path)]) == code
    assert expected_text in capsys.readouterr().err


def test_names_are_looked_for_where_the_daemon_has_its_models(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "config.toml").write_text(f"[repository]\npaths = ['{tmp_path}/elsewhere']\n")
    (tmp_path / "elsewhere").mkdir()
    assert run_command(["plan", "inspect", "net", "--config", f"{tmp_path}/config.toml"]) == 78
    assert f"no model 'net' in {tmp_path}/elsewhere" in capsys.readouterr().err


def options(*arguments: str, configured: BuildOptions | None = None) -> BuildOptions:
    given = command_line().parse_args(["plan", "build", "m", *arguments])
    return requested_options(configured or BuildOptions(), given)


def test_what_a_person_says_wins_over_the_configuration(tmp_path: Path) -> None:
    configured = BuildOptions(
        "int8", max_batch_size=4, dims={"x": (-1,)}, dla_core=0, max_gpu_layers=3, workspace_mib=9
    )
    assert options(configured=configured) == configured
    changed = options(
        *("--fp16", "--dla-core", "1", "--no-gpu-fallback", "--max-gpu-layers", "0"),
        *("--workspace", "64", "--strongly-typed", "--opt", "x:1", "--opt", "x:2", "--max", "x:4"),
        configured=configured,
    )
    assert changed == BuildOptions(
        "fp16",
        strongly_typed=True,
        max_batch_size=4,
        dims={"x": (-1,)},
        profiles=(GivenShapes({}, {"x": (1,)}, {"x": (4,)}), GivenShapes({}, {"x": (2,)}, {})),
        dla_core=1,
        gpu_fallback=False,
        max_gpu_layers=0,
        workspace_mib=64,
    )
    assert options("--gpu", configured=configured).dla_core is None
    assert options("--int8", "--calibration", str(tmp_path)).calibration == str(tmp_path)


def test_flags_that_exclude_each_other_are_told() -> None:
    with pytest.raises(InvalidRequest, match="--int8 lets layers calculate in FP16 too"):
        options("--fp16", "--int8")
    with pytest.raises(InvalidRequest, match="--gpu and --dla-core"):
        options("--gpu", "--dla-core", "0")


@pytest.mark.parametrize("flag", ["--dla-core=-1", "--workspace=0", "--version=x"])
def test_a_number_is_a_number(flag: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        run_command(["plan", "build", "m", flag])
    assert caught.value.code == 2
    assert "give " in capsys.readouterr().err


def test_a_terminal_gets_one_line_that_is_written_over() -> None:
    ours, theirs = os.openpty()
    with os.fdopen(theirs, "w") as terminal:
        bar = BuildBar(verbose=False, file=terminal)
        bar(Step("building"))
        bar(Progressed(0.5, "Building engine"))
        bar(TrtMessage("WARNING", "slow"))
        bar.close()
        shown = ""
        while not shown.endswith("\x1b[2K"):  # a terminal gives what it has
            shown += os.read(ours, 4096).decode()
    os.close(ours)
    assert " 50%" in shown
    assert "building engine" in shown
    assert "slow" not in shown
    assert bar.warnings == 1


def test_a_log_gets_a_line_a_step_and_what_tensorrt_says_on_request(tmp_path: Path) -> None:
    with (tmp_path / "log").open("w") as file:
        bar = BuildBar(verbose=True, file=file)
        bar(Step("building"))
        bar(Progressed(0.5, "Building engine"))
        bar(TrtMessage("INFO", "hello"))
        bar.close()
    assert (tmp_path / "log").read_text() == "building …\nTensorRT INFO: hello\n"
