"""A model that there is no memory for is refused before anything is loaded."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from edge_server.errors import Unavailable
from edge_server.lifecycle.build import MemoryBudget, available_bytes, needed_bytes, shortage
from edge_server.lifecycle.model_spec import ModelSpec
from edge_server.repository.scan import files_in

if TYPE_CHECKING:
    from pathlib import Path

    from support.model_folders import WriteModel

MIB = 1 << 20
IO = (
    'input { name: "x" data_type: TYPE_FP32 dims: 4 } '
    'output { name: "y" data_type: TYPE_FP32 dims: 4 } '
)


def meminfo(root: Path, text: str) -> Path:
    (root / "proc").mkdir(parents=True, exist_ok=True)
    (root / "proc/meminfo").write_text(text)
    return root


def model_spec(write_model: WriteModel, backend: str, **sizes: int) -> ModelSpec:
    """Of a model whose version 1 has files of so many MiB, which take no space on disk."""
    directory = write_model("m", f'backend: "{backend}" instance_group {{ count: 3 }} {IO}')
    for name, size in sizes.items():
        path = directory / "1" / name.replace("__", "/").replace("_", ".")
        path.parent.mkdir(parents=True, exist_ok=True)
        with path.open("wb") as file:
            file.truncate(size * MIB)
    return ModelSpec.read(files_in(directory))


@pytest.mark.parametrize(
    ("needed", "available", "reserve", "fits"),
    [(0, 0, 0, True), (1, 0, 0, False), (7, 10, 3, True), (8, 10, 3, False), (1, 2, 3, False)],
)
def test_what_is_needed_must_be_there_beside_the_reserve(
    needed: int, available: int, reserve: int, fits: bool
) -> None:
    assert (shortage(needed, available, reserve) == "") == fits


def test_nothing_needed_fits_even_where_the_reserve_is_used_up() -> None:
    assert shortage(0, 1, 2) == ""


@pytest.mark.parametrize(
    ("backend", "sizes", "mib"),
    [
        ("onnxruntime", {"model_onnx": 10, "model_plan": 4}, 25),
        ("onnxruntime", {"model_onnx__model_onnx": 2, "model_onnx__weights": 8}, 25),
        # A process, and the weights twice, for each instance.
        ("python", {"model_py": 0, "weights__a_pt": 10}, 3 * (64 + 20)),
        ("identity", {}, 0),
    ],
)
def test_the_need_is_that_of_the_largest_file_by_backend(
    write_model: WriteModel, backend: str, sizes: dict[str, int], mib: int
) -> None:
    assert needed_bytes(model_spec(write_model, backend, **sizes), [1]) == mib * MIB


def test_only_versions_that_are_loaded_count(write_model: WriteModel) -> None:
    assert needed_bytes(model_spec(write_model, "onnxruntime", model_onnx=10), []) == 0


@pytest.mark.parametrize(("backend", "running", "mib"), [("python", 1, 128), ("python", 4, 0)])
def test_of_a_loaded_version_only_further_instances_count(
    write_model: WriteModel, backend: str, running: int, mib: int
) -> None:
    model = model_spec(write_model, backend, model_py=0)
    assert needed_bytes(model, [], [1], running) == mib * MIB


def test_a_refusal_gives_how_much_is_needed_and_what_can_be_done(
    tmp_path: Path, write_model: WriteModel
) -> None:
    root = meminfo(tmp_path, f"MemTotal: 9999999 kB\nMemAvailable:   {100 * 1024} kB\n")
    budget = MemoryBudget(30 * MIB, root)
    budget.check(model_spec(write_model, "onnxruntime", model_onnx=28), [1])
    with pytest.raises(Unavailable) as caught:
        budget.check(model_spec(write_model, "onnxruntime", model_onnx=40), [1])
    assert str(caught.value) == (
        "model 'm': too little memory: loading it needs about 100 MiB, 100 MiB are available and "
        "30 MiB of them stay in reserve; unload another model, load fewer instances, or raise the "
        "daemon's limit where it has one (systemd: MemoryMax=)"
    )


@pytest.mark.parametrize("text", ["", "MemFree: 1 kB\n", "MemAvailable:\n", "MemAvailable: x kB\n"])
def test_where_the_kernel_does_not_say_nothing_is_refused(
    tmp_path: Path, write_model: WriteModel, text: str
) -> None:
    root = meminfo(tmp_path, text)
    assert available_bytes(root) is None
    MemoryBudget(1 << 60, root).check(model_spec(write_model, "onnxruntime", model_onnx=1), [1])
    assert available_bytes(tmp_path / "nowhere") is None
