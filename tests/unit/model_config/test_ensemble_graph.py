"""An ensemble's graph is held against its members before it serves."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
from google.protobuf import text_format
from tritonclient.grpc import model_config_pb2 as pb

from edge_server.errors import ModelConfigError
from edge_server.model_config.config import EnsembleStep, ModelConfig
from edge_server.model_config.ensemble_graph import resolve_graph


def member(
    name: str, inputs: str, outputs: str, max_batch_size: int = 0, extra: str = ""
) -> ModelConfig:
    """`inputs` and `outputs` as `name:TYPE:dims`, several separated by blanks."""
    text = f'name: "{name}" backend: "identity" max_batch_size: {max_batch_size}\n'
    for kind, tensors in (("input", inputs), ("output", outputs)):
        for tensor in tensors.split():
            tensor_name, datatype, dims = tensor.split(":")
            text += (
                f'{kind} {{ name: "{tensor_name}" data_type: TYPE_{datatype} dims: [{dims}] }}\n'
            )
    return ModelConfig.of(text_format.Parse(text + extra, pb.ModelConfig()))


DECOUPLED = "model_transaction_policy { decoupled: true }"
LABELLED = 'output { name: "l" data_type: TYPE_FP32 dims: 4 label_filename: "labels.txt" }'
OPTIONAL = 'input { name: "o" data_type: TYPE_FP32 dims: 4 optional: true }'
MEMBERS = {
    "first": member("first", "a:FP32:4", "b:FP32:-1,2 size:INT32:2"),
    "second": member("second", "c:FP32:3,-1", "d:FP32:4"),
    "wants_int": member("wants_int", "c:INT32:3,-1", "d:FP32:4"),
    "wants_flat": member("wants_flat", "c:FP32:6", "d:FP32:4"),
    "any": member("any", "a:FP32:-1", "b:FP32:-1"),
    "three": member("three", "a:FP32:3", "b:FP32:1"),
    "four": member("four", "a:FP32:4", "b:FP32:1"),
    "same_name": member("same_name", "t:FP32:4", "t:FP32:2"),
    "two_inputs": member("two_inputs", "c:FP32:-1,2 e:FP32:4", "d:FP32:4"),
    "streams": member("streams", "a:FP32:4", "b:FP32:4", extra=DECOUPLED),
    "labelled": replace(
        member("labelled", "a:FP32:4", "b:FP32:4", extra=LABELLED), labels={"l": ("left", "right")}
    ),
    "optional": member("optional", "a:FP32:4", "b:FP32:4", extra=OPTIONAL),
    "adds": member("adds", "a:FP32:4 c:FP32:4", "b:FP32:4"),
    "batches_2": member("batches_2", "a:FP32:4", "d:FP32:4", max_batch_size=2),
}


def ensemble(*steps: str, inputs: str = "x:FP32:4", outputs: str = "z:FP32:4") -> ModelConfig:
    """Steps as `model in=tensor ... > out=tensor ...`."""
    base = member("e", inputs, outputs)
    parsed = []
    for step in steps:
        model, _, maps = step.partition(" ")
        reads, _, writes = maps.partition(">")
        parsed.append(
            EnsembleStep(
                model,
                -1,
                dict(pair.split("=") for pair in reads.split()),
                dict(pair.split("=") for pair in writes.split()),
            )
        )
    return ModelConfig(**{**vars(base), "platform": "ensemble", "steps": tuple(parsed)})


def validated(config: ModelConfig, **more: ModelConfig) -> ModelConfig:
    members = {**MEMBERS, **more}
    return resolve_graph(config, Path("e/config.pbtxt"), lambda step: members[step.model_name])


GOOD = ("first a=x > b=y", "second c=y > d=z")


def test_a_chain_with_fitting_shapes_is_valid_in_any_order() -> None:
    validated(ensemble(*GOOD))
    validated(ensemble(*reversed(GOOD)))


@pytest.mark.parametrize(
    ("config", "expected"),
    [
        (
            ensemble("first wrong=x a=x > b=y", GOOD[1]),
            "ensemble tensor x is mapping to non-existing input wrong in model first",
        ),
        (
            ensemble("first a=x > wrong=y", GOOD[1]),
            "ensemble tensor y is mapped from non-existing output wrong in model first",
        ),
        (
            ensemble("first a=x > b=y", "two_inputs c=y > d=z"),
            "in ensemble e, input e in model two_inputs is not mapped to any ensemble tensors",
        ),
        (
            ensemble("second c=missing > d=z", inputs="x:FP32:4"),
            "ensemble input 'x' for ensemble e' is not used",
        ),
        (
            ensemble(GOOD[0], "second c=missing > d=z"),
            "output 'z' for ensemble 'e' is not written: at least one of its depending tensors, "
            "'missing', is not connected",
        ),
        (
            ensemble("first a=x > b=z", outputs="z:FP32:-1,2 w:FP32:1"),
            "output 'w' for ensemble 'e' is not written",
        ),
        (
            ensemble("first a=x > b=y size=unused", GOOD[1]),
            "ensemble tensor 'unused' is unused in ensemble 'e'",
        ),
        (
            ensemble(GOOD[0], "wants_int c=y > d=z"),
            "in ensemble e, ensemble tensor y: inconsistent data type: TYPE_FP32 is inferred from "
            "model first while TYPE_INT32 is inferred from model wants_int",
        ),
        (
            ensemble(GOOD[0], "wants_flat c=y > d=z"),
            "in ensemble e, ensemble tensor y: inconsistent shape: [-1,2] is inferred from model "
            "first while [6] is inferred from model wants_flat",
        ),
    ],
)
def test_each_fault_has_the_contracts_text(config: ModelConfig, expected: str) -> None:
    with pytest.raises(ModelConfigError) as caught:
        validated(config)
    assert expected in str(caught.value)


def test_models_with_and_without_batching_agree_on_dims_or_on_the_whole_shape() -> None:
    config = validated(ensemble("batches_2 a=x > d=y", "four a=y > b=z", outputs="z:FP32:1"))
    assert config.mixes_batching
    assert [step.full_shapes for step in config.steps] == [{"a": (-1, 4)}, {"a": (4,)}]
    assert validated(ensemble("batches_2 a=x > d=z", inputs="x:FP32:-1,4")).mixes_batching
    assert not validated(ensemble(*GOOD)).mixes_batching
    with pytest.raises(ModelConfigError, match="inconsistent shape"):
        validated(ensemble("batches_2 a=x > d=z", inputs="x:FP32:-1,-1,4"))


def test_an_ensemble_batches_no_more_than_its_members() -> None:
    base = ensemble("batches_2 a=x > d=z")
    config = ModelConfig(**{**vars(base), "max_batch_size": 3})
    with pytest.raises(
        ModelConfigError, match="allows maximum batch size 3, but it contains model"
    ):
        validated(config)


@pytest.mark.parametrize("readers", [("three", "four"), ("four", "three")])
def test_a_free_size_is_one_size_for_all_its_readers(readers: tuple[str, str]) -> None:
    first, second = readers
    config = ensemble(
        "any a=x > b=y",
        f"{first} a=y > b=z",
        f"{second} a=y > b=w",
        inputs="x:FP32:-1",
        outputs="z:FP32:1 w:FP32:1",
    )
    sizes = {"three": 3, "four": 4}
    with pytest.raises(ModelConfigError) as caught:
        validated(config)
    assert (
        f"ensemble tensor y: inconsistent shape: [{sizes[first]}] is inferred from model {first} "
        f"while [{sizes[second]}] is inferred from model {second}"
    ) in str(caught.value)


def test_a_models_input_and_output_of_one_name_are_two_tensors() -> None:
    validated(ensemble("same_name t=x > t=z", outputs="z:FP32:2"))


def test_an_optional_input_needs_no_tensor() -> None:
    validated(ensemble("optional a=x > b=z"))


def test_an_ensemble_with_a_decoupled_member_is_decoupled_in_its_message() -> None:
    config = validated(ensemble("streams a=x > b=y", "any a=y > b=z", outputs="z:FP32:-1"))
    assert config.decoupled
    assert config.message.model_transaction_policy.decoupled
    assert [step.decoupled for step in config.steps] == [True, False]
    plain = validated(ensemble(*GOOD))
    assert not plain.decoupled
    # Triton's completed configurations have the field in every case.
    assert plain.message.HasField("model_transaction_policy")


@pytest.mark.parametrize(
    ("steps", "outputs", "reader"),
    [
        (("streams a=x > b=t", "streams a=x > b=u", "adds a=t c=u > b=z"), "z", "adds"),
        (("streams a=x > b=t", "streams a=t > b=u", "adds a=t c=u > b=z"), "z", "adds"),
        (("streams a=x > b=t", "streams a=x > b=u"), "t u", "e"),
    ],
)
def test_what_is_read_together_comes_from_one_decoupled_model(
    steps: tuple[str, ...], outputs: str, reader: str
) -> None:
    config = ensemble(*steps, outputs=" ".join(f"{name}:FP32:4" for name in outputs.split()))
    with pytest.raises(ModelConfigError) as caught:
        validated(config)
    assert str(caught.value).endswith(
        f"in ensemble e, step of model '{reader}' receives inputs originated from different "
        "decoupled models"
    )


def test_a_tensor_of_the_request_may_meet_each_response() -> None:
    assert validated(ensemble("streams a=x > b=t", "adds a=t c=x > b=z")).decoupled


def test_a_decoupled_ensemble_cannot_be_cached() -> None:
    base = ensemble("streams a=x > b=z")
    with pytest.raises(ModelConfigError, match="with 'decoupled' transaction policy"):
        validated(ModelConfig(**{**vars(base), "response_cache": True}))


def test_labels_come_from_the_member_that_has_them_however_deep_or_from_the_ensemble() -> None:
    inner = validated(ensemble("labelled a=x > l=z"))
    assert inner.labels == {"z": ("left", "right")}
    outer = ensemble("inner x=x > z=z")
    assert validated(outer, inner=inner).labels == inner.labels
    own = replace(outer, labels={"z": ("mine",)})
    assert validated(own, inner=inner).labels == {"z": ("mine",)}


def test_a_request_runs_a_bounded_number_of_steps_however_ensembles_are_nested() -> None:
    """Each level calls the one before it twice."""
    members = {"level": member("level", "a:FP32:4", "b:FP32:4")}
    twice = ensemble("level a=x > b=y", "level a=y > b=z")
    twice = replace(twice, name="doubled")
    for steps in (2, 6, 14, 30, 62, 126, 254, 510):
        resolved = resolve_graph(twice, Path("config.pbtxt"), lambda s: members[s.model_name])
        assert resolved.runs == steps
        level = members["level"]
        members["level"] = replace(resolved, inputs=level.inputs, outputs=level.outputs)
    with pytest.raises(ModelConfigError) as caught:
        resolve_graph(twice, Path("config.pbtxt"), lambda s: members[s.model_name])
    assert str(caught.value) == (
        "config.pbtxt: ensemble 'doubled' runs 1022 steps for one request, those of the ensembles "
        "within included; 1000 are the most: use fewer steps"
    )


def test_ensembles_are_nested_in_a_bounded_number_of_levels() -> None:
    """A request to 200 levels would end in a RecursionError."""
    level = member("level", "a:FP32:4", "b:FP32:4")
    members = {"level": level}
    once = replace(ensemble("level a=x > b=z"), name="outer")
    for depth in range(1, 33):
        resolved = resolve_graph(once, Path("config.pbtxt"), lambda s: members[s.model_name])
        assert resolved.depth == depth
        members["level"] = replace(resolved, inputs=level.inputs, outputs=level.outputs)
    with pytest.raises(ModelConfigError) as caught:
        resolve_graph(once, Path("config.pbtxt"), lambda s: members[s.model_name])
    assert str(caught.value) == (
        "config.pbtxt: ensemble 'outer' has 33 levels of ensembles within each other; 32 are the "
        "most: let it call the innermost models itself"
    )
