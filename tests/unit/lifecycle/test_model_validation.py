"""A model that does not do what was recorded of it never serves."""

from __future__ import annotations

import io
import logging
import os
import zipfile
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
from google.protobuf import text_format
from tritonclient.grpc import model_config_pb2 as pb

from edge_server.backends.contract import TensorModel, Tensors
from edge_server.errors import InvalidRequest, ModelConfigError
from edge_server.inference.scheduling import Scheduling
from edge_server.lifecycle import model_validation
from edge_server.lifecycle.model_validation import golden_pairs, validate
from edge_server.model_config.config import ModelConfig
from edge_server.tensors import DataType, Tensor, as_floats

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from numpy.typing import NDArray

    from edge_server.lifecycle.model_validation import ValidationReport

    Compute = Callable[[NDArray[Any]], NDArray[Any]]

A = np.arange(3, dtype="<f4")


def config(
    tensor: str = "TYPE_FP32", extra: str = "", *, backend: str = "onnxruntime", dims: str = "-1"
) -> ModelConfig:
    text = (
        f'name: "m" backend: "{backend}" instance_group {{ name: "m" count: 2 }} '
        f'input {{ name: "a" data_type: {tensor} dims: {dims} }} '
        f'output {{ name: "b" data_type: {tensor} dims: {dims} }} {extra}'
    )
    return ModelConfig.of(text_format.Parse(text, pb.ModelConfig()))


def plus_one(array: NDArray[Any]) -> NDArray[Any]:
    return array + array.dtype.type(1)


class Calls:
    """Runs `compute`, and counts how often."""

    def __init__(self, compute: Compute) -> None:
        self.compute = compute
        self.inputs: list[NDArray[Any]] = []

    def run(self, inputs: Tensors, outputs: frozenset[str]) -> Tensors:
        self.inputs.append(inputs["a"].array)
        return {"b": Tensor(self.compute(inputs["a"].array))}


def proof_of(
    directory: Path,
    compute: Compute = plus_one,
    said: ModelConfig | None = None,
    calls: Calls | None = None,
) -> ValidationReport:
    calls = calls or Calls(compute)
    loaded = Scheduling(cache_bytes=1 << 20).model(said or config(), 1, TensorModel(calls.run))
    try:
        return validate(loaded, directory)
    finally:
        loaded.close()


def record(directory: Path, name: str = "one", folder: str = "golden", **arrays: Any) -> Path:
    path = directory / folder / f"{name}.npz"
    path.parent.mkdir(parents=True, exist_ok=True)
    np.savez_compressed(path, **{key.replace("_", ".", 1): a for key, a in arrays.items()})
    return path


def test_a_model_that_reproduces_every_pair_is_validated(tmp_path: Path) -> None:
    record(tmp_path, "one", input_a=A, output_b=A + 1)
    record(tmp_path, "two", input_a=A[:1], output_b=A[:1] + 1)
    proof = proof_of(tmp_path)
    assert (proof.golden, proof.not_validated) == (2, "")
    assert proof.latency_s is not None


def test_the_first_difference_refuses_with_file_output_size_and_place(tmp_path: Path) -> None:
    wrong = A + 1
    wrong[1] += 0.5
    wrong[2] += 0.75
    path = record(tmp_path, input_a=A, output_b=wrong)
    with pytest.raises(ModelConfigError) as caught:
        proof_of(tmp_path)
    assert str(caught.value) == (
        f"{path}: output 'b' differs by up to 0.75, at [2]: 3, recorded 3.75, and may by 0.0385; "
        "record the pair with this model, or fix the model"
    )


@pytest.mark.parametrize("off", [0.3, -0.3])
def test_a_recorded_tolerance_stands_for_the_usual_one(tmp_path: Path, off: float) -> None:
    record(tmp_path, input_a=A, output_b=A + np.float32(1 + off), tolerance_b=0.31)
    assert proof_of(tmp_path).golden == 1
    record(tmp_path, input_a=A, output_b=A + np.float32(1 + off), tolerance_b=0.29)
    with pytest.raises(ModelConfigError, match=r"and may by 0\.29"):
        proof_of(tmp_path)


@pytest.mark.parametrize(
    ("datatype", "off", "fits"),
    [
        ("FP64", 1e-4, True),
        ("FP64", 1e-2, False),
        ("FP32", 5e-3, True),
        ("FP32", 0.05, False),
        ("FP16", 0.02, True),
        ("FP16", 0.1, False),
        ("INT64", 1, False),
        ("UINT8", 1, False),
    ],
)
def test_rounding_fits_and_another_result_does_not(
    tmp_path: Path, datatype: str, off: float, fits: bool
) -> None:
    dtype = DataType(datatype).numpy
    # One integer more than a float64 can tell apart from the next.
    start = 2**60 if datatype == "INT64" else 1
    array = np.array([start], dtype)
    record(tmp_path, input_a=array, output_b=plus_one(array) + dtype.type(off))
    said = config(f"TYPE_{datatype}")
    if fits:
        assert proof_of(tmp_path, said=said).golden == 1
    else:
        with pytest.raises(ModelConfigError, match="output 'b' differs"):
            proof_of(tmp_path, said=said)


def test_bfloat16_is_compared_as_the_number_that_it_is(tmp_path: Path) -> None:
    said = config("TYPE_BF16")
    bits = np.array([0x3F80, 0x4000], "<u2")  # 1, 2
    array = bits.view(DataType.BF16.numpy)
    assert as_floats(Tensor(array)).tolist() == [1, 2]
    record(tmp_path, input_a=array, output_b=(bits + 1).view(DataType.BF16.numpy))
    assert proof_of(tmp_path, lambda a: a, said).golden == 1
    record(tmp_path, input_a=array, output_b=(bits + 0x80).view(DataType.BF16.numpy))
    with pytest.raises(ModelConfigError, match="differs by up to 2, at"):
        proof_of(tmp_path, lambda a: a, said)
    with pytest.raises(ModelConfigError, match=r"output 'b' is inf at \[0\]"):
        proof_of(tmp_path, lambda a: np.full(2, 0x7F80, "<u2").view(a.dtype), said)


def test_texts_are_recorded_without_pickle_and_compared_exactly(tmp_path: Path) -> None:
    said = config("TYPE_STRING")
    record(tmp_path, input_a=np.array([b"x", b""]), output_b=np.array(["x", ""]))
    assert proof_of(tmp_path, lambda a: a, said).golden == 1
    record(tmp_path, input_a=np.array([b"x"]), output_b=np.array(["y"]))
    with pytest.raises(ModelConfigError, match=r"differs at \[0\]: b'x', recorded b'y'"):
        proof_of(tmp_path, lambda a: a, said)


@pytest.mark.parametrize("value", [np.nan, np.inf])
def test_a_golden_output_that_is_not_finite_refuses_even_where_it_was_recorded(
    tmp_path: Path, value: float
) -> None:
    record(tmp_path, input_a=A, output_b=np.full(3, value, "<f4"))
    with pytest.raises(ModelConfigError, match=rf"output 'b' is {value} at \[0\]"):
        proof_of(tmp_path, lambda a: np.full(3, value, "<f4"))


@pytest.mark.parametrize(
    ("arrays", "text"),
    [
        ({"input_a": A, "output_b": A[:2]}, r"has shape \[3\], recorded as \[2\]"),
        ({"input_a": A, "output_c": A}, "'output.c': the model has no tensor of that name"),
        ({"input_c": A, "output_b": A}, "'input.c': the model has no tensor of that name"),
        ({"input_a": A.astype("<f8"), "output_b": A}, "'input.a' is float64"),
        ({"output_b": A}, "expected 1 inputs but got 0"),
        ({"input_a": A}, "no array 'output.<name>'"),
        ({"a": A}, "array 'a': a golden pair has"),
        ({"input_a": A, "output_b": A, "tolerance_c": 1}, "'tolerance.c' is of no output"),
        ({"input_a": A, "output_b": A, "tolerance_b": -1}, "must be one number"),
        ({"input_a": A, "output_b": A, "tolerance_b": np.nan}, "must be one number"),
        ({"input_a": A, "output_b": A, "tolerance_b": "x"}, "must be one number"),
        ({"input_a": A.reshape(1, 3), "output_b": A}, "unexpected shape for input 'a'"),
        ({"input_a": np.array([{}]), "output_b": A}, "Object arrays cannot be loaded"),
    ],
)
def test_a_pair_that_does_not_fit_the_model_is_named(
    tmp_path: Path, arrays: dict[str, Any], text: str
) -> None:
    path = record(tmp_path, **arrays)
    with pytest.raises(ModelConfigError, match=text) as caught:
        proof_of(tmp_path)
    assert str(path) in str(caught.value)


def torn(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-30])


def flipped(path: Path) -> None:
    """One bit of the data, which are not compressed, so that only the check sum tells."""
    np.savez(path, **{"input.a": A, "output.b": A + 1})
    data = path.read_bytes()
    at = data.index((A + 1).tobytes())
    path.write_bytes(data[:at] + bytes([data[at] ^ 1]) + data[at + 1 :])


def oversold(path: Path) -> None:
    """An array of 1 TB in 200 bytes."""
    member = io.BytesIO()
    np.save(member, A)
    lie = member.getvalue().replace(b"(3,), }        ", b"(274877906944,)}")[:-1]
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr("input.a.npy", lie)


def pipe(path: Path) -> None:
    path.unlink()
    os.mkfifo(path)


@pytest.mark.parametrize("spoil", [torn, flipped, oversold, pipe, lambda p: p.write_text("no")])
def test_a_file_that_is_no_pair_refuses_and_takes_no_memory(
    tmp_path: Path, spoil: Callable[[Path], Any]
) -> None:
    path = record(tmp_path, input_a=A, output_b=A + 1)
    spoil(path)
    with pytest.raises(ModelConfigError, match=r"is no (file of arrays|regular file)") as caught:
        proof_of(tmp_path)
    assert str(path) in str(caught.value)


def test_caps_on_pairs_and_their_size(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = record(tmp_path, input_a=A, output_b=A + 1)
    monkeypatch.setattr(model_validation, "MOST_BYTES", path.stat().st_size // 4)
    with pytest.raises(ModelConfigError, match="a golden pair has at most"):
        list(golden_pairs(config(), 1, tmp_path))
    monkeypatch.setattr(model_validation, "MOST_PAIRS", 0)
    with pytest.raises(ModelConfigError, match="1 golden pairs; keep at most 0"):
        list(golden_pairs(config(), 1, tmp_path))


def test_a_version_may_have_pairs_of_its_own(tmp_path: Path) -> None:
    record(tmp_path, input_a=A, output_b=A + 5)
    record(tmp_path, folder="golden/1", input_a=A, output_b=A + 1)
    assert proof_of(tmp_path).golden == 1


def test_a_model_that_fails_on_a_pair_gives_the_reason(tmp_path: Path) -> None:
    path = record(tmp_path, input_a=A, output_b=A)

    def refuse(array: NDArray[Any]) -> NDArray[Any]:
        raise InvalidRequest("too short")

    with pytest.raises(
        ModelConfigError, match=f"{path}: the model does not respond to it: too short"
    ):
        proof_of(tmp_path, refuse)


@pytest.mark.parametrize("corrid", ["", "TYPE_STRING"])
def test_each_pair_is_a_sequence_of_its_own(tmp_path: Path, corrid: str) -> None:
    control = (
        'sequence_batching { max_sequence_idle_microseconds: 1000000 control_input { name: "id" '
        f"control {{ kind: CONTROL_SEQUENCE_CORRID data_type: {corrid} }} }} }}"
    )
    said = config(extra=control if corrid else "sequence_batching {}")
    record(tmp_path, "one", input_a=A, output_b=A + 1)
    record(tmp_path, "two", input_a=A, output_b=A + 1)
    assert proof_of(tmp_path, said=said).golden == 2


def test_without_pairs_zeros_and_random_data_show_that_it_calculates(tmp_path: Path) -> None:
    calls = Calls(plus_one)
    assert proof_of(tmp_path, calls=calls).not_validated == ""
    assert [array.shape for array in calls.inputs] == [(1,), (1,)]
    assert (calls.inputs[0] == 0).all()
    assert (calls.inputs[1] != 0).any()


@pytest.mark.parametrize("datatype", ["INT64", "INT32", "UINT16"])
def test_made_up_counts_and_sizes_are_small(tmp_path: Path, datatype: str) -> None:
    calls = Calls(plus_one)
    proof_of(tmp_path, calls=calls, said=config(f"TYPE_{datatype}", dims="99"))
    assert {int(n) for array in calls.inputs for n in array} == {0, 1}


@pytest.mark.parametrize(
    "said",
    [
        config(backend="python"),
        config(backend="identity"),
        config(extra="sequence_batching {}"),
        config(extra="model_transaction_policy { decoupled: true }"),
    ],
)
def test_made_up_data_are_not_given_to_what_may_do_harm(tmp_path: Path, said: ModelConfig) -> None:
    calls = Calls(plus_one)
    proof = proof_of(tmp_path, said=said, calls=calls)
    assert "might do harm" in proof.not_validated
    assert (calls.inputs, proof.latency_s) == ([], None)


def test_a_model_that_refuses_made_up_data_may_serve_and_one_line_reports_it(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    def refuse(array: NDArray[Any]) -> NDArray[Any]:
        raise InvalidRequest("no such word")

    with caplog.at_level(logging.INFO):
        proof = proof_of(tmp_path, refuse)
    assert proof.not_validated.endswith("does not take data that mean nothing: no such word")
    assert caplog.messages == [f"model m: version 1: not validated: {proof.not_validated}"]


def test_an_output_without_any_finite_element_refuses(tmp_path: Path) -> None:
    with pytest.raises(ModelConfigError, match="output 'b' has no finite element"):
        proof_of(tmp_path, lambda a: a * np.float32(np.nan))
    # 0/0 is what zeros may well give.
    with np.errstate(all="ignore"):
        assert proof_of(tmp_path, lambda a: a / a).not_validated == ""


@pytest.mark.parametrize(
    ("compute", "extra", "text"),
    [
        (
            lambda a: np.concatenate([a, a]),
            "max_batch_size: 4",
            r"has shape \[2,3\], configured as \[1,3\]",
        ),
        (lambda a: a.astype("<f8"), "", "is FP64, configured as FP32"),
    ],
)
def test_a_batch_without_its_rows_or_a_type_that_the_configuration_rules_out_refuses(
    tmp_path: Path, compute: Compute, extra: str, text: str
) -> None:
    with pytest.raises(ModelConfigError, match=text):
        proof_of(tmp_path, compute, config(dims="3", extra=extra))


def test_a_shape_that_depends_on_the_values_serves_with_a_warning(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    proof = proof_of(tmp_path, lambda a: a[:1], config(dims="3"))
    assert proof.not_validated == ""
    assert caplog.messages[0] == (
        "model m: output 'b' has shape [1], configured as [3]: clients get the shape that the "
        "model gives"
    )


def test_a_model_is_validated_without_the_delay_of_its_batcher(tmp_path: Path) -> None:
    delay = "dynamic_batching { max_queue_delay_microseconds: 600000000 }"
    calls = Calls(plus_one)
    proof = proof_of(tmp_path, said=config(extra=delay), calls=calls)
    assert (proof.not_validated, len(calls.inputs)) == ("", 2)


def test_a_shape_that_comes_of_a_made_up_dimension_only_leaves_it_not_validated(
    tmp_path: Path,
) -> None:
    said = config(extra='output { name: "c" data_type: TYPE_FP32 dims: 7 }')
    loaded = Scheduling().model(
        said, 1, TensorModel(lambda inputs, _: {"b": inputs["a"], "c": inputs["a"]})
    )
    assert "of the least input output 'c' has shape [1]" in validate(loaded, tmp_path).not_validated


LIMIT = 'parameters {{ key: "golden_max_latency_ms" value {{ string_value: "{}" }} }}'


def test_a_latency_limit_holds_the_median_of_five_runs(tmp_path: Path) -> None:
    record(tmp_path, input_a=A, output_b=A + 1)
    calls = Calls(plus_one)
    cached = "response_cache { enable: true }"
    proof = proof_of(tmp_path, said=config(extra=LIMIT.format(60_000) + cached), calls=calls)
    # One to compare, and none of them from the cache.
    assert len(calls.inputs) == 6
    assert proof.latency_s is not None
    with pytest.raises(ModelConfigError, match="allows 1e-06 ms"):
        proof_of(tmp_path, said=config(extra=LIMIT.format("1e-6")))


def test_a_latency_limit_where_nothing_can_run_is_not_passed_over(tmp_path: Path) -> None:
    said = config(backend="python", extra=LIMIT.format(10))
    with pytest.raises(ModelConfigError, match=r"nothing can be measured.*record a golden pair"):
        proof_of(tmp_path, said=said)


@pytest.mark.parametrize("text", ["", "fast", "0", "-1", "inf", "nan"])
def test_a_latency_limit_is_a_number_of_milliseconds(tmp_path: Path, text: str) -> None:
    with pytest.raises(ModelConfigError, match="give a number of milliseconds above 0"):
        proof_of(tmp_path, said=config(extra=LIMIT.format(text)))
