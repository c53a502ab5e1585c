"""What a configuration leaves out comes from the files, the name or the defaults."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
from google.protobuf import text_format
from tritonclient.grpc import model_config_pb2 as pb

from edge_server.errors import ModelConfigError, ModelLoadError
from edge_server.model_config.completion import complete
from edge_server.model_config.config import USUAL_COMPLETION, Completion
from edge_server.model_config.files import ModelFiles
from edge_server.model_config.validation import validate

if TYPE_CHECKING:
    from pathlib import Path


def completed(
    directory: Path, text: str, name: str = "m", completion: Completion = USUAL_COMPLETION
) -> pb.ModelConfig:
    message = text_format.Parse(text, pb.ModelConfig())
    complete(message, ModelFiles(name, directory, {1: directory / "1"}), completion)
    return message


@pytest.mark.parametrize(
    ("files", "backend", "platform"),
    [
        (["model.plan", "model.onnx", "model.py"], "tensorrt", "tensorrt_plan"),
        (["model.onnx", "model.py"], "onnxruntime", "onnxruntime_onnx"),
        (["model.savedmodel"], "tensorflow", "tensorflow_savedmodel"),
        (["model.graphdef"], "tensorflow", "tensorflow_graphdef"),
        (["model.pt", "model.pt2"], "pytorch", "pytorch_libtorch"),
        (["model.pt2"], "pytorch", "torch_aoti"),
        (["model.xml"], "openvino", ""),
        (["model.py"], "python", ""),
    ],
)
def test_the_first_known_file_of_the_version_directory_determines_the_backend(
    tmp_path: Path, files: list[str], backend: str, platform: str
) -> None:
    (tmp_path / "1").mkdir()
    for file in files:
        (tmp_path / "1" / file).touch()
    message = completed(tmp_path, "")
    assert (message.backend, message.platform) == (backend, platform)
    assert message.default_model_filename == files[0]


@pytest.mark.parametrize(
    ("text", "backend", "platform", "filename"),
    [
        ('platform: "onnxruntime_onnx"', "onnxruntime", "onnxruntime_onnx", "model.onnx"),
        ('backend: "onnxruntime"', "onnxruntime", "onnxruntime_onnx", "model.onnx"),
        ('default_model_filename: "model.py"', "python", "", "model.py"),
        (
            'backend: "onnxruntime" default_model_filename: "lane.onnx"',
            "onnxruntime",
            "onnxruntime_onnx",
            "lane.onnx",
        ),
        ('backend: "identity"', "identity", "", ""),
        ('backend: "pytorch"', "pytorch", "pytorch_libtorch", "model.pt"),
        ('platform: "libtorch"', "pytorch", "pytorch_libtorch", "model.pt"),
        ('platform: "torch_aoti"', "pytorch", "torch_aoti", "model.pt2"),
        (
            'backend: "pytorch" default_model_filename: "lane.pt2"',
            "pytorch",
            "torch_aoti",
            "lane.pt2",
        ),
        (
            'platform: "tensorflow_graphdef"',
            "tensorflow",
            "tensorflow_graphdef",
            "model.graphdef",
        ),
        (
            'backend: "tensorflow" default_model_filename: "frozen.graphdef"',
            "tensorflow",
            "tensorflow_graphdef",
            "frozen.graphdef",
        ),
        (
            'backend: "openvino" default_model_filename: "model.onnx"',
            "openvino",
            "",
            "model.onnx",
        ),
        ('backend: "paddle"', "paddle", "", "model.pdmodel"),
    ],
)
def test_backend_platform_and_file_name_determine_each_other(
    tmp_path: Path, text: str, backend: str, platform: str, filename: str
) -> None:
    message = completed(tmp_path, text)
    assert (message.backend, message.platform) == (backend, platform)
    assert message.default_model_filename == filename


@pytest.mark.parametrize(
    ("backend", "file", "platform"),
    [
        ("tensorflow", "model.graphdef", "tensorflow_graphdef"),
        ("pytorch", "model.pt2", "torch_aoti"),
        ("paddle", "inference.json", ""),
    ],
)
def test_of_the_formats_of_a_backend_the_one_on_disk_is_meant(
    tmp_path: Path, backend: str, file: str, platform: str
) -> None:
    (tmp_path / "1").mkdir()
    (tmp_path / "1" / file).touch()
    message = completed(tmp_path, f'backend: "{backend}"')
    assert (message.default_model_filename, message.platform) == (file, platform)


def test_paddles_files_alone_determine_no_backend(tmp_path: Path) -> None:
    (tmp_path / "1").mkdir()
    (tmp_path / "1" / "model.pdmodel").touch()
    with pytest.raises(ModelConfigError, match="Could not determine backend"):
        completed(tmp_path, "")


@pytest.mark.parametrize(
    ("text", "kind"),
    [
        ('backend: "pytorch"', "KIND_GPU"),
        ('backend: "tensorflow"', "KIND_CPU"),
        ('backend: "tensorflow" instance_group { gpus: 0 }', "KIND_GPU"),
        ('backend: "paddle"', "KIND_CPU"),
        ('backend: "openvino"', "KIND_CPU"),
    ],
)
def test_of_a_framework_that_pip_installs_only_pytorchs_has_a_gpu_on_a_board(
    tmp_path: Path, text: str, kind: str
) -> None:
    (group,) = completed(tmp_path, text, completion=Completion(gpus=1)).instance_group
    assert pb.ModelInstanceGroup.Kind.Name(group.kind) == kind


@pytest.mark.parametrize(
    ("text", "kind"),
    [
        ('backend: "image_preprocess"', "KIND_GPU"),
        ('backend: "image_preprocess" instance_group { kind: KIND_CPU }', "KIND_CPU"),
        ('backend: "onnxruntime"', "KIND_CPU"),  # which runs there by default
    ],
)
def test_a_jetson_without_a_driver_has_a_gpu_all_the_same(
    tmp_path: Path, text: str, kind: str
) -> None:
    jetson = Completion(jetson=True, no_gpu="cuInit returns 100")
    message = completed(tmp_path, text, completion=jetson)
    (group,) = message.instance_group
    assert (pb.ModelInstanceGroup.Kind.Name(group.kind), list(group.gpus)) == (kind, [])
    if kind == "KIND_GPU":
        files = ModelFiles("m", tmp_path, {1: tmp_path / "1"})
        with pytest.raises(ModelLoadError, match="cuInit returns 100; on a Jetson KIND_AUTO is"):
            validate(message, files, frozenset({"image_preprocess"}), jetson)


def test_a_name_may_end_in_its_backend(tmp_path: Path) -> None:
    assert completed(tmp_path, "", "lane.identity").backend == "identity"


@pytest.mark.parametrize("text", ["", 'default_model_filename: "lane.onnx"'])
def test_without_any_hint_the_error_names_the_remedy(tmp_path: Path, text: str) -> None:
    with pytest.raises(ModelConfigError) as caught:
        completed(tmp_path, text)
    assert (
        "Invalid model name: Could not determine backend for model 'm' with no backend in model "
        "configuration. Expected model name of the form 'model.<backend_name>'."
    ) in str(caught.value)


@pytest.mark.parametrize(
    ("text", "groups"),
    [
        ('backend: "onnxruntime"', [("m", 2)]),
        ('backend: "identity"', [("m", 1)]),
        (
            'backend: "onnxruntime" instance_group {} instance_group {count: 3}',
            [("m_0", 2), ("m_1", 3)],
        ),
        ('backend: "identity" instance_group { name: "g" kind: KIND_MODEL }', [("g", 1)]),
    ],
)
def test_instance_groups_are_named_and_counted_as_triton_does(
    tmp_path: Path, text: str, groups: list[tuple[str, int]]
) -> None:
    message = completed(tmp_path, text)
    assert [(group.name, group.count) for group in message.instance_group] == groups
    assert all(group.kind != pb.ModelInstanceGroup.KIND_AUTO for group in message.instance_group)


def test_an_ensemble_gets_neither_instances_nor_memory_settings(tmp_path: Path) -> None:
    message = completed(tmp_path, 'platform: "ensemble" ensemble_scheduling {}')
    assert not message.instance_group
    assert not message.HasField("optimization")


def test_pinned_memory_is_on_unless_the_configuration_disables_it(tmp_path: Path) -> None:
    optimization = completed(
        tmp_path, 'backend: "identity" optimization { output_pinned_memory { enable: false } }'
    ).optimization
    assert optimization.input_pinned_memory.enable
    assert not optimization.output_pinned_memory.enable


@pytest.mark.parametrize("text", ["", "version_policy { latest {} }"])
def test_the_latest_version_is_served_by_default(tmp_path: Path, text: str) -> None:
    message = completed(tmp_path, 'backend: "identity" ' + text)
    assert message.version_policy.latest.num_versions == 1


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("dynamic_batching {}", "dynamic_batching { preferred_batch_size: 8 }"),
        (
            "dynamic_batching { preferred_batch_size: 2 }",
            "dynamic_batching { preferred_batch_size: 2 }",
        ),
        (
            "sequence_batching {}",
            "sequence_batching { max_sequence_idle_microseconds: 1000000 direct {} }",
        ),
        (
            "sequence_batching { max_sequence_idle_microseconds: 5 oldest {} }",
            "sequence_batching { max_sequence_idle_microseconds: 5 "
            "oldest { preferred_batch_size: 8 } }",
        ),
    ],
)
def test_a_batchers_defaults_are_the_largest_batch_and_one_second(
    tmp_path: Path, text: str, expected: str
) -> None:
    message = completed(tmp_path, 'backend: "identity" max_batch_size: 8 ' + text)
    wanted = text_format.Parse(expected, pb.ModelConfig())
    assert message.dynamic_batching == wanted.dynamic_batching
    assert message.sequence_batching == wanted.sequence_batching


def test_without_batches_no_size_is_preferred(tmp_path: Path) -> None:
    message = completed(tmp_path, 'backend: "identity" dynamic_batching {}')
    assert not message.dynamic_batching.preferred_batch_size


def test_completing_twice_changes_nothing(tmp_path: Path) -> None:
    once = completed(tmp_path, 'backend: "onnxruntime" instance_group {} sequence_batching {}')
    twice = pb.ModelConfig()
    twice.CopyFrom(once)
    complete(twice, ModelFiles("m", tmp_path, {}))
    assert twice == once


def test_without_completion_there_must_be_a_configuration(tmp_path: Path) -> None:
    with pytest.raises(ModelConfigError, match=r"config\.pbtxt: missing or empty; write it"):
        completed(tmp_path, "", completion=Completion(auto=False))
