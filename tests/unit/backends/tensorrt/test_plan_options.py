"""What plan is wanted comes from config.pbtxt, and shapes are written as trtexec takes them."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
from google.protobuf import text_format
from hypothesis import given
from hypothesis import strategies as st
from tritonclient.grpc import model_config_pb2 as pb

from edge_server.backends.tensorrt.plan_options import (
    BuildOptions,
    GivenShapes,
    build_options_of,
    given_profiles,
    network_of,
    sha256_of,
    shapes,
)
from edge_server.errors import InvalidRequest, ModelConfigError
from edge_server.model_config.config import ModelConfig

if TYPE_CHECKING:
    from pathlib import Path

INPUT = 'input [ { name: "x" data_type: TYPE_FP32 dims: [ 3, -1 ] } ]'


def options(text: str) -> BuildOptions:
    return build_options_of(
        ModelConfig.of(text_format.Parse(f'name: "m" {text}', pb.ModelConfig()))
    )


def parameter(name: str, value: str) -> str:
    return f'parameters {{ key: "{name}" value {{ string_value: "{value}" }} }}'


def test_an_empty_configuration_wishes_for_nothing_special() -> None:
    assert options("") == BuildOptions()


def test_dims_have_the_batch_in_front_where_the_model_batches() -> None:
    assert options(INPUT).dims == {"x": (3, -1)}
    assert options(f"max_batch_size: 8 {INPUT}").dims == {"x": (-1, 3, -1)}


def test_a_secondary_device_is_the_nvdla_core() -> None:
    group = "instance_group [ { secondary_devices [ { kind: KIND_NVDLA device_id: %d } ] } ]"
    assert options(group % 1).dla_core == 1
    # What is built for one runs on the other.
    assert options(f"{group % 1} {group % 0} instance_group [ {{ }} ]").dla_core == 0


def test_every_parameter_is_taken() -> None:
    said = options(
        parameter("plan_precision", "INT8")
        + parameter("plan_strongly_typed", "true")
        + parameter("plan_opt", "x:1x3x8;x:1x3x16")
        + parameter("plan_max", "x:4x3x8")
        + parameter("plan_workspace_mib", "64")
        + parameter("plan_max_gpu_layers", "0")
    )
    assert said.precision == "int8"
    assert said.strongly_typed
    assert said.workspace_mib == 64
    assert said.max_gpu_layers == 0
    assert said.profiles == (
        GivenShapes({}, {"x": (1, 3, 8)}, {"x": (4, 3, 8)}),
        GivenShapes({}, {"x": (1, 3, 16)}, {}),
    )


@pytest.mark.parametrize(
    ("name", "value", "said"),
    [
        ("plan_precision", "fp8", "precision 'fp8' is unknown; known: fp32, fp16, int8"),
        ("plan_strongly_typed", "yes", "'plan_strongly_typed' is 'yes'; give true or false"),
        ("plan_workspace_mib", "much", "'plan_workspace_mib' is 'much'; give a whole number"),
        ("plan_opt", "x", "'x' is no shape"),
    ],
)
def test_what_cannot_be_understood_is_told_with_the_model(name: str, value: str, said: str) -> None:
    with pytest.raises(ModelConfigError, match=f"model 'm': parameters: {said}"):
        options(parameter(name, value))


NAMES = st.text("abc:/_.0", min_size=1, max_size=6)
SIZES = st.lists(st.integers(0, 10**6), min_size=1, max_size=5).map(tuple)


@given(st.dictionaries(NAMES, SIZES, max_size=3))
def test_shapes_are_read_as_they_are_written(wanted: dict[str, tuple[int, ...]]) -> None:
    assert shapes(",".join(f"{n}:{'x'.join(map(str, s))}" for n, s in wanted.items())) == wanted


@pytest.mark.parametrize("text", ["x", "x:", ":1", "x:1x", "x:-1", "x:axb", "x:1,x:2"])
def test_what_is_no_shape_is_refused(text: str) -> None:
    with pytest.raises(InvalidRequest):
        shapes(text)


def test_the_nth_text_of_each_is_of_the_nth_profile() -> None:
    assert given_profiles(["x:1"], ["x:2", "y:3"], []) == (
        GivenShapes({"x": (1,)}, {"x": (2,)}, {}),
        GivenShapes({}, {"y": (3,)}, {}),
    )
    assert given_profiles([""], [], [""]) == ()


def test_two_wishes_are_told_apart_by_their_digest() -> None:
    one = BuildOptions(dims={"a": (1,), "b": (2,)})
    assert one.digest == BuildOptions(dims={"b": (2,), "a": (1,)}).digest
    assert one.digest != BuildOptions(dims={"a": (1,), "b": (3,)}).digest


@pytest.mark.parametrize(
    ("options", "version", "built_of", "precision"),
    [
        (BuildOptions(), (11, 4), "net.onnx", "fp32"),
        (BuildOptions("fp16"), (10, 3), "net.onnx", "fp16"),
        (BuildOptions("fp16"), (11, 4), "net_fp16.onnx", "fp32"),
        (BuildOptions("int8"), (10, 3), "net_int8.onnx", "int8"),
        (BuildOptions("int8"), (11, 4), "net_int8.onnx", "int8"),
        (BuildOptions("int8", calibration="/samples"), (10, 3), "net.onnx", "int8"),
    ],
)
def test_a_precision_that_tensorrt_does_not_make_comes_from_the_file_beside_the_network(
    tmp_path: Path, options: BuildOptions, version: tuple[int, int], built_of: str, precision: str
) -> None:
    onnx = tmp_path / "net.onnx"
    assert network_of(onnx, options, version) == (onnx, options)
    for name in ("net_fp16.onnx", "net_int8.onnx"):
        (tmp_path / name).touch()
    found, chosen = network_of(onnx, options, version)
    assert (found.name, chosen.precision) == (built_of, precision)
    # What a typed file is built with is a choice on TensorRT 10, and no flag.
    assert chosen.strongly_typed == (built_of == "net_fp16.onnx")


def test_a_file_in_another_precision_is_of_the_network_beside_it(tmp_path: Path) -> None:
    onnx, beside = tmp_path / "net.onnx", tmp_path / "net_int8.onnx"
    onnx.write_bytes(b"weights")
    beside.write_bytes(b"...made_of\x12\x40" + sha256_of(onnx).encode() + b"\x00")
    int8 = BuildOptions("int8")
    assert network_of(onnx, int8, (10, 3)) == (beside, int8)
    onnx.write_bytes(b"other weights")
    with pytest.raises(ModelConfigError, match=r"net_int8\.onnx: was made of another net\.onnx"):
        network_of(onnx, int8, (10, 3))
    beside.write_bytes(b"says nothing")
    assert network_of(onnx, int8, (10, 3)) == (beside, int8)
