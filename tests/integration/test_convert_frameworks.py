"""Models of the real frameworks are converted, served, and converted on; see
`support.framework_pythons`."""

from __future__ import annotations

import importlib.util
import os
import subprocess
from typing import TYPE_CHECKING, Any

import numpy as np
import onnxruntime as ort
import pytest
import tritonclient.grpc as triton
from support.framework_pythons import ROOT, python_with
from support.verb import run_verb
from support.waiting import wait_until

from edge_server.cli.main import run_command
from edge_server.tools.convert.formats import (
    OPENVINO,
    PADDLE,
    TENSORFLOW,
    TORCH,
    FrameworkPackages,
)

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from support.polling_server import Server

pytestmark = pytest.mark.long

SIZE = (32, 48)
TOLERANCE = 1e-5

KERAS = """
import sys, keras
from keras import layers
keras.utils.set_random_seed(3)
images = keras.Input((32, 48, 3), name="images")
y = layers.Conv2D(4, 3, strides=2, activation="relu", padding="same")(images)
lanes = layers.Dense(5, name="lanes")(layers.Flatten()(y))
model = keras.Model(images, lanes)
model.save(sys.argv[1] + "/net.keras")
model.save(sys.argv[1] + "/net.h5")
model.export(sys.argv[1] + "/saved", verbose=False)
doubled = layers.Lambda(lambda tensor: tensor * 2)(images)
keras.Model(images, doubled).save(sys.argv[1] + "/lambda.keras")
"""
# Its loops are functions of the graph.
RECURRENT = """
import sys, keras
from keras import layers
series = keras.Input((12, 6), name="series")
y = layers.Dense(3, name="y")(layers.Bidirectional(layers.LSTM(8))(series))
keras.Model(series, y).save(sys.argv[1] + "/series.keras")
"""
# As Triton's own examples: names in upper case; and variables of TensorFlow 1.
UPPER_CASE = """
import sys, numpy as np, tensorflow as tf
v1 = tf.compat.v1
folder = sys.argv[1]
spec = [tf.TensorSpec([None, 4], tf.float32, name=name) for name in ("INPUT0", "INPUT1")]
module = tf.Module()
module.weight = tf.Variable(np.arange(4, dtype=np.float32))
@tf.function(input_signature=spec)
def call(INPUT0, INPUT1):
    return {"OUTPUT0": INPUT0 * module.weight + INPUT1, "OUTPUT1": INPUT0 - INPUT1}
tf.saved_model.save(module, folder + "/two", {"serving_default": call})
with v1.Session(graph=tf.Graph()) as session:
    one, other = (v1.placeholder(tf.float32, [None, 4], name=name) for name in ("INPUT0", "b"))
    weight = v1.get_variable(
        "weight", initializer=np.arange(4, dtype=np.float32), use_resource=False
    )
    outputs = {
        "OUTPUT0": tf.add(one * weight, other, name="scaled"),
        "OUTPUT1": tf.subtract(one, other, name="OUTPUT0"),
    }
    session.run(v1.global_variables_initializer())
    v1.saved_model.simple_save(
        session, folder + "/one", {"INPUT0": one, "INPUT1": other}, outputs
    )
    v1.train.Saver().save(session, folder + "/trained")
"""
NET = """
import torch
class SmallNet(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.conv = torch.nn.Conv2d(3, 4, 3, stride=2, padding=1)
        self.fc = torch.nn.Linear(4 * 16 * 24, 5)
    def forward(self, images):
        return self.fc(torch.relu(self.conv(images)).flatten(1))
"""
TORCH_FILES = """
import sys, torch
folder = sys.argv[1]
sys.path.insert(0, folder)
from small_net import SmallNet
torch.manual_seed(1)
net = SmallNet().eval()
torch.jit.script(net).save(folder + "/net.pt")
torch.save(net, folder + "/module.pth")
torch.save({"state_dict": net.state_dict(), "epoch": 3}, folder + "/weights.pth")
shapes = ({0: torch.export.Dim.DYNAMIC},)
program = torch.export.export(net, (torch.zeros(2, 3, 32, 48),), dynamic_shapes=shapes)
torch.export.save(program, folder + "/net.pt2")
"""
WIDE_NET = """
import torch
class WideNet(torch.nn.Module):
    def __init__(self, inputs, hidden, classes):
        super().__init__()
        self.conv = torch.nn.Conv2d(inputs, hidden, 3, padding=1)
        self.fc = torch.nn.Linear(hidden, classes)
    def forward(self, image):
        return self.fc(torch.relu(self.conv(image)).mean(dim=2).permute(0, 2, 1))
"""
PARALLEL_FILE = """
import sys, torch
sys.path.insert(0, sys.argv[1])
from wide_net import WideNet
torch.manual_seed(1)
state = torch.nn.DataParallel(WideNet(1, 8, 37)).state_dict()
torch.save(state, sys.argv[1] + "/parallel.pth")
"""
PADDLE_FILES = """
import sys, paddle
from paddle.static import InputSpec
paddle.seed(1)
class Net(paddle.nn.Layer):
    def __init__(self):
        super().__init__()
        self.conv = paddle.nn.Conv2D(3, 4, 3, stride=2, padding=1)
        self.fc = paddle.nn.Linear(4 * 16 * 24, 5)
    def forward(self, images):
        return self.fc(paddle.nn.functional.relu(self.conv(images)).flatten(1))
net = Net()
net.eval()
spec = [InputSpec([None, 3, 32, 48], "float32", "images")]
paddle.jit.save(net, sys.argv[1] + "/paddle/inference", input_spec=spec)
"""


def make(framework: FrameworkPackages, script: str, folder: Path) -> Path:
    python = python_with(framework)
    # A file: Paddle reads the source of what it translates.
    (folder / "make.py").write_text(script)
    subprocess.run([python, folder / "make.py", folder], check=True, capture_output=True)
    return python


def convert(*arguments: object) -> int:
    return run_command(["convert", *map(str, arguments)])


def ask(server: Server, model: str, images: np.ndarray, output: str = "lanes") -> np.ndarray:
    tensor = triton.InferInput("images", images.shape, "FP32")
    tensor.set_data_from_numpy(images)
    found: Any = server.client.infer(model, [tensor]).as_numpy(output)
    return np.asarray(found)


def test_keras_to_graphdef_served_to_onnx_served(
    tmp_path: Path, serve: Callable[..., Server], capsys: pytest.CaptureFixture[str]
) -> None:
    """The whole path of the source documents, with today's TensorFlow."""
    python = make(TENSORFLOW, KERAS, tmp_path)
    repository = tmp_path / "repository"
    graph, exchanged = repository / "graph", repository / "exchanged"
    with_python = ("--python", python)
    assert convert(tmp_path / "net.keras", graph, "--to", "graphdef", *with_python) == 0
    settings = tmp_path / "config.toml"
    settings.write_text(f'[python]\ninterpreters = {{ tensorflow = "{python}" }}\n')
    server = serve(f"--config={settings}")
    images = np.random.default_rng(4).random((2, *SIZE, 3), np.float32)
    native = ask(server, "graph", images)
    assert np.ptp(native) > 0.01
    # The daemon serves all the time, and takes the new model up.
    assert convert(graph, exchanged, *with_python) == 0
    until_ready(server, "exchanged")
    assert np.abs(ask(server, "exchanged", images) - native).max() < TOLERANCE
    # What Keras itself gives of the same images.
    script = (
        "import sys, keras, numpy as np; m = keras.saving.load_model(sys.argv[1]); "
        "np.save(sys.argv[3], m(np.load(sys.argv[2])))"
    )
    np.save(tmp_path / "images.npy", images)
    files = [str(tmp_path / name) for name in ("net.keras", "images.npy", "lanes.npy")]
    subprocess.run([python, "-c", script, *files], check=True, capture_output=True)
    assert np.abs(np.load(tmp_path / "lanes.npy") - native).max() < TOLERANCE


@pytest.mark.parametrize("source", ["net.keras", "net.h5", "saved"])
def test_keras_and_saved_models_become_onnx(source: str, tmp_path: Path, repository: Path) -> None:
    python = make(TENSORFLOW, KERAS, tmp_path)
    assert convert(tmp_path / source, repository / "net", "--python", python) == 0
    text = (repository / "net" / "config.pbtxt").read_text()
    assert 'name: "images" data_type: TYPE_FP32 dims: [ 32, 48, 3 ]' in text
    # Keras' own name, where the file still has it.
    assert f'name: "{"output_0" if source == "saved" else "lanes"}"' in text


@pytest.mark.parametrize("to", ["onnx", "graphdef"])
@pytest.mark.parametrize("source", ["one", "two"])
def test_names_in_upper_case_and_variables_of_tensorflow_1_are_kept(
    source: str, to: str, tmp_path: Path, repository: Path
) -> None:
    python = make(TENSORFLOW, UPPER_CASE, tmp_path)
    # That the outputs are those of the source, by name, is a part of converting.
    assert convert(tmp_path / source, repository / "net", "--to", to, "--python", python) == 0
    text = (repository / "net" / "config.pbtxt").read_text()
    for name in ("INPUT0", "INPUT1", "OUTPUT0", "OUTPUT1"):
        assert f'name: "{name}" data_type: TYPE_FP32 dims: [ 4 ]' in text


@pytest.mark.parametrize("to", ["onnx", "graphdef"])
def test_a_checkpoint_of_tensorflow_1_is_converted(
    to: str, tmp_path: Path, repository: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    python = make(TENSORFLOW, UPPER_CASE, tmp_path)
    source, model = tmp_path / "trained.meta", repository / "net"
    assert convert(source, model, "--to", to, "--python", python, "--outputs", "none") == 78
    assert "has no node none; give others with --outputs" in capsys.readouterr().err
    assert convert(source, model, "--to", to, "--python", python, "--outputs", "scaled") == 0
    text = (model / "config.pbtxt").read_text()
    for name in ("INPUT0", "b", "scaled"):
        assert f'name: "{name}" data_type: TYPE_FP32 dims: [ 4 ]' in text


def test_the_output_of_a_keras_graph_gets_a_name(tmp_path: Path, repository: Path) -> None:
    python = make(TENSORFLOW, KERAS, tmp_path)
    for name, flags in (("lanes", ()), ("predict_lanes", ("--outputs", "predict_lanes"))):
        for to in ("graphdef", "onnx"):
            model = repository / f"{name}_{to}"
            source = tmp_path / "net.keras"
            assert convert(source, model, "--to", to, "--python", python, *flags) == 0
            assert f'output [ {{ name: "{name}"' in (model / "config.pbtxt").read_text()


def test_a_recurrent_keras_network_becomes_onnx(tmp_path: Path, repository: Path) -> None:
    python = make(TENSORFLOW, RECURRENT, tmp_path)
    assert convert(tmp_path / "series.keras", repository / "net", "--python", python) == 0
    assert 'name: "series"' in (repository / "net" / "config.pbtxt").read_text()


def test_code_in_a_keras_file_runs_only_where_it_is_trusted(
    tmp_path: Path, repository: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    python = make(TENSORFLOW, KERAS, tmp_path)
    source = tmp_path / "lambda.keras"
    assert convert(source, repository / "net", "--python", python) == 78
    assert "--trust, if you know who wrote it" in capsys.readouterr().err
    assert list(repository.iterdir()) == []
    assert convert(source, repository / "net", "--python", python, "--trust") == 0


def test_every_file_of_pytorch_becomes_the_same_network(
    tmp_path: Path, repository: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "small_net.py").write_text(NET)
    python = make(TORCH, TORCH_FILES, tmp_path)
    shape = ("--input", "images:-1x3x32x48", "--outputs", "lanes")
    flags: dict[str, tuple[object, ...]] = {
        "net.pt": shape,
        "net.pt2": ("--outputs", "lanes"),
        "module.pth": (*shape, "--trust", "--module-path", tmp_path),
        "weights.pth": (*shape, "--module", f"{tmp_path}/small_net.py:SmallNet"),
    }
    images = np.random.default_rng(4).random((3, 3, *SIZE), np.float32)
    found = []
    for name, how in flags.items():
        target = repository / name.replace(".", "_")
        assert convert(tmp_path / name, target, "--python", python, *how) == 0
        session = ort.InferenceSession(str(target / "1" / "model.onnx"))
        found.append(session.run(["lanes"], {"images": images})[0])
    assert np.ptp(found[0]) > 0.01
    assert all(np.abs(each - found[0]).max() < TOLERANCE for each in found)
    capsys.readouterr()
    # A pickle is not loaded unless its user vouches for it.
    assert convert(tmp_path / "module.pth", repository / "no", "--python", python, *shape) == 78
    assert "--trust" in capsys.readouterr().err
    assert convert(tmp_path / "net.pt", repository / "no", "--python", python) == 78
    assert "--input images:-1x3x360x640" in capsys.readouterr().err


def test_a_checkpoint_gets_the_arguments_of_its_class_and_loses_a_prefix(
    tmp_path: Path, repository: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """As the text recognition of Triton's tutorial: a class with arguments, trained in parallel."""
    (tmp_path / "wide_net.py").write_text(WIDE_NET)
    python = make(TORCH, PARALLEL_FILE, tmp_path)
    command = [tmp_path / "parallel.pth", repository / "net", "--python", python]
    command += ["--module", f"{tmp_path}/wide_net.py:WideNet"]
    command += ["--input", "INPUT__0:-1x1x32x100", "--outputs", "OUTPUT__0"]
    assert convert(*command) == 78
    assert "--module-args gives the class its arguments" in capsys.readouterr().err
    assert convert(*command, "--module-args", "1,5,37") == 78
    assert "fc.weight [37, 8] (the class has [37, 5])" in capsys.readouterr().err
    assert convert(*command, "--module-args", '{"inputs": 1, "hidden": 8, "nothing": 3}') == 78
    assert "nothing" in capsys.readouterr().err
    assert convert(*command, "--module-args", "1,8,37") == 0
    assert "begin with 'module.', which was taken off" in capsys.readouterr().out


@pytest.mark.skipif(
    importlib.util.find_spec("tensorrt_rtx_bindings") is None, reason="TensorRT-RTX is not here"
)
def test_torch_becomes_a_plan_of_a_real_builder(
    tmp_path: Path, repository: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """TensorRT-RTX's builder needs no GPU; its plan runs on no Jetson (tests/rtx_as_tensorrt)."""
    (tmp_path / "small_net.py").write_text(NET)
    python = make(TORCH, TORCH_FILES, tmp_path)
    assert convert(tmp_path / "net.pt2", repository / "net", "--python", python) == 0
    recorded = tmp_path / "recorded"
    recorded.mkdir()
    for index in range(4):
        sample = np.random.default_rng(index).random((3, *SIZE), np.float32)
        np.save(recorded / f"{index}.npy", sample)
    int8 = ("--int8", "--calibration", recorded)
    assert convert(repository / "net", repository / "small", *int8) == 0
    paths = os.pathsep.join(map(str, (ROOT, ROOT / "tests" / "rtx_as_tensorrt")))
    environment = {**os.environ, "PYTHONPATH": paths, "XDG_STATE_HOME": str(tmp_path)}
    for name, flags in (("net", []), ("small", ["--strongly-typed"])):
        command = ["plan", "build", name, f"--model-repository={repository}", *flags]
        done = run_verb(*command, env=environment)
        assert done.returncode == 0, done.stderr
        assert (repository / name / "1" / "model.plan").stat().st_size > 1000


def test_paddle_becomes_onnx_without_installing_anything(tmp_path: Path, repository: Path) -> None:
    python = make(PADDLE, PADDLE_FILES, tmp_path)
    list_packages = [python, "-m", "pip", "list", "--format=freeze"]
    before = subprocess.run(list_packages, check=True, capture_output=True).stdout
    assert convert(tmp_path / "paddle", repository / "net", "--python", python) == 0
    after = subprocess.run(list_packages, check=True, capture_output=True).stdout
    assert before == after


def test_openvino_in_an_environment_of_its_own(
    repository: Path,
) -> None:
    source = ROOT / "models" / "laneDetect_model"
    how = ("--to", "openvino", "--python", str(python_with(OPENVINO)))
    assert convert(source, repository / "net", *how) == 0
    assert (repository / "net" / "1" / "model.bin").is_file()
    assert convert(source, repository / "again", *how, "--fp16", "--limit", "1e-2") == 0
    whole, half = (repository / name / "1" / "model.bin" for name in ("net", "again"))
    assert half.stat().st_size < 0.6 * whole.stat().st_size


def until_ready(server: Server, model: str) -> None:
    wait_until(lambda: server.client.is_model_ready(model), 60, otherwise=lambda: server.log)
