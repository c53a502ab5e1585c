"""Six networks on one camera of a real daemon: MQTT, the stream, metrics, check and states.

The networks are made here with onnx: their outputs are constants, whatever they see.
"""

from __future__ import annotations

import json
import queue
import re
from pathlib import Path
from typing import TYPE_CHECKING, Any

import grpc
import numpy as np
import onnx
import pytest
from integration.test_mqtt_publisher import listening
from onnx import TensorProto, helper, numpy_helper
from support.daemon_process import Process
from support.lane_stubs import SEED, write_calibration
from support.mosquitto import Mosquitto, mosquitto_binary
from support.verb import ANY_PORTS, run_verb
from support.waiting import wait_until

from edge_server.mqtt.payloads import Topics
from edge_server.proto.edge.lanes.v1 import lane_service_pb2
from edge_server.proto.edge.perception.v1 import perception_pb2 as pb

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from integration.test_mqtt_publisher import Received

MODELS = Path(__file__).parents[2] / "models"
DOC = MODELS.parent / "docs/networks.md"
WAIT_S = 30.0
# One box, in shares of what the network sees.
BOXES = {
    "boxes": np.array([[[0.5, 0.25, 0.75, 0.5]]], np.float32),
    "scores": np.array([[0.9]], np.float32),
    "classes": np.array([[1]], np.float32),
}
MASK = {"mask": np.repeat(np.arange(2), 18).reshape(1, 36, 1).repeat(64, 2)}


def write_onnx(path: Path, image: tuple[str, list[int]], outputs: dict[str, Any]) -> None:
    """Write a network with constant outputs."""
    nodes, values = [], []
    for output, array in outputs.items():
        nodes.append(
            helper.make_node(
                "Constant", [], [f"{output}_c"], value=numpy_helper.from_array(array, output)
            )
        )
        # An input that nothing reads would be no input.
        nodes.append(helper.make_node("Size", [image[0]], [f"{output}_n"]))
        nodes.append(helper.make_node("Mul", [f"{output}_n", "zero"], [f"{output}_0"]))
        kind = helper.np_dtype_to_tensor_dtype(array.dtype)
        nodes.append(helper.make_node("Cast", [f"{output}_0"], [f"{output}_z"], to=kind))
        nodes.append(helper.make_node("Add", [f"{output}_c", f"{output}_z"], [output]))
        values.append(helper.make_tensor_value_info(output, kind, array.shape))
    zero = numpy_helper.from_array(np.array(0, np.int64), "zero")
    taken = helper.make_tensor_value_info(image[0], TensorProto.FLOAT, image[1])
    graph = helper.make_graph(nodes, "constant", [taken], values, [zero])
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8)
    path.parent.mkdir(parents=True, exist_ok=True)
    onnx.save(model, path)


def write_network(repository: Path, name: str, outputs: dict[str, Any], labels: str = "") -> None:
    """Write a network with constant outputs, and the ensemble that shows it frames."""
    declared, maps = "", ""
    for output, array in outputs.items():
        kind = helper.np_dtype_to_tensor_dtype(array.dtype)
        word = {TensorProto.FLOAT: "FP32", TensorProto.INT64: "INT64"}[kind]
        file = 'label_filename: "labels.txt"' if labels else ""
        dims = list(array.shape[1:])
        declared += f'output {{ name: "{output}" data_type: TYPE_{word} dims: {dims} {file} }}\n'
        maps += f'output_map {{ key: "{output}" value: "{output}" }} '
    folder = repository / f"{name}_net" / "1"
    write_onnx(folder / "model.onnx", ("x", [1, 3, 36, 64]), outputs)
    if labels:
        (folder.parent / "labels.txt").write_text("\n".join(labels.split()))
    (folder.parent / "config.pbtxt").write_text(
        f'name: "{name}_net" platform: "onnxruntime_onnx" max_batch_size: 1 '
        f'input {{ name: "x" data_type: TYPE_FP32 dims: [3, 36, 64] }}\n{declared}'
    )
    ensemble = repository / name
    (ensemble / "1").mkdir(parents=True)
    declared = declared.replace('label_filename: "labels.txt"', "")
    (ensemble / "config.pbtxt").write_text(
        f'name: "{name}" platform: "ensemble" max_batch_size: 1 '
        f'input {{ name: "image" data_type: TYPE_UINT8 dims: [-1, -1, -1] }}\n{declared}'
        "ensemble_scheduling { step { "
        'model_name: "small_frames" model_version: -1 '
        'input_map { key: "image" value: "image" } output_map { key: "x" value: "x" } } '
        f'step {{ model_name: "{name}_net" model_version: -1 '
        f'input_map {{ key: "x" value: "x" }} {maps} }} }}'
    )


def write_configs(repository: Path, *prefixes: str) -> None:
    """Write the configurations of docs/networks.md of models with such names."""
    for name, config in re.findall(
        r"```protobuf\n# (\w+)/config.pbtxt(.*?)```", DOC.read_text(), re.DOTALL
    ):
        if name.startswith(prefixes):
            (repository / name / "1").mkdir(parents=True)
            (repository / name / "config.pbtxt").write_text(f"#{config}")


def write_example(repository: Path) -> None:
    """Write the models of docs/networks.md, with a network that gives one car, whatever it sees."""
    write_configs(repository, "yolo", "objects")
    labels = ["person", "bicycle", "car", *(f"class {n}" for n in range(77))]
    (repository / "yolo_net" / "labels.txt").write_text("\n".join(labels))
    output = np.zeros((1, 84, 8400), np.float32)
    output[0, [0, 1, 2, 3, 6], 4000] = 320, 480, 64, 64, 0.81
    write_onnx(
        repository / "yolo_net/1/model.onnx", ("images", [1, 3, 640, 640]), {"output0": output}
    )


def write_repository(folder: Path) -> Path:
    repository = folder / "models"
    (repository / "small_frames" / "1").mkdir(parents=True)
    (repository / "small_frames" / "config.pbtxt").write_text(
        'name: "small_frames" backend: "image_preprocess" max_batch_size: 1 '
        'input { name: "image" data_type: TYPE_UINT8 dims: [-1, -1, -1] } '
        'output { name: "x" data_type: TYPE_FP32 dims: [3, 36, 64] } '
        'parameters { key: "pixel_format" value { string_value: "any" } }'
    )
    write_network(repository, "signs", BOXES, "stop yield")
    write_network(
        repository, "broken", {**BOXES, "classes": np.array([[7]], np.float32)}, "one two"
    )
    write_network(repository, "surface", MASK, "background road")
    write_example(repository)
    write_network(repository, "features", {"f": np.zeros((1, 8), np.float32)})
    return repository


def settings(folder: Path, repository: Path, broker: Mosquitto) -> Path:
    write_calibration(folder / "road.calibration.toml")
    path = folder / "settings.toml"
    path.write_text(
        f"""
        [repository]
        paths = ["{MODELS}", "{repository}"]
        [device]
        id = "truck-7"
        [mqtt]
        host = "{broker.host}"
        port = {broker.port}
        [cameras.road]
        uri = "synthetic://road?seed={SEED}&fps=5"
        calibration = "{folder / "road.calibration.toml"}"
        max_age_ms = 1000
        [cameras.road.networks.signs]
        model = "signs"
        region = "road"
        priority = 2
        deadline_ms = 5000
        [cameras.road.networks.broken]
        model = "broken"
        deadline_ms = 5000
        [cameras.road.networks.surface]
        model = "surface"
        region = "0,360,1280,360"
        deadline_ms = 5000
        [cameras.road.networks.objects]
        model = "objects"
        max_hz = 1
        deadline_ms = 5000
        [cameras.road.networks.features]
        model = "features"
        max_hz = 2
        deadline_ms = 5000
        [cameras.rear]
        uri = "synthetic://road?seed={SEED}&fps=2"
        calibration = "{folder / "road.calibration.toml"}"
        model = ""
        [cameras.rear.networks.signs]
        model = "signs"
        deadline_ms = 5000
        """
    )
    return path


@pytest.fixture(scope="module")
def broker(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Mosquitto]:
    if not mosquitto_binary():
        pytest.skip("no mosquitto on this machine: apt install mosquitto")
    made = Mosquitto(tmp_path_factory.mktemp("broker"))
    made.start()
    yield made
    made.kill()


@pytest.fixture(scope="module")
def config(tmp_path_factory: pytest.TempPathFactory, broker: Mosquitto) -> Path:
    folder = tmp_path_factory.mktemp("networks")
    return settings(folder, write_repository(folder), broker)


@pytest.fixture(scope="module")
def daemon(config: Path) -> Iterator[Process]:
    process = Process(config.parent, f"--config={config}")
    try:
        process.wait_for("READY=1")
        yield process
    finally:
        process.close()


def heard(inbox: Received, topic: str, fits: Callable[[Any], bool]) -> Any:
    """The first message that fits: those of frames that were late on a busy machine do not."""
    said = inbox.wait_for(lambda m: m.topic == topic and fits(json.loads(m.payload or b"{}")))
    return json.loads(said.payload)


def test_check_tells_the_contract_of_each_network(config: Path) -> None:
    run = run_verb("check", f"--config={config}", *ANY_PORTS)
    assert run.returncode == 0, run.stderr
    for network, task in (("signs", "detection"), ("surface", "segmentation")):
        assert f"camera road: network {network}: {network} gives {task}" in run.stdout
    text = config.read_text().replace('region = "road"', 'region = "9,9,9999,9"')
    wrong = config.with_name("wrong.toml")
    wrong.write_text(text)
    run = run_verb("check", f"--config={wrong}", *ANY_PORTS)
    assert run.returncode == 78
    assert (
        'cameras.road.networks.signs: region = "9,9,9999,9" is not in the picture of 1280 x 720 px'
        in run.stderr + run.stdout
    )


def test_boxes_reach_a_subscriber_with_the_times_of_their_frame(
    daemon: Process, broker: Mosquitto
) -> None:
    topics = Topics("truck-7")
    with listening(broker, "edge/v1/truck-7/cameras/#") as inbox:
        signs = heard(inbox, topics.network("road", "signs"), lambda m: "detections" in m)
        lanes = inbox.wait_for(
            lambda each: (
                each.topic == topics.lanes("road")
                and json.loads(each.payload)["frame_id"] >= signs["frame_id"]
            )
        )
        surface = heard(inbox, topics.network("road", "surface"), lambda m: "segmentation" in m)
        features = heard(inbox, topics.network("road", "features"), lambda m: "tensors" in m)
        objects = heard(inbox, topics.network("road", "objects"), lambda m: "detections" in m)
        broken = heard(
            inbox, topics.network("road", "broken"), lambda m: "class: " in str(m.get("reasons"))
        )
        heard(
            inbox,
            topics.camera_status("road"),
            lambda m: (
                (found := m.get("networks", {})).get("broken", {}).get("state") == "failing"
                and found["signs"] == {"state": "ok", "text": ""}
            ),
        )
    assert (signs["schema"], signs["task"]) == ("edge.perception/1", "TASK_DETECTION")
    assert signs["boot_id"] == json.loads(lanes.payload)["boot_id"]
    (sign,) = signs["detections"]
    assert (sign["label"], sign["confidence"]) == ("yield", 0.9)
    # Half of what is below the horizon.
    horizon = 2 * sign["box"]["y_min"] - 720
    assert 200 < horizon < 460
    assert sign["box"]["y_max"] == pytest.approx(horizon + 0.75 * (720 - horizon), abs=0.2)
    assert (sign["box"]["x_min"], sign["box"]["x_max"]) == (320, 640)
    assert sign["ground"]["x_m"] > 0
    assert surface["segmentation"]["region"] == {
        "x_min": 0, "y_min": 360, "x_max": 1280, "y_max": 720
    }  # fmt: skip
    assert surface["segmentation"]["run_lengths"] == [18 * 64, 18 * 64]
    assert features["tensors"] == [{"name": "f", "datatype": "FP32", "shape": [8]}]
    (car,) = objects["detections"]
    assert (car["label"], car["confidence"]) == ("car", 0.81)
    assert car["box"] == {"x_min": 576, "y_min": 504, "x_max": 704, "y_max": 576}
    assert car["ground"]["y_m"] == pytest.approx(0, abs=0.1)
    assert (broken["status"], "detections" in broken) == ("FRAME_STATUS_INVALID", False)
    assert "class: classes are 7 to 7, and 2 have labels" in broken["reasons"][0]


def test_a_stream_of_networks_has_a_window(daemon: Process) -> None:
    with grpc.insecure_channel(f"127.0.0.1:{daemon.port}") as channel:
        call = channel.stream_stream(
            "/edge.perception.v1.PerceptionService/StreamNetworks",
            pb.StreamNetworksRequest.SerializeToString,
            pb.StreamNetworksResponse.FromString,
        )
        requests: queue.SimpleQueue[Any] = queue.SimpleQueue()
        requests.put(pb.StreamNetworksRequest(networks=["road/signs"], window=1))
        stream = call(iter(requests.get, None), timeout=WAIT_S)
        numbers = []
        for response in stream:
            numbers.append(response.frame.frame_id)
            assert response.frame.network == "signs"
            requests.put(pb.StreamNetworksRequest(acknowledged=response.sequence))
            if len(numbers) == 3:
                break
        stream.cancel()
        requests.put(None)
        assert numbers == sorted(set(numbers))
        with pytest.raises(grpc.RpcError) as raised:
            next(call(iter([pb.StreamNetworksRequest(networks=["road/signals"])]), timeout=WAIT_S))
        assert raised.value.code() is grpc.StatusCode.NOT_FOUND
        assert (
            "there are: road/signs, road/broken, road/surface, road/obj" in raised.value.details()
        )


def test_a_camera_without_lanes_has_networks_alone(daemon: Process, broker: Mosquitto) -> None:
    topics = Topics("truck-7")
    with listening(broker, "edge/v1/truck-7/#") as inbox:
        sign = heard(inbox, topics.network("rear", "signs"), lambda m: "detections" in m)
        # The retained state may be the one before the camera's first frame.
        well = {"state": "ok", "networks": {"signs": {"state": "ok", "text": ""}}}
        status = heard(inbox, topics.camera_status("rear"), lambda m: well.items() <= m.items())
        heard(inbox, topics.status, lambda m: m.get("no_lanes") == [])
        inbox.wait_for(lambda each: each.topic == topics.lanes("road"))
        assert inbox.matching(lambda each: each.topic == topics.lanes("rear")) == []
    assert sign["detections"][0]["ground"]["x_m"] > 0
    assert sign["calib_id"]
    assert "lanes" not in status
    with grpc.insecure_channel(f"127.0.0.1:{daemon.port}") as channel:
        call = channel.stream_stream(
            "/edge.lanes.v1.LaneService/StreamLanes",
            lane_service_pb2.StreamLanesRequest.SerializeToString,
            lane_service_pb2.StreamLanesResponse.FromString,
        )
        with pytest.raises(grpc.RpcError) as raised:
            next(
                call(iter([lane_service_pb2.StreamLanesRequest(cameras=["rear"])]), timeout=WAIT_S)
            )
    assert "no camera 'rear' with lanes is in the settings; there are: road" in str(raised.value)

    def with_lanes() -> str:
        found = daemon.metrics()
        return found if 'edge_camera_lanes_ok{camera="road"} 1' in found else ""

    metrics = wait_until(with_lanes)
    assert 'edge_camera_up{camera="rear"} 1' in metrics
    for name in ("edge_camera_lanes_ok", "edge_camera_last_lanes_age_seconds", "edge_lanes"):
        assert f'{name}{{camera="rear"}}' not in metrics


def test_numbers_of_each_network_are_metrics(daemon: Process) -> None:
    def has(text: str) -> bool:
        return any(line.startswith(text) for line in daemon.metrics().splitlines())

    for line in (
        'edge_network_ok{camera="road",network="signs"} 1',
        'edge_network_ok{camera="road",network="broken"} 0',
        'edge_network_frames_total{camera="road",network="broken"} 0',
        'edge_network_missed_total{camera="road",network="broken",reason="class"}',
    ):
        wait_until(lambda line=line: has(line), otherwise=daemon.metrics)
