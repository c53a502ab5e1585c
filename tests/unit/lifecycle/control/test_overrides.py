"""A configuration and files of the client's own, in place of those in the repository."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

import pytest
from unit.lifecycle.control.world import COUNTED, TIMEOUT_S, World, ensemble, set_number

from edge_server.errors import InternalError, InvalidRequest, ModelConfigError
from edge_server.inference.data_plane import LoadOptions
from edge_server.repository import content

if TYPE_CHECKING:
    from pathlib import Path

    from support.counted_backend import CountedBackend
    from support.model_folders import WriteModel

    from edge_server.repository.content import Content
    from edge_server.repository.scan import ModelTree

OVERRIDE = {
    "backend": "counted",
    "input": [{"name": "a", "data_type": "TYPE_FP32", "dims": [-1]}],
    "output": [{"name": "b", "data_type": "TYPE_FP32", "dims": [-1]}],
}
NOT_POLLED = "failed to load 'm', failed to poll from model repository"


def test_a_configuration_of_the_clients_serves_until_the_model_is_unloaded(
    world: World, write_model: WriteModel, counted: CountedBackend
) -> None:
    model = write_model("m", COUNTED)
    set_number(model, 2, version=2)
    override = {**OVERRIDE, "version_policy": {"specific": {"versions": [1]}}}
    for _ in range(2):
        world.control.load("m", LoadOptions(config=json.dumps(override)))
        assert world.registry.snapshot.ready_versions("m") == [1]
    world.control.load("m")
    assert world.registry.snapshot.ready_versions("m") == [1]
    assert counted.loads["m"] == 2
    world.control.unload("m")
    world.control.load("m")
    assert world.registry.snapshot.ready_versions("m") == [2]


def test_files_of_the_clients_stand_for_the_whole_directory_as_long_as_they_serve(
    world: World, write_model: WriteModel, counted: CountedBackend
) -> None:
    model = write_model("m", COUNTED)
    set_number(model, 1)
    world.control.load("m", LoadOptions(config=json.dumps(OVERRIDE), files={"7/add": b"5"}))
    assert world.registry.snapshot.ready_versions("m") == [7]
    assert world.ask("m") == 5
    (root,) = roots(world)
    (clients,) = root.iterdir()
    lease = world.registry.lease()
    world.control.unload("m")
    world.control.load("m")
    assert world.ask("m") == 1
    assert clients.exists()
    lease.release()
    assert world.registry.wait_closed(TIMEOUT_S)
    assert not clients.exists()
    deep = "1/" + "/".join(letter * 200 for letter in "abc")
    world.control.load(
        "new", LoadOptions(config=json.dumps(OVERRIDE), files={"1/add": b"3", deep: b""})
    )
    assert world.ask("new") == 3
    world.control.close(TIMEOUT_S)
    assert not root.exists()


def test_files_for_which_there_is_no_directory_are_refused_with_the_remedy(world: World) -> None:
    world.control._private.path().rmdir()
    with pytest.raises(InternalError, match=r"cannot be kept: .*another directory in TMPDIR"):
        world.control.load("m", LoadOptions(config=json.dumps(OVERRIDE), files={"1/add": b"5"}))


def test_a_plain_load_ends_an_override_with_files_and_one_of_files_that_have_changed(
    world: World, write_model: WriteModel, counted: CountedBackend
) -> None:
    model = write_model("m", COUNTED)
    set_number(model, 1)
    world.control.load("m", LoadOptions(config=json.dumps(OVERRIDE), files={"7/add": b"5"}))
    world.control.load("m")
    assert world.registry.snapshot.ready_versions("m") == [1]
    set_number(model, 2, version=2)
    override = {**OVERRIDE, "version_policy": {"specific": {"versions": [1]}}}
    world.control.load("m", LoadOptions(config=json.dumps(override)))
    world.control.load("m")
    assert world.registry.snapshot.ready_versions("m") == [1]
    set_number(model, 33, version=2)
    world.control.load("m")
    assert world.registry.snapshot.ready_versions("m") == [2]
    assert world.ask("m") == 33
    world.control.load("new", LoadOptions(config=json.dumps(OVERRIDE), files={"1/add": b"3"}))
    with pytest.raises(InternalError, match="failed to poll from model repository"):
        world.control.load("new")
    assert world.ask("new") == 3


def test_a_plain_load_copies_a_model_once(
    world: World,
    write_model: WriteModel,
    counted: CountedBackend,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    copied = []
    copy_model = content.copy_model

    def count_and_copy(tree: ModelTree, place: Path) -> Content:
        copied.append(tree.name)
        return copy_model(tree, place)

    model = write_model("m", COUNTED)
    world.control.load("m", LoadOptions(config=json.dumps(OVERRIDE)))
    set_number(model, 2)
    monkeypatch.setattr(content, "copy_model", count_and_copy)
    world.control.load("m")
    assert copied == ["m"]
    world.control.load("m", LoadOptions(config=json.dumps(OVERRIDE), files={"7/add": b"5"}))
    set_number(model, 3)
    world.control.load("m")
    assert copied == ["m", "m"]
    assert world.ask("m") == 3


def test_an_ensemble_leaves_an_overridden_member_as_it_is(
    world: World, write_model: WriteModel, counted: CountedBackend
) -> None:
    write_model("e", ensemble("m"))
    world.control.load("m", LoadOptions(config=json.dumps(OVERRIDE), files={"1/add": b"5"}))
    world.control.load("e")
    assert world.ask("e", tensor="x") == 5


@pytest.mark.parametrize(
    ("config", "files", "says"),
    [
        (
            None,
            {"1/add": b""},
            f"^{NOT_POLLED}: Load parameter 'config' must be specified for model file override$",
        ),
        ("{", {}, f"^{NOT_POLLED}: Invalid config override: "),
        ('{"no_such_field": 1}', {}, f"^{NOT_POLLED}: Invalid config override: "),
        (
            json.dumps(OVERRIDE),
            {"any": b""},
            rf"^{NOT_POLLED}: \(files of the request\)/m: at least one version must",
        ),
        (json.dumps(OVERRIDE), {"1/" + "x" * 300: b""}, "cannot be kept: .*: File name too long"),
        (json.dumps(OVERRIDE), {"1" + "/x" * 1100: b""}, "1101 directories deep; at most 16"),
        (
            json.dumps(OVERRIDE),
            {"../x": b""},
            r"^Invalid file parameter 'file:../x' with normalized path '../x' must stay within "
            r"model directory\.$",
        ),
        (
            json.dumps({**OVERRIDE, "name": "n"}),
            {},
            "config override: unexpected directory name 'm' for model 'n'",
        ),
    ],
)
@pytest.mark.usefixtures("counted")
def test_an_override_that_is_wrong_is_reported_and_what_serves_stays(
    world: World,
    write_model: WriteModel,
    config: str | None,
    files: dict[str, bytes],
    says: str,
) -> None:
    set_number(write_model("m", COUNTED), 2)
    world.control.load("m")
    with pytest.raises((InvalidRequest, ModelConfigError, InternalError), match=says):
        world.control.load("m", LoadOptions(config=config, files=files))
    assert world.ask("m") == 2


@pytest.mark.usefixtures("counted")
def test_of_a_configuration_that_is_wrong_little_is_kept(
    world: World, write_model: WriteModel
) -> None:
    write_model("m", COUNTED)
    world.control.load("m")
    with pytest.raises((ModelConfigError, InternalError)):
        world.control.load("m", LoadOptions(config=json.dumps({"backend": "x" * 100_000})))
    (entry,) = world.control.index(only_ready=False)
    assert 0 < len(entry.reason) <= 4000


def test_a_failed_load_leaves_none_of_the_clients_files(
    world: World, counted: CountedBackend
) -> None:
    with pytest.raises(ModelConfigError, match="load failed for model 'm'"):
        world.control.load("m", LoadOptions(config=json.dumps(OVERRIDE), files={"1/add": b"-1"}))
    (root,) = roots(world)
    assert not list(root.iterdir())


def roots(world: World) -> list[Path]:
    root = world.control._private._root
    return [] if root is None else [root]
