"""A large model that comes slowly, by halves, or damaged: what of it is never served.

A pause of a writer here lasts until the daemon has taken the half for the whole, whatever the
window: it looked, it staged, it tried.
"""

from __future__ import annotations

import shutil
from itertools import pairwise
from typing import TYPE_CHECKING, TypeVar

import numpy as np
import pytest
from onnx import TensorProto, helper, numpy_helper
from support.model_folders import write_manifest
from support.waiting import wait_until

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from support.polling_server import Server

TIMEOUT_S = 30.0
_T = TypeVar("_T")
WEIGHTS = 5_000_000
CONFIG = 'backend: "onnxruntime"'


def network(number: float) -> bytes:
    """y = x + min(w) + 1000 (max(w) - min(w)), 20 MB, where all of w is `number`.

    So y = x + number, and any weight that is another one is in every answer.
    """
    constants = [
        numpy_helper.from_array(np.full(WEIGHTS, number, np.float32), "w"),
        numpy_helper.from_array(np.array([1000], np.float32), "thousand"),
    ]
    io = [helper.make_tensor_value_info(name, TensorProto.FLOAT, [1]) for name in "xy"]
    nodes = [
        helper.make_node("ReduceMin", ["w"], ["low"], keepdims=1),
        helper.make_node("ReduceMax", ["w"], ["high"], keepdims=1),
        helper.make_node("Sub", ["high", "low"], ["apart"]),
        helper.make_node("Mul", ["apart", "thousand"], ["far"]),
        helper.make_node("Add", ["low", "far"], ["told"]),
        helper.make_node("Add", ["x", "told"], ["y"]),
    ]
    graph = helper.make_graph(nodes, "g", io[:1], io[1:], constants)
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8)
    return model.SerializeToString()


OLD, NEW = network(1), network(2)
HALF = len(NEW) // 2
# In its header, in its weights, and in what comes behind them.
CUTS = (0, 20, HALF, len(NEW) - 1)


def with_a_bit_flipped(data: bytes, at: int) -> bytes:
    flipped = bytearray(data)
    flipped[at] ^= 0x40
    return bytes(flipped)


def build(model: Path, data: bytes) -> Path:
    (model / "1").mkdir(parents=True)
    (model / "config.pbtxt").write_text(CONFIG)
    (model / "1" / "model.onnx").write_bytes(data)
    return model


def write_golden(model: Path, answer: float) -> None:
    (model / "golden").mkdir(exist_ok=True)
    x, y = np.zeros(1, np.float32), np.full(1, answer, np.float32)
    np.savez(model / "golden" / "one.npz", **{"input.x": x, "output.y": y})


class Delivery:
    """What is done to the model `m` of a daemon, and what that answers meanwhile."""

    def __init__(self, server: Server) -> None:
        self.server = server
        self.model = server.repository / "m"
        self.file = self.model / "1" / "model.onnx"
        self.answers: set[float] = set()

    def refused(self, write: Callable[[_T], object], what: _T) -> None:
        """Write that, and wait until the daemon has told that it will not have it."""
        name = 'edge_model_reload_total{result="failed"}'
        before = self.server.metric(name)
        write(what)

        def is_told() -> bool:
            self.answers.add(self.server.answer())
            return self.server.metric(name) != before

        wait_until(is_told, TIMEOUT_S, otherwise=lambda: self.server.log)
        self.answers.add(self.server.answer())

    def loaded(self, number: float) -> None:
        self.answers |= self.server.wait_for(number)


@pytest.fixture
def delivery(tmp_path: Path, serve: Callable[..., Server]) -> Delivery:
    build(tmp_path / "repository" / "m", OLD)
    settings = tmp_path / "settings.toml"
    settings.write_text("[repository]\nprobation_requests = 0\n")
    return Delivery(serve("--config", str(settings)))


@pytest.mark.parametrize("version", ["1", pytest.param("2", marks=pytest.mark.long)])
def test_the_pieces_of_a_slow_copy_are_never_served(delivery: Delivery, version: str) -> None:
    path = delivery.model / version / "model.onnx"
    path.parent.mkdir(exist_ok=True)
    with path.open("wb", buffering=0) as file:
        for start, end in pairwise(CUTS):
            delivery.refused(file.write, NEW[start:end])
            assert delivery.server.wait_for_reason(str(path))
        file.write(NEW[CUTS[-1] :])
    delivery.loaded(2)
    assert delivery.answers == {1}
    assert not any("model.onnx" in reason for _, reason in delivery.server.index()["m"])


def test_what_was_cut_off_for_good_is_told_once_and_not_served_after_a_restart_either(
    delivery: Delivery, serve: Callable[..., Server], tmp_path: Path
) -> None:
    part = tmp_path / "part"
    for length in CUTS:
        # At once: on a busy machine a file that is being written stands still now and then.
        part.write_bytes(NEW[:length])
        delivery.refused(part.rename, delivery.file)
    # A thread of its own writes the log.
    wait_until(lambda: delivery.server.log.count(f"{delivery.file}: ") == len(CUTS))
    delivery.server.process.close()
    again = Delivery(serve())
    assert again.server.answer() == 1
    assert again.server.wait_for_reason(str(again.file)) == "READY"
    again.file.write_bytes(NEW)
    again.loaded(2)
    assert delivery.answers | again.answers == {1}


def test_one_bit_that_is_not_as_the_manifest_says_is_never_served(delivery: Delivery) -> None:
    damages = [("1/model.onnx", NEW, at) for at in (0, 30, HALF, len(NEW) - 1)]
    for path, data, at in [*damages, ("config.pbtxt", CONFIG.encode(), 0)]:
        incoming = build(delivery.model.with_name(".incoming-m"), NEW)
        write_manifest(incoming, "m")
        (incoming / path).write_bytes(with_a_bit_flipped(data, at))
        shutil.rmtree(delivery.model)
        delivery.refused(incoming.rename, delivery.model)
        assert delivery.server.wait_for_reason("is not what manifest.json says") == "READY"
    shutil.rmtree(delivery.model)
    build(delivery.model, NEW)
    delivery.loaded(2)
    assert delivery.answers == {1}


def test_with_a_manifest_half_of_what_is_written_over_the_old_is_never_served(
    delivery: Delivery,
) -> None:
    """As `rsync --inplace` does: the size is right all the time."""
    write_manifest(delivery.model, "m")
    with delivery.file.open("r+b", buffering=0) as file:
        delivery.refused(file.write, NEW[:HALF])
        delivery.refused(file.write, NEW[HALF:])
    assert delivery.server.wait_for_reason("is not what manifest.json says") == "READY"
    write_manifest(delivery.model, "m")
    delivery.loaded(2)
    assert delivery.answers == {1}


def test_with_a_golden_pair_weights_that_are_others_are_never_served(delivery: Delivery) -> None:
    write_golden(delivery.model, 1)
    with delivery.file.open("r+b", buffering=0) as file:
        delivery.refused(file.write, NEW[:HALF])
    delivery.refused(delivery.file.write_bytes, with_a_bit_flipped(OLD, HALF))
    assert delivery.server.wait_for_reason("golden/one.npz") == "READY"
    delivery.file.write_bytes(NEW)
    write_golden(delivery.model, 2)
    delivery.loaded(2)
    assert delivery.answers == {1}


def test_without_either_a_weight_that_is_another_cannot_be_told(delivery: Delivery) -> None:
    """The limit of what can be seen of a plain copy; whoever minds writes a manifest."""
    delivery.file.write_bytes(with_a_bit_flipped(OLD, HALF))
    wait_until(
        lambda: delivery.server.answer() != 1, TIMEOUT_S, otherwise=lambda: delivery.server.log
    )
