"""Small real models for unit tests, built where they are needed."""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

import pytest

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path


class WriteModel(Protocol):
    def __call__(self, name: str, config: str, version: int = 1) -> Path: ...


@pytest.fixture
def repository(tmp_path: Path) -> Path:
    path = tmp_path / "models"
    path.mkdir()
    return path


@pytest.fixture
def write_model(repository: Path) -> WriteModel:
    """Writes `repository/name/config.pbtxt` and a version directory; the model's directory."""

    def write(name: str, config: str, version: int = 1) -> Path:
        directory = repository / name
        (directory / str(version)).mkdir(parents=True, exist_ok=True)
        (directory / "config.pbtxt").write_text(config)
        return directory

    return write


@pytest.fixture
def unreadable() -> Callable[[Path], None]:
    """Makes a path that the file system refuses to everyone, root included."""

    def make(path: Path) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.symlink_to("x" * 300)  # ENAMETOOLONG when it is followed

    return make


@pytest.fixture
def write_onnx() -> Callable[..., None]:
    """Writes an ONNX file that adds 1 to its FP32 input `x`, giving `y`."""

    def write(path: Path, shape: tuple[object, ...] = (1, 4)) -> None:
        import onnx
        from onnx import TensorProto, helper

        graph = helper.make_graph(
            [helper.make_node("Add", ["x", "one"], ["y"])],
            "add_one",
            [helper.make_tensor_value_info("x", TensorProto.FLOAT, shape)],
            [helper.make_tensor_value_info("y", TensorProto.FLOAT, shape)],
            [helper.make_tensor("one", TensorProto.FLOAT, [1], [1.0])],
        )
        model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 13)])
        model.ir_version = 8
        path.parent.mkdir(parents=True, exist_ok=True)
        onnx.save(model, path)

    return write
