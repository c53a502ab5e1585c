"""A network's contract is found in its configuration, and a response that breaks it has a name."""

from __future__ import annotations

import contextlib
import math
from dataclasses import replace

import numpy as np
import pytest
from google.protobuf import text_format
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays
from tritonclient.grpc import model_config_pb2 as pb

from edge_server.errors import ModelConfigError
from edge_server.lanes.camera_model import CameraModel, Lens, Mounting
from edge_server.model_config.config import ModelConfig
from edge_server.pipeline.contracts import Contract, check_replacement
from edge_server.pipeline.perception import (
    BadOutput,
    Classification,
    Detections,
    NetworkView,
    Segmentation,
    TensorList,
)
from edge_server.pixels import CropRegion

# A picture of 1280 x 720 px, of which the network sees the lower half in 64 x 36 px.
VIEW = NetworkView((1280, 720), CropRegion(0, 360, 1280, 360), (64, 36))
LANES = "lane_points:FP32:-1,72,2 lane_scores:FP32:-1"
YOLO = "output0:FP32:6,-1"
SSD = "boxes:FP32:-1,4 scores:FP32:-1 classes:FP32:-1"
DETR = "pred_boxes:FP32:-1,4 logits:FP32:-1,3"


def config(outputs: str, labels: str = "", **parameters: str) -> ModelConfig:
    """Outputs as NAME:TYPE:DIMS; the first one has the labels."""
    text = 'name: "net" backend: "identity" input { name: "image" data_type: TYPE_UINT8 '
    text += "dims: [-1,-1,3] } "
    for each in outputs.split():
        name, datatype, dims = each.split(":")
        text += f'output {{ name: "{name}" data_type: TYPE_{datatype} dims: [{dims}] }} '
    for key, value in parameters.items():
        text += f'parameters {{ key: "{key}" value {{ string_value: "{value}" }} }} '
    made = ModelConfig.of(text_format.Parse(text, pb.ModelConfig()))
    of_first = {outputs.partition(":")[0]: tuple(labels.split())} if labels else {}
    return replace(made, labels=of_first)


@pytest.mark.parametrize(
    ("outputs", "labels", "task"),
    [
        (LANES, "", "lanes"),
        (YOLO, "car person", "detection"),
        (SSD, "", "detection"),
        (DETR, "", "detection"),
        ("dets:FP32:300,6", "", "detection"),
        ("boxes:FP32:-1,4 scores:FP32:-1,3", "", "detection"),
        ("mask:INT64:36,64", "", "segmentation"),
        ("scores:FP32:3,36,64", "background road car", "segmentation"),
        ("text:FP32:1,36,64", "background text", "segmentation"),
        ("probabilities:FP32:3", "sun rain snow", "classification"),
        ("features:FP32:512", "", "tensors"),
    ],
)
def test_a_contract_is_recognised_by_outputs_and_labels(
    outputs: str, labels: str, task: str
) -> None:
    assert Contract.of(config(outputs, labels)).task == task


def test_the_configuration_may_name_the_contract() -> None:
    assert Contract.of(config("features:FP32:512", task="classification")).task == "classification"
    with pytest.raises(ModelConfigError, match="'task' is 'boxes', which is not one of lanes, det"):
        Contract.of(config(SSD, task="boxes"))
    with pytest.raises(
        ModelConfigError,
        match=r"no outputs of the contract detection: it has 'x' FP32 \[3,5\]; with 0 labels it "
        r"wants one output \[4\+classes,N\]",
    ):
        Contract.of(config("x:FP32:3,5", task="detection"))


def test_where_two_decoders_fit_the_configuration_chooses() -> None:
    outputs = "dets:FP32:300,6"
    with pytest.raises(ModelConfigError, match=r"several decoders fit.* yolo_objectness, rows"):
        Contract.of(config(outputs, "car", task="detection"))
    assert Contract.of(config(outputs, "car", decoder="rows")).task == "detection"


def detections(
    outputs: str, tensors: dict[str, object], labels: str = "", **more: str
) -> Detections:
    arrays = {name: np.array(value, np.float32) for name, value in tensors.items()}
    found = Contract.of(config(outputs, labels, **more)).result(arrays, VIEW)
    assert isinstance(found, Detections)
    return found


# Of 64 x 36 px: x 16 to 32, y 9 to 18; in the picture 320 to 640, 450 to 540.
IN_PICTURE = [320, 450, 640, 540]


@pytest.mark.parametrize(
    ("outputs", "labels", "tensors"),
    [
        # Two boxes of one object, of which the better one stays; below the threshold is a third.
        (YOLO, "a b", {"output0": np.array([[24, 13.5, 16, 9, 0.1, 0.9], [24, 13, 16, 9, 0, 0.6],
                                            [9, 9, 2, 2, 0.2, 0.1]]).T}),
        ("o:FP32:-1,7", "a b", {"o": [[24, 13.5, 16, 9, 0.9, 0.1, 1.0]]}),
        ("o:FP32:-1,6", "", {"o": [[16, 9, 32, 18, 0.9, 1], [0, 0, 0, 0, 0, 0]]}),
        (SSD, "a b", {"boxes": [[0.25, 0.25, 0.5, 0.5]], "scores": [0.9], "classes": [1]}),
        ("boxes:FP32:-1,4 scores:FP32:-1,3", "",
         {"boxes": [[0.25, 0.25, 0.5, 0.5]], "scores": [[0.05, 0.05, 0.9]]}),
        (DETR, "", {"pred_boxes": [[0.375, 0.375, 0.25, 0.25]],
                    "logits": [[0, math.log(9 / 0.5), math.log(0.5)]]}),
    ],
    ids=["yolo", "yolo_objectness", "rows", "ssd", "ssd_scores", "detr"],
)  # fmt: skip
def test_each_decoder_gives_pixels_of_the_whole_picture(
    outputs: str, labels: str, tensors: dict[str, object]
) -> None:
    found = detections(outputs, tensors, labels)
    np.testing.assert_allclose(found.boxes, [IN_PICTURE], atol=1e-3)
    assert found.classes.tolist() == [1]
    assert found.scores[0] == pytest.approx(0.9, abs=0.03)


def ssd(
    boxes: object = ((0.2, 0.2, 0.4, 0.4),), scores: object = (0.9,), classes: object = (0,)
) -> dict[str, object]:
    return {"boxes": boxes, "scores": scores, "classes": classes}


@pytest.mark.parametrize(
    ("tensors", "code"),
    [
        (ssd(((0.2, math.nan, 0.4, 0.4),)), "not_finite"),
        (ssd(scores=(math.nan,)), "not_finite"),
        (ssd(((1.2, 1.2, 1.4, 1.4),)), "outside"),
        (ssd(((0.4, 0.4, 0.2, 0.2),)), "outside"),
        (ssd(classes=(2,)), "class"),
        (ssd(classes=(-1,)), "class"),
        (ssd(scores=(1.5,)), "score"),
        (ssd(scores=(0.9, 0.9)), "shape"),
        (ssd(scores=((0.9,),)), "shape"),
        (
            ssd(np.tile((0.2, 0.2, 0.4, 0.4), (10**6, 1)), np.ones(10**6), np.zeros(10**6)),
            "too_many",
        ),
        (ssd(np.tile((0.2, 0.2, 0.4, 0.4), (1001, 1)), np.ones(1001), np.zeros(1001)), "too_many"),
    ],
)
def test_a_response_that_breaks_the_contract_is_an_error_with_a_name(
    tensors: dict[str, object], code: str
) -> None:
    with pytest.raises(BadOutput) as raised:
        detections(SSD, tensors, "car person")
    assert raised.value.code == code
    assert str(raised.value).startswith(f"{code}: ")


ANY_NUMBER = st.floats(width=32) | st.sampled_from([0.0, 0.5, 1.0, 30.0, math.nan, math.inf])


@given(data=st.data())
@pytest.mark.parametrize(
    ("outputs", "labels"),
    [
        (YOLO, "a b"),
        ("o:FP32:-1,7", "a b"),
        ("o:FP32:-1,6", ""),
        (SSD, "a"),
        ("boxes:FP32:-1,4 scores:FP32:-1,-1", ""),
        ("boxes:FP32:-1,4 logits:FP32:-1,-1", "a b"),
        (LANES, ""),
        ("scores:FP32:3,-1,-1", "background road car"),
        ("scores:FP32:-1,-1,-1", "background text"),
        ("p:FP32:-1", "sun rain"),
    ],
)
def test_any_response_has_a_meaning_or_an_error_with_a_name(
    outputs: str, labels: str, data: st.DataObject
) -> None:
    task = "detection" if "boxes" in outputs or outputs.startswith(("o:", YOLO)) else ""
    contract = Contract.of(config(outputs, labels, **({"task": task} if task else {})))
    sides = st.integers(0, 6)
    tensors = {
        name: data.draw(arrays(np.float32, tuple(data.draw(sides) if d < 0 else d for d in shape),
                               elements=ANY_NUMBER))
        for name, shape in contract.outputs.items()
    }  # fmt: skip
    with contextlib.suppress(BadOutput):
        found = contract.result(tensors, VIEW)
        if isinstance(found, Detections):
            assert np.isfinite(found.boxes).all()
            assert (found.boxes >= 0).all()
            assert (found.boxes <= [1280, 720, 1280, 720]).all()


def test_a_box_without_enough_score_may_be_anything() -> None:
    assert len(detections(SSD, ssd(((math.nan,) * 4,), (0.1,), (7,)), "car").boxes) == 0


def test_boxes_of_two_classes_do_not_suppress_each_other() -> None:
    boxes = np.array([[24, 13.5, 16, 9, 0.9, 0.1], [24, 13.5, 16, 9, 0.1, 0.8]]).T
    assert detections(YOLO, {"output0": boxes}, "car person").classes.tolist() == [0, 1]


def test_with_a_calibration_a_box_has_a_foot_on_the_road() -> None:
    lens = Lens("pinhole", 1280, 720, 1000.0, 1000.0, 640.0, 360.0, (0.0,) * 5)
    camera = CameraModel(lens, Mounting(1.5))
    view = VIEW._replace(region=CropRegion(0, 0, 1280, 720), camera=camera, pitch_std_rad=0.01)
    # 100 px below the horizon: 15 m ahead; a box on the lower edge stands nowhere that is seen.
    boxes = [[590, 300, 690, 460], [590, 300, 690, 720]]
    scaled = np.array(boxes, np.float32) / (1280, 720, 1280, 720)
    tensors = ssd(scaled[:, [1, 0, 3, 2]], (0.9, 0.8), (0, 0))
    arrays = {name: np.array(value, np.float32) for name, value in tensors.items()}
    found = Contract.of(config(SSD)).result(arrays, view)
    assert isinstance(found, Detections)
    assert found.ground is not None
    assert found.covariance is not None
    np.testing.assert_allclose(found.ground, [[15.0, 0.0], [math.nan, math.nan]], atol=1e-3)
    # dx is x^2/h for a radian of pitch, x^2/(f h) for a pixel; a cell of the network has 20 px.
    assert found.covariance[0, 0, 0] == pytest.approx(1.5**2 + 3.0**2, rel=0.05)


def test_a_mask_becomes_runs_and_outlines_in_pixels_of_the_picture() -> None:
    cells = np.zeros((36, 64), np.int64)
    cells[18:, 16:48] = 1
    found = Contract.of(config("mask:INT64:36,64")).result({"mask": cells}, VIEW)
    assert isinstance(found, Segmentation)
    assert found.run_classes.tolist()[:3] == [0, 1, 0]
    assert found.run_lengths.tolist()[:2] == [18 * 64 + 16, 32]
    assert found.run_lengths.sum() == 36 * 64
    (outline,) = found.polygons
    assert outline.class_id == 1
    assert outline.points.min(axis=0).tolist() == [330, 545]
    assert outline.points.max(axis=0).tolist() == [950, 715]


@pytest.mark.parametrize(
    ("cells", "code"),
    [
        (np.full((36, 64), 3), "class"),
        (np.full((36, 64), -1), "class"),
        (np.zeros((35, 64)), "shape"),
        (np.zeros((72, 128)), "shape"),
        (np.zeros((0, 0)), "shape"),
        (np.zeros((1, 36, 64)), "shape"),
    ],
)
def test_a_mask_of_other_classes_or_of_another_size_is_none(
    cells: np.ndarray[tuple[int, ...], np.dtype[np.float64]], code: str
) -> None:
    contract = Contract.of(config("mask:INT64:-1,-1", "background road car"))
    with pytest.raises(BadOutput) as raised:
        contract.result({"mask": cells.astype(np.int64)}, VIEW)
    assert raised.value.code == code


@pytest.mark.parametrize(
    ("outputs", "labels", "array", "code"),
    [
        ("scores:FP32:3,36,64", "background road car", np.full((3, 36, 64), np.nan), "not_finite"),
        ("scores:FP32:3,36,64", "background road car", np.zeros((3, 18, 64)), "shape"),
        ("p:FP32:3", "sun rain snow", np.array((0.2, np.inf, 0.1)), "not_finite"),
        ("p:FP32:-1", "sun rain snow", np.zeros(4), "class"),
        (YOLO, "car person", np.ones((6, 10**6)), "too_many"),
        (YOLO, "car person", np.full((6, 3), np.nan), "not_finite"),
        (YOLO, "car person", np.zeros((7, 3)), "shape"),
        ("o:FP32:-1,7", "car person", np.ones((10**6, 7)), "too_many"),
        ("dets:FP32:-1,6", "", np.ones((10**6, 6)), "too_many"),
        ("dets:FP32:-1,6", "", np.array([[16, 9, 32, 18, 0.9, -1]]), "class"),
        ("dets:FP32:-1,6", "", np.array([[70, 9, 80, 18, 0.9, 1]]), "outside"),
    ],
)
def test_each_contract_names_what_breaks_it(
    outputs: str, labels: str, array: np.ndarray[tuple[int, ...], np.dtype[np.float64]], code: str
) -> None:
    contract = Contract.of(config(outputs, labels))
    with pytest.raises(BadOutput) as raised:
        contract.result({outputs.partition(":")[0]: array.astype(np.float32)}, VIEW)
    assert raised.value.code == code


@pytest.mark.parametrize(
    ("points", "scores", "code"),
    [
        (np.full((2, 72, 2), np.nan), np.ones(2), "not_finite"),
        (np.ones((2, 72, 2)), np.array((0.9, np.inf)), "not_finite"),
        (np.ones((2, 72, 2)), np.ones(3), "shape"),
        (np.ones((2, 71, 2)), np.ones(2), "shape"),
    ],
)
def test_lanes_of_another_shape_or_without_numbers_are_none(
    points: np.ndarray[tuple[int, ...], np.dtype[np.float64]],
    scores: np.ndarray[tuple[int, ...], np.dtype[np.float64]],
    code: str,
) -> None:
    tensors = {"lane_points": points.astype(np.float32), "lane_scores": scores.astype(np.float32)}
    with pytest.raises(BadOutput) as raised:
        Contract.of(config(LANES)).result(tensors, VIEW)
    assert raised.value.code == code


def test_a_mask_of_too_many_runs_is_none() -> None:
    view = VIEW._replace(network=(1280, 720))
    cells = np.arange(720 * 1280).reshape(720, 1280) % 2
    with pytest.raises(BadOutput, match="too_many: the mask has 921600 runs, and 200000 can be"):
        Contract.of(config("mask:INT64:-1,-1")).result({"mask": cells}, view)


def test_a_map_of_probabilities_has_two_classes() -> None:
    contract = Contract.of(config("text:FP32:1,36,64", "background text", score_threshold="0.3"))
    scores = np.zeros((1, 36, 64), np.float32)
    scores[0, 3:6, 10:20] = 0.3
    found = contract.result({"text": scores}, VIEW)
    assert isinstance(found, Segmentation)
    assert found.run_lengths[found.run_classes == 1].tolist() == [10, 10, 10]
    scores[0, 0, 0] = 7.0
    with pytest.raises(BadOutput, match="score: probabilities are 0 to 7, and can be 0 to 1"):
        contract.result({"text": scores}, VIEW)
    with pytest.raises(ModelConfigError, match="no outputs of the contract segmentation"):
        Contract.of(config("text:FP32:1,36,64", "text", task="segmentation"))


def test_classes_come_with_the_best_first() -> None:
    contract = Contract.of(config("p:FP32:3", "sun rain snow", top_k="2", scores="prob"))
    found = contract.result({"p": np.array([0.2, 0.7, 0.1], np.float32)}, VIEW)
    assert isinstance(found, Classification)
    assert [(each, round(score, 3)) for each, score in found.classes] == [(1, 0.7), (0, 0.2)]
    with pytest.raises(BadOutput, match=r"shape: output 'p' has \[4\], not \[3\]"):
        contract.result({"p": np.zeros(4, np.float32)}, VIEW)


def test_anything_else_is_names_and_shapes() -> None:
    found = Contract.of(config("a:FP32:-1 b:INT64:2,2")).result(
        {"a": np.zeros(5, np.float32), "b": np.zeros((2, 2), np.int64)}, VIEW
    )
    assert found == TensorList([("a", "FP32", (5,)), ("b", "INT64", (2, 2))])


def test_a_model_of_another_contract_may_not_follow() -> None:
    check_replacement(config(SSD), config(DETR))
    with pytest.raises(ModelConfigError, match=r"segmentation, and its predecessor detection"):
        check_replacement(config(SSD), config("mask:INT64:36,64"))
