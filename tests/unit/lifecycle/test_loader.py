"""From files to models that answer; one model's fault stays that model's."""

from __future__ import annotations

import sys
import threading
from types import ModuleType
from typing import TYPE_CHECKING, NoReturn

import numpy as np
import pytest
from support.endless_onnx import write_endless_onnx

from edge_server.backends import BACKENDS
from edge_server.backends.vision.identity import complete
from edge_server.cli.model_push import write_manifest
from edge_server.errors import InternalError
from edge_server.inference.registry import ModelRegistry, ModelState
from edge_server.lifecycle.lifecycle import ModelLifecycle
from edge_server.lifecycle.loader import RepositoryLoader
from edge_server.lifecycle.model_spec import Override
from edge_server.lifecycle.records import ModelTable
from edge_server.model_config.config import Completion
from edge_server.model_config.parse import parse_model_config_json
from edge_server.repository.content import PrivateCopies, PrivateDirectory
from edge_server.repository.manifest import SignaturePolicy, SigningKey, make_keys
from edge_server.repository.scan import Repositories
from edge_server.requests import InferRequest
from edge_server.tensors import Tensor

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from support.model_folders import WriteModel

TIMEOUT_S = 30.0
IDENTITY = (
    'backend: "identity" input { name: "a" data_type: TYPE_FP32 dims: -1 } '
    'output { name: "b" data_type: TYPE_FP32 dims: -1 }'
)
ENSEMBLE = (
    'platform: "ensemble" input { name: "x" data_type: TYPE_FP32 dims: -1 } '
    'output { name: "z" data_type: TYPE_FP32 dims: -1 } '
    "ensemble_scheduling { "
    'step { model_name: "%s" model_version: -1 '
    'input_map { key: "a" value: "x" } output_map { key: "b" value: "y" } } '
    'step { model_name: "b_member" model_version: -1 '
    'input_map { key: "a" value: "y" } output_map { key: "b" value: "z" } } }'
)
TWICE = ENSEMBLE.replace('"x"', '"a"').replace('"z"', '"b"').replace("b_member", "%s")


def load(repository: Path) -> tuple[ModelRegistry, dict[str, str]]:
    """The registry, and model → reason for those that failed."""
    registry = ModelRegistry()
    failed = RepositoryLoader(
        ModelLifecycle(ModelTable(registry)), Repositories([repository])
    ).load_all()
    return registry, {entry.name: entry.reason for entry in failed}


def test_members_load_before_the_ensemble_whatever_their_names(
    repository: Path, write_model: WriteModel
) -> None:
    write_model("a_ensemble", ENSEMBLE % "z_member")
    write_model("b_member", IDENTITY)
    write_model("z_member", IDENTITY)
    registry, failed = load(repository)
    assert failed == {}
    value = Tensor(np.arange(3, dtype=np.float32))
    snapshot = registry.snapshot
    response = snapshot.infer(InferRequest("a_ensemble", {"x": value}))
    assert response.outputs["z"].array is value.array


def test_a_broken_member_takes_its_ensemble_down_and_nothing_else(
    repository: Path, write_model: WriteModel
) -> None:
    write_model("ensemble", ENSEMBLE % "broken")
    write_model("b_member", IDENTITY)
    write_model("broken", "nonsense: 1")
    registry, failed = load(repository)
    assert failed.keys() == {"broken", "ensemble"}
    assert "Model 'broken' loading failed with error" in failed["ensemble"]
    assert registry.snapshot.entries["b_member", 1].state is ModelState.READY
    assert registry.snapshot.entries["broken", 0].state is ModelState.UNAVAILABLE


def test_an_ensemble_is_not_at_fault_for_its_member(
    repository: Path, write_model: WriteModel
) -> None:
    write_model("ensemble", ENSEMBLE % "broken")
    write_model("b_member", IDENTITY)
    write_model("broken", "nonsense: 1")
    registry, _ = load(repository)
    entries = registry.snapshot.entries
    assert entries["ensemble", 1].may_pass
    assert not entries["broken", 0].may_pass


def test_an_ensemble_of_models_that_do_not_exist_names_it(
    repository: Path, write_model: WriteModel
) -> None:
    write_model("ensemble", ENSEMBLE % "nowhere")
    write_model("b_member", IDENTITY)
    _, failed = load(repository)
    assert "contains models that are not available or ambiguous: nowhere" in failed["ensemble"]


def test_an_ensemble_names_a_members_fault_without_the_members_private_copy(
    repository: Path, write_model: WriteModel
) -> None:
    private = PrivateDirectory()
    write_model("ensemble", ENSEMBLE % "broken")
    write_model("b_member", IDENTITY)
    (write_model("broken", 'backend: "onnxruntime"') / "1" / "model.onnx").write_bytes(b"no onnx")
    registry = ModelRegistry()
    source = Repositories([repository], PrivateCopies(private).copy)
    try:
        failed = RepositoryLoader(ModelLifecycle(ModelTable(registry)), source).load_all()
    finally:
        private.close()
    reasons = {entry.name: entry.reason for entry in failed}
    assert reasons["broken"].startswith(f"{repository}/broken/1/model.onnx: ONNX Runtime cannot")
    assert reasons["ensemble"].endswith(
        f"Model 'broken' loading failed with error: {reasons['broken']}"
    )


def test_the_end_of_the_loader_ends_runs_of_requests_that_still_go_on(
    repository: Path, write_model: WriteModel
) -> None:
    write_endless_onnx(write_model("m", 'backend: "onnxruntime"') / "1" / "model.onnx")
    registry = ModelRegistry()
    loader = RepositoryLoader(ModelLifecycle(ModelTable(registry)), Repositories([repository]))
    loader.load_all()
    with registry.lease() as snapshot:
        loader.close(TIMEOUT_S)
        with pytest.raises(InternalError, match="was ended"):
            snapshot.infer(InferRequest("m", {"times": Tensor(np.array([2**62]))}))


def test_ensembles_that_double_at_each_level_load_as_far_as_a_request_stays_small(
    repository: Path, write_model: WriteModel
) -> None:
    write_model("level_00", IDENTITY)
    for level in range(1, 32):
        write_model(f"level_{level:02}", TWICE % (2 * (f"level_{level - 1:02}",)))
    registry, failed = load(repository)
    assert sorted(failed) == [f"level_{level:02}" for level in range(9, 32)]
    assert "level_09/config.pbtxt: ensemble 'level_09' runs 1022 steps" in failed["level_09"]
    assert "'level_31' depends on 'level_30'" in failed["level_31"]
    request = InferRequest("level_08", {"a": Tensor(np.ones(1, "<f4"))})
    response = registry.snapshot.infer(request)
    assert len(response.timings) == 256


def test_every_ensemble_of_a_circle_reports_it_and_who_uses_it_names_the_member(
    repository: Path, write_model: WriteModel
) -> None:
    write_model("a_user", ENSEMBLE % "two")
    write_model("one", ENSEMBLE % "two")
    write_model("two", ENSEMBLE % "one")
    write_model("self", ENSEMBLE % "self")
    write_model("b_member", IDENTITY)
    registry, failed = load(repository)
    circular = "circular dependency between ensembles: "
    assert failed["one"] == f"{repository}/one/config.pbtxt: {circular}one -> ... -> two -> one"
    assert failed["two"] == f"{repository}/two/config.pbtxt: {circular}two -> ... -> one -> two"
    assert failed["self"].endswith(f"{circular}self -> ... -> self -> self")
    assert f"Model 'two' loading failed with error: {failed['two']}" in failed["a_user"]
    assert registry.snapshot.ready_versions("b_member") == [1]


def test_how_long_a_model_took_to_load_is_known(repository: Path, write_model: WriteModel) -> None:
    write_model("m", IDENTITY)
    registry, _ = load(repository)
    assert 0 < registry.snapshot.find("m").load_s < 60


def test_the_version_policy_chooses_and_the_latest_responds(
    repository: Path, write_model: WriteModel
) -> None:
    for version in (1, 2, 3):
        write_model("m", IDENTITY + "version_policy { latest { num_versions: 2 } }", version)
    registry, failed = load(repository)
    assert failed == {}
    assert registry.snapshot.ready_versions("m") == [2, 3]
    assert registry.snapshot.find("m").version == 3


def test_a_model_without_a_version_directory_gives_the_remedy(
    repository: Path, write_model: WriteModel
) -> None:
    (write_model("m", IDENTITY) / "1").rmdir()
    _, failed = load(repository)
    assert "at least one version must be available" in failed["m"]


def test_an_onnx_file_alone_is_a_model(repository: Path, write_onnx: Callable[..., None]) -> None:
    write_onnx(repository / "adds" / "1" / "model.onnx", ("n", 4))
    registry, failed = load(repository)
    assert failed == {}
    config = registry.snapshot.find("adds").config
    assert [(s.name, s.shape) for s in config.inputs] == [("x", (4,))]
    assert config.max_batch_size == 4


def test_a_model_in_two_repositories_is_unavailable_without_a_version(tmp_path: Path) -> None:
    for directory in ("one/m", "two/m", "two/other"):
        (tmp_path / directory / "1").mkdir(parents=True)
        (tmp_path / directory / "config.pbtxt").write_text(IDENTITY)
    registry = ModelRegistry()
    (failed,) = RepositoryLoader(
        ModelLifecycle(ModelTable(registry)), Repositories([tmp_path / "one", tmp_path / "two"])
    ).load_all()
    assert (failed.name, failed.version) == ("m", 0)
    assert "model appears in two or more repositories" in failed.reason
    assert registry.snapshot.ready_versions("other") == [1]


@pytest.mark.parametrize(
    ("text", "says"),
    [
        (IDENTITY.replace("TYPE_FP32", "99"), "'input[0].data_type' has value 99"),
        (IDENTITY + "instance_group { kind: 77 }", "'instance_group[0].kind' has value 77"),
    ],
)
def test_a_number_that_no_enum_has_is_that_models_fault(
    repository: Path, write_model: WriteModel, text: str, says: str
) -> None:
    write_model("odd", text)
    write_model("good", IDENTITY)
    registry, failed = load(repository)
    assert failed.keys() == {"odd"}
    assert says in failed["odd"]
    assert registry.snapshot.ready_versions("good") == [1]


@pytest.mark.parametrize("odd", ["odd", "odd/1", "odd/config.pbtxt", "odd/1/model.onnx"])
def test_what_cannot_be_read_is_that_models_fault_and_named(
    repository: Path, write_model: WriteModel, unreadable: Callable[[Path], None], odd: str
) -> None:
    unreadable(repository / odd)
    write_model("good", IDENTITY)
    registry, failed = load(repository)
    assert failed.keys() == {"odd"}
    assert failed["odd"].startswith(f"{repository / odd}: cannot be read: File name too long; the")
    assert registry.snapshot.ready_versions("good") == [1]


def test_a_backend_that_raises_anything_fails_its_model_with_one_traceback_in_the_log(
    repository: Path,
    write_model: WriteModel,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    (tmp_path / "backend_that_falls_over.py").write_text(
        "def complete(files, version, config):\n    raise ZeroDivisionError('seven by zero')\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setitem(BACKENDS, "falls_over", "backend_that_falls_over")
    write_model("odd", IDENTITY.replace("identity", "falls_over"))
    write_model("good", IDENTITY)
    registry, failed = load(repository)
    assert failed == {
        "odd": "model 'odd': unexpected ZeroDivisionError: seven by zero; see the log"
    }
    assert caplog.text.count("Traceback") == 1
    assert registry.snapshot.ready_versions("good") == [1]


def test_loading_ends_between_two_models_once_stop_is_set(
    repository: Path, write_model: WriteModel
) -> None:
    write_model("good", IDENTITY)
    write_model("odd", "nonsense: 1")
    registry, stop = ModelRegistry(), threading.Event()
    stop.set()
    loader = RepositoryLoader(ModelLifecycle(ModelTable(registry)), Repositories([repository]))
    with loader.until(stop):
        failed = loader.load_all()
    assert [entry.name for entry in failed] == ["odd"]
    assert registry.snapshot.entries["good", 1].state is ModelState.LOADING


def test_without_completion_a_configuration_is_complete(
    repository: Path, write_onnx: Callable[..., None]
) -> None:
    write_onnx(repository / "m" / "1" / "model.onnx")
    registry = ModelRegistry()
    loader = RepositoryLoader(
        ModelLifecycle(ModelTable(registry)),
        Repositories([repository]),
        completion=Completion(auto=False),
    )
    (failed,) = loader.load_all()
    assert "must specify" in failed.reason or "missing or empty" in failed.reason
    dims = "data_type: TYPE_FP32 dims: [ 1, 4 ] }"
    (repository / "m" / "config.pbtxt").write_text(
        f'backend: "onnxruntime" input {{ name: "x" {dims} output {{ name: "y" {dims}'
    )
    assert loader.load("m") == {}


def test_every_model_passes_the_gate_before_anything_of_it_is_read(
    repository: Path, write_model: WriteModel, tmp_path: Path
) -> None:
    for name in ("a_ensemble", "b_member", "z_member"):
        write_model(name, IDENTITY if name != "a_ensemble" else ENSEMBLE % "z_member")
    public = make_keys(tmp_path / "key")
    for name in ("a_ensemble", "z_member"):
        write_manifest(repository / name, SigningKey(tmp_path / "key"))
    write_model("broken", "no such field")
    registry = ModelRegistry()
    loader = RepositoryLoader(
        ModelLifecycle(ModelTable(registry)),
        Repositories([repository]),
        signatures=SignaturePolicy("require", [public]),
    )
    failed = {entry.name: entry.reason for entry in loader.load_all()}
    assert failed.keys() == {"a_ensemble", "b_member", "broken"}
    assert "model 'b_member': is not signed" in failed["a_ensemble"]
    assert "model 'b_member': is not signed" in failed["b_member"]
    assert "model 'broken': is not signed" in failed["broken"]
    assert registry.snapshot.ready_versions("z_member") == [1]
    override = Override(parse_model_config_json('{"backend": "identity"}', "z_member"))
    (failure,) = loader.load("z_member", override).values()
    assert "is loaded with a configuration or files that a client sent" in str(failure.error)
    write_manifest(repository / "b_member", SigningKey(tmp_path / "key"))
    assert loader.load("a_ensemble") == {}


def test_a_custom_configuration_takes_the_place_of_config_pbtxt_where_a_model_has_it(
    repository: Path, write_model: WriteModel
) -> None:
    write_model("with", IDENTITY)
    write_model("without", IDENTITY)
    (repository / "with" / "configs").mkdir()
    (repository / "with" / "configs" / "orin.pbtxt").write_text(IDENTITY + " max_batch_size: 7")
    registry = ModelRegistry()
    loader = RepositoryLoader(
        ModelLifecycle(ModelTable(registry)),
        Repositories([repository]),
        completion=Completion(config_name="orin"),
    )
    assert not loader.load_all()
    assert registry.snapshot.find("with").config.max_batch_size == 7
    assert registry.snapshot.find("without").config.max_batch_size == 0
    (repository / "with" / "configs" / "orin.pbtxt").write_text("backend: 3")
    (failure,) = loader.load("with").values()
    assert f"{repository}/with/configs/orin.pbtxt:1:10" in failure.reason


@pytest.mark.parametrize("retries", [0, 1, 3])
def test_a_model_that_cannot_be_loaded_is_tried_again_so_often(
    repository: Path,
    write_model: WriteModel,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    retries: int,
) -> None:
    (repository.parent / "backend_that_stumbles.py").write_text(
        "from edge_server.backends.vision.identity import complete, load as load_identity\n"
        "attempts = []\n"
        "def load(context):\n"
        "    attempts.append(context)\n"
        "    if len(attempts) < 3:\n"
        "        raise OSError('the device is busy')\n"
        "    return load_identity(context)\n"
    )
    monkeypatch.syspath_prepend(repository.parent)
    monkeypatch.setitem(BACKENDS, "stumbles", "backend_that_stumbles")
    monkeypatch.delitem(sys.modules, "backend_that_stumbles", raising=False)
    write_model("late", IDENTITY.replace("identity", "stumbles"))
    registry = ModelRegistry()
    loader = RepositoryLoader(
        ModelLifecycle(ModelTable(registry)), Repositories([repository]), load_retries=retries
    )
    assert bool(loader.load_all()) is not (retries >= 2)
    assert bool(registry.snapshot.ready_versions("late")) is (retries >= 2)
    assert len(sys.modules["backend_that_stumbles"].attempts) == min(1 + retries, 3)
    assert (f"retry {retries} of {retries}" in caplog.text) is (retries == 1)
    monkeypatch.delitem(sys.modules, "backend_that_stumbles")


@pytest.mark.parametrize("how", ["unload", "end", "stop"])
def test_a_model_that_nobody_waits_for_is_not_tried_again(
    repository: Path, write_model: WriteModel, monkeypatch: pytest.MonkeyPatch, how: str
) -> None:
    attempts = []
    stop = threading.Event()

    def load(context: object) -> NoReturn:
        attempts.append(context)
        {
            "unload": lambda: loader.lifecycle.unload("late"),
            "end": lambda: loader.lifecycle.end(0.1),
            "stop": stop.set,
        }[how]()
        raise OSError("the device is busy")

    backend = ModuleType("backend_that_fails")
    backend.complete, backend.load = complete, load  # type: ignore[attr-defined]  # a module is made
    monkeypatch.setitem(sys.modules, "backend_that_fails", backend)
    monkeypatch.setitem(BACKENDS, "fails", "backend_that_fails")
    write_model("late", IDENTITY.replace("identity", "fails"))
    loader = RepositoryLoader(
        ModelLifecycle(ModelTable(ModelRegistry())), Repositories([repository]), load_retries=5
    )
    with loader.until(stop):
        loader.load_all()
    assert len(attempts) == 1
