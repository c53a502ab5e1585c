"""A load: done when it returns, refused in words, what serves stays where it fails."""

from __future__ import annotations

import logging
import shutil
from typing import TYPE_CHECKING

import pytest
from unit.lifecycle.control.world import (
    BOTH,
    COUNTED,
    READY,
    TIMEOUT_S,
    UNLOADED,
    World,
    set_number,
)

from edge_server.errors import (
    InternalError,
    InvalidRequest,
    ModelConfigError,
    NotFound,
    Unavailable,
)

if TYPE_CHECKING:
    from support.counted_backend import CountedBackend
    from support.model_folders import WriteModel


def test_a_load_is_done_when_it_returns_and_does_nothing_where_no_file_has_changed(
    world: World,
    write_model: WriteModel,
    counted: CountedBackend,
    caplog: pytest.LogCaptureFixture,
) -> None:
    model = write_model("m", COUNTED)
    with caplog.at_level(logging.INFO):
        for _ in range(3):
            world.control.load("m")
    assert counted.loads["m"] == 1
    # Triton's words, which people search for.
    assert caplog.text.count("successfully loaded 'm'") == 1
    set_number(model, 5)
    world.control.load("m")
    assert world.ask("m") == 5
    assert world.registry.wait_closed(TIMEOUT_S)
    assert [made.closed for made in counted.made] == [1, 0]


def test_errors_name_the_repository_and_not_the_copy(
    world: World, write_model: WriteModel, counted: CountedBackend
) -> None:
    model = write_model("m", 'backend: "counted" max_batch_size: many')
    with pytest.raises(InternalError, match="failed to load 'm'") as caught:
        world.control.load("m")
    assert str(model / "config.pbtxt") in str(caught.value)
    (model / "config.pbtxt").write_text('platform: "onnxruntime_onnx"')
    with pytest.raises(ModelConfigError) as missing:
        world.control.load("m")
    assert str(model / "1" / "model.onnx") in str(missing.value)
    reasons = [reason for _, reason in world.states().values()]
    assert str(model / "1" / "model.onnx") in reasons[0]


@pytest.mark.parametrize(
    ("name", "error", "text"),
    [
        ("", InvalidRequest, "Model name cannot be empty. Please enter a valid name to deploy."),
        (" \t", InvalidRequest, "Model name cannot be empty. Please enter a valid name to deploy."),
        (
            " .. ",
            InvalidRequest,
            "invalid model name '..', model name must not contain path traversal characters",
        ),
        (
            "../m",
            InvalidRequest,
            "invalid model name '../m', model name must not contain path traversal characters",
        ),
        ("no", InternalError, "failed to load 'no', failed to poll from model repository"),
        (".git", InternalError, "failed to load '.git', failed to poll from model repository"),
        ("m\0", InternalError, "failed to load 'm\0', failed to poll from model repository"),
    ],
)
def test_a_name_that_cannot_be_loaded_is_reported_and_leaves_no_trace(
    world: World, write_model: WriteModel, name: str, error: type[Exception], text: str
) -> None:
    write_model(".git", COUNTED)
    with pytest.raises(error) as caught:
        world.control.load(name)
    assert str(caught.value) == text
    assert world.states() == {}
    assert world.door.server_ready()


def test_a_failed_load_gives_the_reason_may_be_tried_again_and_counts_for_readiness(
    world: World, write_model: WriteModel, counted: CountedBackend
) -> None:
    model = write_model("m", COUNTED)
    set_number(model, -1)
    for _ in range(2):
        with pytest.raises(ModelConfigError) as caught:
            world.control.load("m")
        assert str(caught.value) == (
            "load failed for model 'm': version 1 is at UNAVAILABLE state: Internal: model 'm': "
            "unexpected SystemExit: a model that ends the process; see the log;\n"
        )
    assert counted.loads["m"] == 2
    assert world.states()["m", 1][0] == "UNAVAILABLE"
    assert not world.door.server_ready()
    with pytest.raises(NotFound, match="has no available versions"):
        world.ask("m")
    set_number(model, 1)
    world.control.load("m")
    assert world.states() == {("m", 1): READY}
    assert world.door.server_ready()


def test_a_configuration_that_cannot_be_read_is_not_polled_and_gives_the_reason(
    world: World, write_model: WriteModel
) -> None:
    write_model("m", "no such field")
    with pytest.raises(
        InternalError,
        match=r"^failed to load 'm', failed to poll from model repository: .*config.pbtxt:1:",
    ):
        world.control.load("m")
    assert world.states()["m", 0][0] == "UNAVAILABLE"


@pytest.mark.parametrize("fault", ["file", "config"])
def test_a_reload_that_fails_leaves_what_serves_and_reports_the_reason(
    world: World, write_model: WriteModel, counted: CountedBackend, fault: str
) -> None:
    model = write_model("m", COUNTED)
    set_number(model, 3)
    world.control.load("m")
    if fault == "file":
        set_number(model, -1)
    else:
        write_model("m", "no such field")
    with pytest.raises((ModelConfigError, InternalError)):
        world.control.load("m")
    assert world.ask("m") == 3
    state, reason = world.states()["m", 1]
    assert state == "READY"
    assert ("SystemExit" if fault == "file" else "config.pbtxt:1:") in reason
    assert world.door.server_ready()
    set_number(model, 4)
    write_model("m", COUNTED)
    world.control.load("m")
    assert world.states() == {("m", 1): READY}
    assert world.ask("m") == 4


def test_versions_load_all_together_or_not_at_all(
    world: World, write_model: WriteModel, counted: CountedBackend
) -> None:
    model = write_model("m", BOTH)
    set_number(model, 1, version=1)
    set_number(model, -1, version=2)
    with pytest.raises(ModelConfigError, match="version 2 is at UNAVAILABLE state"):
        world.control.load("m")
    states = world.states()
    assert {v: state for (_, v), (state, _) in states.items()} == {
        1: "UNAVAILABLE",
        2: "UNAVAILABLE",
    }
    assert [made.closed for made in counted.made] == [1]
    set_number(model, 2, version=2)
    world.control.load("m")
    assert (world.ask("m", "1"), world.ask("m", "2"), world.ask("m")) == (1, 2, 2)


def test_a_version_that_goes_is_unloaded_and_the_others_serve(
    world: World, write_model: WriteModel, counted: CountedBackend
) -> None:
    model = write_model("m", BOTH)
    set_number(model, 2, version=2)
    world.control.load("m")
    shutil.rmtree(model / "1")
    world.control.load("m")
    assert world.states() == {("m", 1): UNLOADED, ("m", 2): READY}
    with pytest.raises(Unavailable, match="version 1 is not at ready state"):
        world.ask("m", "1")
    assert world.door.server_ready()
