"""The small pieces of a build: the line of trtexec, samples, L4T's release, memory that is left."""

from __future__ import annotations

import shlex
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from support.simulated_gpu import SIMULATED_GPU

from edge_server.backends.tensorrt.plan_cache import trtexec_line
from edge_server.backends.tensorrt.plan_options import (
    BuildOptions,
    Range,
    datatype_name,
    full_version,
    version_of,
)
from edge_server.board.board import read_l4t
from edge_server.errors import InvalidRequest


@pytest.fixture
def samples_of(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Samples, whose module imports TensorRT: here the simulated one."""
    monkeypatch.syspath_prepend(SIMULATED_GPU)
    from edge_server.backends.tensorrt.plan_builder import Samples

    return Samples


X = {"x": Range((1, 3), (2, 3), (4, 3)), "y:0": Range((1,), (1,), (1,))}
WANTED = {"x": ((1, 3), np.dtype("<f4"))}


def words(
    options: BuildOptions, version: tuple[int, int], *profiles: dict[str, Range]
) -> list[str]:
    line = trtexec_line(Path("a b.onnx"), Path("p.plan"), options, profiles, version)
    return shlex.split(line)


def test_the_line_of_trtexec_says_all_that_was_wished_for() -> None:
    options = BuildOptions("int8", dla_core=1, workspace_mib=64)
    assert words(options, (10, 3), X) == [
        "trtexec",
        "--onnx=a b.onnx",
        "--saveEngine=p.plan",
        "--int8",
        "--fp16",
        "--minShapes=x:1x3,y:0:1",
        "--optShapes=x:2x3,y:0:1",
        "--maxShapes=x:4x3,y:0:1",
        "--useDLACore=1",
        "--allowGPUFallback",
        "--memPoolSize=workspace:64",
        "--profilingVerbosity=detailed",
        "--skipInference",
    ]


def test_the_line_is_of_the_version() -> None:
    assert "--stronglyTyped" in words(BuildOptions(strongly_typed=True), (10, 3))
    assert "--fp16" not in words(BuildOptions("int8"), (11, 4))
    assert "--stronglyTyped" not in words(BuildOptions(strongly_typed=True), (11, 4))
    assert "--profile=1" in words(BuildOptions(), (10, 3), X, X)


def test_samples_are_read_in_order_and_get_their_batch_dimension(
    tmp_path: Path, samples_of: Any
) -> None:
    np.save(tmp_path / "b.npy", np.array([[2.0, 2.0, 2.0]]))
    np.save(tmp_path / "a.npy", np.array([1, 1, 1]))
    found = [sample["x"] for sample in samples_of(tmp_path, WANTED)]
    assert [array.tolist() for array in found] == [[[1, 1, 1]], [[2, 2, 2]]]
    assert {array.dtype for array in found} == {np.dtype("<f4")}


def test_samples_of_several_inputs_go_together(tmp_path: Path, samples_of: Any) -> None:
    for name in "xy":
        (tmp_path / name).mkdir()
        np.save(tmp_path / name / "0.npy", np.zeros((1, 3)))
    wanted = dict.fromkeys("xy", WANTED["x"])
    assert [sorted(sample) for sample in samples_of(tmp_path, wanted)] == [["x", "y"]]
    np.save(tmp_path / "y" / "1.npy", np.zeros((1, 3)))
    with pytest.raises(InvalidRequest, match="of each input as many samples"):
        samples_of(tmp_path, wanted)


def test_samples_that_cannot_be_used_are_named(tmp_path: Path, samples_of: Any) -> None:
    with pytest.raises(InvalidRequest, match=r"no \.npy file to calibrate input 'x' with"):
        samples_of(tmp_path, WANTED)
    np.save(tmp_path / "a.npy", np.zeros((2, 3)))
    with pytest.raises(InvalidRequest, match=r"a\.npy: has shape \[2, 3\], input 'x' takes"):
        list(samples_of(tmp_path, WANTED))
    np.save(tmp_path / "a.npy", np.array([{}], object), allow_pickle=True)
    with pytest.raises(InvalidRequest, match=r"a\.npy: no array can be read from it"):
        list(samples_of(tmp_path, WANTED))


@pytest.mark.parametrize(
    ("text", "release"),
    [
        ("# R36 (release), REVISION: 4.7, GCID: 42132812, BOARD: generic, EABI: aarch64", "36.4.7"),
        ("# R35 (release), REVISION: 6.0, GCID: 1", "35.6.0"),
        ("Debian", ""),
        ("", ""),
    ],
)
def test_the_release_of_jetson_linux_is_read(text: str, release: str, tmp_path: Path) -> None:
    path = tmp_path / "etc/nv_tegra_release"
    path.parent.mkdir()
    path.write_text(text)
    assert str(read_l4t(tmp_path) or "") == release


def test_no_jetson_has_no_release(tmp_path: Path) -> None:
    assert read_l4t(tmp_path) is None


@pytest.mark.parametrize(
    ("text", "version"), [("10.3.0.30", (10, 3)), ("8.6.1", (8, 6)), ("", (0, 0)), ("x.y", (0, 0))]
)
def test_a_version_is_its_first_two_numbers(text: str, version: tuple[int, int]) -> None:
    assert version_of(text) == version


def test_a_type_that_the_protocol_does_not_have_keeps_its_name() -> None:
    assert datatype_name("HALF") == "FP16"
    assert datatype_name("FP8") == "FP8"


class BuildNumber:
    """What `libnvinfer` tells of itself."""

    def __init__(self, name: str) -> None:
        assert name == "libnvinfer.so.10"

    def getInferLibBuildVersion(self) -> int:  # noqa: N802 - TensorRT's
        return 30


def nothing(name: str) -> None:
    raise OSError(name)


def test_the_build_number_that_the_bindings_leave_out_is_the_librarys() -> None:
    assert full_version("10.3.0", BuildNumber) == "10.3.0.30"
    assert full_version("10.3.0.26", BuildNumber) == "10.3.0.26"
    # 8.6 has no such function.
    assert full_version("8.6.2", lambda _: object()) == "8.6.2"
    assert full_version("10.3.0", nothing) == "10.3.0"
