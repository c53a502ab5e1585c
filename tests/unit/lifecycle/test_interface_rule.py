"""What would break those who call a model is refused, unless it says that they know."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

import pytest
from google.protobuf import json_format, text_format
from tritonclient.grpc import model_config_pb2 as pb
from unit.lifecycle.board import CONFIG, MAY_BREAK, Board
from unit.lifecycle.control.world import COUNTED, INT32, READY, World, ensemble

from edge_server.errors import ModelConfigError
from edge_server.inference.data_plane import LoadOptions
from edge_server.inference.registry import ModelRegistry
from edge_server.lifecycle.fit import InterfaceRule
from edge_server.lifecycle.lifecycle import ModelLifecycle
from edge_server.lifecycle.loader import RepositoryLoader
from edge_server.lifecycle.records import ModelTable
from edge_server.repository.change_detector import Change
from edge_server.repository.content import content_of
from edge_server.repository.manifest import Manifest
from edge_server.repository.scan import Repositories, scan_model

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from support.counted_backend import CountedBackend
    from support.model_folders import WriteModel

    from edge_server.model_config.config import ModelConfig

TIMEOUT_S = 30.0
UNSAID = INT32.replace(MAY_BREAK, "")
WIDER = CONFIG.replace("dims: 1", "dims: -1")
RENAMED = CONFIG.replace('"b"', '"c"')
REASON = (
    "model 'm' would break those who call it: output 'b' is gone; keep what they call, or, when "
    "they know of it, push with --allow-interface-change, or put the parameter "
    'allow_interface_change: "true" into config.pbtxt; in mode explicit unloading it first does as '
    "well"
)


@pytest.fixture
def world(repository: Path, counted: CountedBackend) -> Iterator[World]:
    made = World(repository).start()
    yield made
    made.control.close(TIMEOUT_S)


@pytest.fixture
def board(
    tmp_path: Path, repository: Path, write_model: WriteModel, counted: CountedBackend
) -> Iterator[Board]:
    made = Board(tmp_path, repository, write_model)
    made.deliver(1)
    yield made
    made.close()


def test_in_mode_explicit_the_load_fails_and_what_serves_does_so_on(
    world: World, write_model: WriteModel
) -> None:
    write_model("m", COUNTED)
    world.control.load("m")
    write_model("m", UNSAID)
    with pytest.raises(ModelConfigError) as caught:
        world.control.load("m")
    assert str(caught.value).startswith(
        "load failed for model 'm': version 1 is at UNAVAILABLE state: Invalid argument: model "
        "'m' would break those who call it: input 'a' is INT32, was FP32; keep what they call"
    )
    assert world.ask("m") == 0
    write_model("m", INT32)
    world.control.load("m")
    assert world.states() == {("m", 1): READY}
    assert world.registry.snapshot.find("m").config.inputs[0].datatype.value == "INT32"


def test_a_configuration_that_a_client_sends_allows_it_too(
    world: World, write_model: WriteModel
) -> None:
    write_model("m", COUNTED)
    world.control.load("m")
    for text, works in ((UNSAID, False), (INT32, True)):
        message = text_format.Parse(f'name: "m" {text}', pb.ModelConfig())
        config = json_format.MessageToJson(message)
        if works:
            world.control.load("m", LoadOptions(config=config))
        else:
            with pytest.raises(ModelConfigError, match="would break those who call it"):
                world.control.load("m", LoadOptions(config=config))
    # What a client sent serves until it is unloaded, whatever it was.
    world.control.unload("m")
    world.control.load("m")
    assert world.ask("m") == 0


def test_what_was_unloaded_has_no_predecessor(world: World, write_model: WriteModel) -> None:
    write_model("m", COUNTED)
    world.control.load("m")
    world.control.unload("m")
    write_model("m", UNSAID)
    world.control.load("m")
    assert world.states() == {("m", 1): READY}


def test_another_word_than_true_and_false_is_reported(
    world: World, write_model: WriteModel
) -> None:
    write_model("m", COUNTED)
    world.control.load("m")
    write_model("m", INT32.replace('"true"', '"yes"'))
    with pytest.raises(ModelConfigError, match="allow_interface_change is 'yes'; give 'true' or"):
        world.control.load("m")


def test_an_ensembles_own_interface_counts_like_any_other(
    world: World, write_model: WriteModel
) -> None:
    write_model("m", COUNTED)
    write_model("e", ensemble("m"))
    world.control.load("e")
    write_model("e", ensemble("m").replace('"z"', '"y"'))
    with pytest.raises(ModelConfigError, match="output 'z' is gone"):
        world.control.load("e")
    assert world.ask("e", tensor="x") == 0


def test_each_version_that_callers_may_name_counts(world: World, write_model: WriteModel) -> None:
    every = "version_policy { all {} } "
    write_model("m", COUNTED + every)
    world.control.load("m")
    write_model("m", UNSAID + every, 2)
    with pytest.raises(ModelConfigError, match="input 'a' is INT32, was FP32"):
        world.control.load("m")
    write_model("m", COUNTED + every, 2)
    world.control.load("m")
    assert world.states() == {("m", 1): READY, ("m", 2): READY}


def test_in_mode_poll_what_breaks_callers_is_refused_and_what_widens_is_not(board: Board) -> None:
    board.deliver(2, RENAMED)
    assert (board.serving(), board.reasons()) == (1, [REASON])
    board.deliver(3, WIDER)
    assert (board.serving(), board.reasons()) == (3, [""])
    board.deliver(4)
    assert board.serving() == 3
    assert "input 'a' has shape [1], had [-1]" in board.reasons()[0]


def deliver_with_manifest(board: Board, number: int, config: str, *, allow: bool) -> None:
    """As `push` does."""
    directory = board.write_model("m", config)
    (directory / "1" / "add").write_text(str(number))
    (directory / "manifest.json").unlink(missing_ok=True)
    tree = scan_model(board.repository, "m")
    made = Manifest("m", dict(content_of(tree).files), allow_interface_change=allow)
    (directory / "manifest.json").write_bytes(made.encode())
    board.carry_out(Change("m", scan_model(board.repository, "m")))


def test_the_manifest_allows_it_too_for_its_own_content(board: Board) -> None:
    deliver_with_manifest(board, 2, RENAMED, allow=False)
    assert (board.serving(), board.reasons()) == (1, [REASON])
    # The very same files, pushed again.
    deliver_with_manifest(board, 2, RENAMED, allow=True)
    assert (board.serving(), board.reasons()) == (2, [""])
    board.start_again()
    assert (board.serving(), board.reasons()) == (2, [""])


def test_what_served_before_comes_back_without_a_word(
    tmp_path: Path, repository: Path, write_model: WriteModel, counted: CountedBackend
) -> None:
    """As after `edge-server models rollback`, also after a restart."""
    board = Board(tmp_path, repository, write_model)
    board.deliver(1)
    board.deliver(2, RENAMED + MAY_BREAK)
    board.start_again()
    board.deliver(3)
    assert board.serving() == 2
    board.deliver(1)
    assert (board.serving(), board.reasons()) == (1, [""])
    board.close()


def test_the_model_of_a_camera_stays_a_lane_model_whatever_is_allowed(
    repository: Path, write_model: WriteModel, counted: CountedBackend
) -> None:
    def check(_old: ModelConfig, config: ModelConfig) -> None:
        if "b" not in config.output_names:
            raise ModelConfigError("output 'b' is gone")

    rule = InterfaceRule({"m"}, check)
    loader = RepositoryLoader(
        ModelLifecycle(ModelTable(ModelRegistry()), interface=rule), Repositories([repository])
    )

    def load(config: str) -> str:
        write_model("m", config)
        return "".join(str(failure.error) for failure in loader.load("m").values())

    more = 'output { name: "c" data_type: TYPE_FP32 dims: 1 } '
    assert load(CONFIG + more) == ""
    assert re.match(
        "a camera uses it: output 'b' is gone; push it under another name",
        load(RENAMED + MAY_BREAK),
    )
    assert load(CONFIG + MAY_BREAK) == ""
    loader.close(TIMEOUT_S)
