"""Triton's tutorial of ensembles: a picture's bytes in, the texts in it out. Python models decode,
crop and spell with packages and a Python of their own; the two networks are tiny."""

from __future__ import annotations

import subprocess
from typing import TYPE_CHECKING, Any

import cv2
import numpy as np
import onnx
import pytest
import tritonclient.grpc as triton
from onnx import TensorProto, helper, numpy_helper
from support.daemon_process import Process
from support.framework_pythons import python_with, pytorch
from support.verb import run_verb
from support.waiting import wait_until
from tritonclient.utils import InferenceServerException

from edge_server.tools.convert.formats import TORCH

if TYPE_CHECKING:
    from pathlib import Path

pytestmark = pytest.mark.long

# Environments of PyTorch are made: a minute or two, and a wheel of 200 MB.
TIMEOUT_S = 600
PREPROCESSING = """
import io
import numpy as np
import torch
import triton_python_backend_utils as pb_utils
from PIL import Image

class TritonPythonModel:
    def execute(self, requests):
        return [self.answer(request) for request in requests]

    def answer(self, request):
        data = pb_utils.get_input_tensor_by_name(request, "detection_preprocessing_input")
        image = Image.open(io.BytesIO(data.as_numpy().tobytes())).convert("RGB")
        side = min(image.size) // 32 * 32
        left, top = ((size - side) // 2 for size in image.size)
        pixels = torch.from_numpy(np.array(image.crop((left, top, left + side, top + side))))
        found = torch.unsqueeze(pixels, 0).to(torch.float32).numpy()
        tensor = pb_utils.Tensor("detection_preprocessing_output", found)
        return pb_utils.InferenceResponse([tensor])
"""
# It leaves files where it runs, as the tutorial's does.
POSTPROCESSING = """
import numpy as np
import triton_python_backend_utils as pb_utils
from PIL import Image

class TritonPythonModel:
    def execute(self, requests):
        return [self.answer(request) for request in requests]

    def answer(self, request):
        scores, geometry, frame = (
            pb_utils.get_input_tensor_by_name(
                request, f"detection_postprocessing_input_{number}"
            ).as_numpy()[0]
            for number in (1, 2, 3)
        )
        image = Image.fromarray(frame.astype(np.uint8)).convert("L")
        image.save("frame.png")
        boxes = []
        for y, x in np.argwhere(scores[..., 0] > 0.5):
            above, right, below, left, _ = geometry[y, x]
            box = (4 * x - left, 4 * y - above, 4 * x + right, 4 * y + below)
            if all(abs(box[0] - b[0]) > 20 or abs(box[1] - b[1]) > 20 for b in boxes):
                boxes.append(box)
        crops = [np.asarray(image.crop(box).resize((100, 32))) for box in boxes]
        found = (np.stack(crops)[:, np.newaxis] / 255.0 - 0.5) * 2
        np.save("tensor", found)
        name = "detection_postprocessing_output"
        return pb_utils.InferenceResponse([pb_utils.Tensor(name, found.astype(np.float32))])
"""
SPELLING = """
import numpy as np
import triton_python_backend_utils as pb_utils

ALPHABET = "-0123456789abcdefghijklmnopqrstuvwxyz"

class TritonPythonModel:
    def execute(self, requests):
        return [self.answer(request) for request in requests]

    def answer(self, request):
        name = "recognition_postprocessing_input"
        scores = pb_utils.get_input_tensor_by_name(request, name).as_numpy()
        texts = []
        for row in scores.argmax(2):
            kept = [c for i, c in enumerate(row) if c and not (i and c == row[i - 1])]
            texts.append("".join(ALPHABET[c] for c in kept))
        found = np.array(texts).astype(np.object_)
        tensor = pb_utils.Tensor("recognition_postprocessing_output", found)
        return pb_utils.InferenceResponse([tensor])
"""
CONFIGS = {
    "detection_preprocessing": """
input [{ name: "detection_preprocessing_input" data_type: TYPE_UINT8 dims: [ -1 ] }]
output [{ name: "detection_preprocessing_output" data_type: TYPE_FP32 dims: [ -1, -1, 3 ] }]
""",
    "detection_postprocessing": """
input [
  { name: "detection_postprocessing_input_1" data_type: TYPE_FP32 dims: [ -1, -1, 1 ] },
  { name: "detection_postprocessing_input_2" data_type: TYPE_FP32 dims: [ -1, -1, 5 ] },
  { name: "detection_postprocessing_input_3" data_type: TYPE_FP32 dims: [ -1, -1, 3 ] }
]
output [{ name: "detection_postprocessing_output" data_type: TYPE_FP32 dims: [ -1, -1, -1 ] }]
""",
    "recognition_postprocessing": """
input [{ name: "recognition_postprocessing_input" data_type: TYPE_FP32 dims: [ 26, 37 ] }]
output [{ name: "recognition_postprocessing_output" data_type: TYPE_STRING dims: [ -1 ] }]
""",
}
# Model, its inputs and its outputs, each with the tensor of the ensemble.
STEPS: tuple[tuple[str, dict[str, str], dict[str, str]], ...] = (
    (
        "detection_preprocessing",
        {"detection_preprocessing_input": "input_image"},
        {"detection_preprocessing_output": "preprocessed_image"},
    ),
    (
        "text_detection",
        {"input_images:0": "preprocessed_image"},
        {
            "feature_fusion/Conv_7/Sigmoid:0": "Sigmoid:0",
            "feature_fusion/concat_3:0": "concat_3:0",
        },
    ),
    (
        "detection_postprocessing",
        {
            "detection_postprocessing_input_1": "Sigmoid:0",
            "detection_postprocessing_input_2": "concat_3:0",
            "detection_postprocessing_input_3": "preprocessed_image",
        },
        {"detection_postprocessing_output": "cropped_images"},
    ),
    ("text_recognition", {"INPUT__0": "cropped_images"}, {"OUTPUT__0": "recognition_output"}),
    (
        "recognition_postprocessing",
        {"recognition_postprocessing_input": "recognition_output"},
        {"recognition_postprocessing_output": "recognized_text"},
    ),
)
RECOGNITION = """
import torch

class Recognition(torch.nn.Module):
    def __init__(self, inputs, hidden, classes):
        super().__init__()
        self.conv = torch.nn.Conv2d(inputs, hidden, (32, 25), stride=(32, 3))
        self.fc = torch.nn.Linear(hidden, classes)
    def forward(self, image):
        return self.fc(torch.tanh(self.conv(image)).squeeze(2).permute(0, 2, 1))
"""
CHECKPOINT = """
import sys, torch
sys.path.insert(0, sys.argv[1])
from recognition import Recognition
torch.manual_seed(7)
state = torch.nn.DataParallel(Recognition(1, 8, 37)).state_dict()
torch.save(state, sys.argv[1] + "/recognition.pth")
"""


def write_python_models(repository: Path, requirements: str) -> None:
    sources = {
        "detection_preprocessing": PREPROCESSING,
        "detection_postprocessing": POSTPROCESSING,
        "recognition_postprocessing": SPELLING,
    }
    for name, source in sources.items():
        version = repository / name / "1"
        version.mkdir(parents=True)
        (version / "model.py").write_text(source)
        head = f'name: "{name}"\nbackend: "python"\nmax_batch_size: 256\n'
        tail = "instance_group [{ kind: KIND_CPU }]\n"
        (repository / name / "config.pbtxt").write_text(head + CONFIGS[name] + tail)
        if name != "recognition_postprocessing":
            (version / "requirements.txt").write_text(requirements)


def write_ensemble(repository: Path) -> None:
    (repository / "ensemble_model" / "1").mkdir(parents=True)
    steps = []
    for model, inputs, outputs in STEPS:
        maps = [
            f'{kind} {{ key: "{key}" value: "{value}" }}'
            for kind, tensors in (("input_map", inputs), ("output_map", outputs))
            for key, value in tensors.items()
        ]
        steps.append(f'{{ model_name: "{model}" model_version: -1 {" ".join(maps)} }}')
    (repository / "ensemble_model" / "config.pbtxt").write_text(
        'name: "ensemble_model"\nplatform: "ensemble"\nmax_batch_size: 256\n'
        'input [{ name: "input_image" data_type: TYPE_UINT8 dims: [ -1 ] }]\n'
        'output [{ name: "recognized_text" data_type: TYPE_STRING dims: [ -1 ] }]\n'
        f"ensemble_scheduling {{ step [ {', '.join(steps)} ] }}\n"
    )


def write_detection(repository: Path) -> None:
    """Bright spots are texts, in boxes of 100 x 32 pixels."""
    weights = {
        "w": np.full((1, 3, 4, 4), 1 / (48 * 8), np.float32),
        "b": np.array([-16], np.float32),
        "gw": np.zeros((5, 3, 4, 4), np.float32),
        "gb": np.array([16, 50, 16, 50, 0], np.float32),
    }
    (image,), (score, geometry) = (list(tensors) for tensors in STEPS[1][1:])
    nodes = [
        helper.make_node("Transpose", [image], ["x"], perm=[0, 3, 1, 2]),
        helper.make_node("Conv", ["x", "w", "b"], ["logits"], strides=[4, 4]),
        helper.make_node("Sigmoid", ["logits"], ["scores"]),
        helper.make_node("Transpose", ["scores"], [score], perm=[0, 2, 3, 1]),
        helper.make_node("Conv", ["x", "gw", "gb"], ["distances"], strides=[4, 4]),
        helper.make_node("Transpose", ["distances"], [geometry], perm=[0, 2, 3, 1]),
    ]

    def tensor(name: str, channels: int) -> Any:
        shape = ["n", f"{name} h", f"{name} w", channels]
        return helper.make_tensor_value_info(name, TensorProto.FLOAT, shape)

    graph = helper.make_graph(
        nodes,
        "detection",
        [tensor(image, 3)],
        [tensor(score, 1), tensor(geometry, 5)],
        [numpy_helper.from_array(array, name) for name, array in weights.items()],
    )
    opset = [helper.make_opsetid("", 17)]
    (repository / "text_detection" / "1").mkdir(parents=True)
    (repository / "text_detection" / "config.pbtxt").write_text(
        'platform: "onnxruntime_onnx"\nmax_batch_size: 256\n'
    )
    onnx.save(
        helper.make_model(graph, opset_imports=opset, ir_version=8),
        repository / "text_detection" / "1" / "model.onnx",
    )


def infer(client: Any, model: str, inputs: dict[str, np.ndarray]) -> Any:
    given = []
    for name, array in inputs.items():
        given.append(triton.InferInput(name, array.shape, triton.np_to_triton_dtype(array.dtype)))
        given[-1].set_data_from_numpy(array)
    return client.infer(model, given)


def is_ready(process: Process, client: Any, model: str) -> bool:
    assert process.popen.poll() is None, process.log.read_text()
    try:
        return bool(client.is_model_ready(model))
    except InferenceServerException:
        return False  # it does not listen yet


@pytest.mark.timeout(TIMEOUT_S)
def test_the_tutorials_ensemble_serves_with_packages_and_a_python_of_its_own(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    state = tmp_path / "state"
    state.mkdir(mode=0o700)
    monkeypatch.setenv("STATE_DIRECTORY", str(state))
    repository = tmp_path / "models"
    made_with, torch = pytorch()
    python = tmp_path / "python" / "bin" / "python"
    subprocess.run([made_with, "-m", "venv", python.parents[1]], check=True)
    subprocess.run([python, "-m", "pip", "install", "--quiet", "msgspec", "numpy"], check=True)
    write_python_models(repository, "\n".join([*torch, "pillow"]))
    write_detection(repository)
    write_ensemble(repository)
    settings = tmp_path / "config.toml"
    settings.write_text(
        "[python.model_interpreters]\n"
        f'detection_preprocessing = "{python}"\ndetection_postprocessing = "{python}"\n'
    )

    # One command for each model.
    with_torch = python_with(TORCH)
    (tmp_path / "recognition.py").write_text(RECOGNITION)
    subprocess.run([with_torch, "-c", CHECKPOINT, tmp_path], check=True)
    converted = run_verb(
        *("convert", tmp_path / "recognition.pth", repository / "text_recognition"),
        *("--module", f"{tmp_path}/recognition.py:Recognition", "--module-args", "1,8,37"),
        *("--input", "INPUT__0:-1x1x32x100", "--outputs", "OUTPUT__0"),
        *("--max-batch", 256, "--python", with_torch),
    )
    assert converted.returncode == 0, converted.stderr
    for name in ("detection_preprocessing", "detection_postprocessing"):
        made = run_verb("models", "env", repository / name, "--config", settings)
        assert made.returncode == 0, made.stderr
    assert "is made of it already" in made.stdout

    process = Process(tmp_path, f"--config={settings}", f"--model-repository={repository}")
    try:
        client = triton.InferenceServerClient(f"127.0.0.1:{process.port}")
        wait_until(
            lambda: is_ready(process, client, "ensemble_model"),
            TIMEOUT_S,
            otherwise=process.log.read_text,
        )
        picture = np.zeros((128, 128, 3), np.uint8)
        for x, y in ((56, 24), (72, 96)):
            picture[y : y + 8, x : x + 8] = 255
        _, encoded = cv2.imencode(".jpg", picture)
        known = {"input_image": encoded.reshape(1, -1)}
        texts = infer(client, "ensemble_model", known).as_numpy("recognized_text")
        # What a client makes of the same models, one after the other.
        for model, inputs, outputs in STEPS:
            found = infer(client, model, {name: known[t] for name, t in inputs.items()})
            known |= {t: found.as_numpy(name) for name, t in outputs.items()}
        assert len(texts) == 2
        assert all(texts)
        assert texts.tolist() == known["recognized_text"].tolist()
        client.close()
    finally:
        process.close()
