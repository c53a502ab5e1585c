"""The networks of the tests: weights, configurations, and ONNX, which every framework is held to.

Imported by the makers too, in Pythons that have numpy and one framework.
"""

from __future__ import annotations

import sys
from pathlib import Path

import numpy as np

NET_SHAPE = (3, 24, 32)
LANE_SHAPE = (3, 360, 640)
LANE_ROWS, LANE_COLUMNS = 2784, 77
# Of one network in two frameworks, both in float32.
TOLERANCE = 1e-5


def net_weights() -> list[np.ndarray]:
    """Of `net`: y = relu(convolution of x), of any height and width."""
    random = np.random.default_rng(1)
    return [random.normal(0, 0.2, (4, 3, 3, 3)).astype("f"), random.normal(0, 0.2, 4).astype("f")]


def lane_weights() -> list[np.ndarray]:
    """Of the lane model's twin: three convolutions of stride 2, a mean, two layers."""
    random = np.random.default_rng(2)
    shapes = [(8, 3, 3, 3), (8,), (16, 8, 3, 3), (16,), (16, 16, 3, 3), (16,)]
    shapes += [(16, 8), (8,), (8, LANE_ROWS * LANE_COLUMNS), (LANE_ROWS * LANE_COLUMNS,)]
    return [random.normal(0, 0.1, shape).astype("f") for shape in shapes]


def config(x: str, y: str, *, more: str = "", shape: str = "[ 3, -1, -1 ]") -> str:
    """A whole configuration of `net`, for two instances that batch."""
    return (
        f'max_batch_size: 8 input {{ name: "{x}" data_type: TYPE_FP32 dims: {shape} }} '
        f'output {{ name: "{y}" data_type: TYPE_FP32 dims: [ 4, -1, -1 ] }} '
        "dynamic_batching { max_queue_delay_microseconds: 30000 } "
        f"instance_group {{ kind: KIND_CPU count: 2 }} {more}"
    )


def lane_config(x: str, y: str, more: str = "") -> str:
    return (
        f'max_batch_size: 2 input {{ name: "{x}" data_type: TYPE_FP32 dims: [ 3, 360, 640 ] }} '
        f'output {{ name: "{y}" data_type: TYPE_FP32 dims: [ {LANE_ROWS}, {LANE_COLUMNS} ] }} '
        f"{more}"
    )


def place(name: str, configuration: str, file: str) -> Path:
    """Where a maker puts its file of model `name`, in the repository that it was called with; a
    name with a folder is in a repository of its own beside it."""
    repository = Path(sys.argv[1])
    model = (repository.parent if "/" in name else repository) / name
    (model / "1").mkdir(parents=True)
    if configuration:
        (model / "config.pbtxt").write_text(configuration)
    return model / "1" / file


# As Triton's documentation and tutorials have them, word for word.
EXAMPLES = {
    "tutorial_pytorch/resnet50": """
name: "resnet50"
platform: "pytorch_libtorch"
max_batch_size : 0
input [
  {
    name: "input__0"
    data_type: TYPE_FP32
    dims: [ 3, 224, 224 ]
    reshape { shape: [ 1, 3, 224, 224 ] }
  }
]
output [
  {
    name: "output__0"
    data_type: TYPE_FP32
    dims: [ 1, 1000 ,1, 1]
    reshape { shape: [ 1, 1000 ] }
  }
]
""",
    "resnet_torchscript": """name: "resnet_torchscript"
platform: "pytorch_libtorch"
max_batch_size: 32
input [
  {
    name: "input__0"
    data_type: TYPE_FP32
    format: FORMAT_NCHW
    dims: [3,224,224 ]
  }
]
output [
  {
    name: "output__0"
    data_type: TYPE_FP32
    dims: [ 1000 ]
    label_filename: "resnet_labels.txt"
  }
]
""",
    "tutorial_tensorflow/resnet50": """name: "resnet50"
platform: "tensorflow_savedmodel"
max_batch_size : 0
input [
  {
    name: "input_1"
    data_type: TYPE_FP32
    dims: [-1, 224, 224, 3 ]
  }
]
output [
  {
    name: "predictions"
    data_type: TYPE_FP32
    dims: [-1, 1000]
  }
]
""",
    "simple_identity": """
name: "simple_identity"
platform: "tensorflow_savedmodel"
max_batch_size: 8

input [
  {
    name: "INPUT0"
    data_type: TYPE_STRING
    dims: [ -1 ]
  }
]
output [
  {
    name: "OUTPUT0"
    data_type: TYPE_STRING
    dims: [ -1 ]
  }
]
""",
    "simple_string": """
name: "simple_string"
platform: "tensorflow_graphdef"
max_batch_size: 8
input [
  {
    name: "INPUT0"
    data_type: TYPE_STRING
    dims: [ 16 ]
  },
  {
    name: "INPUT1"
    data_type: TYPE_STRING
    dims: [ 16 ]
  }
]
output [
  {
    name: "OUTPUT0"
    data_type: TYPE_STRING
    dims: [ 16 ]
  },
  {
    name: "OUTPUT1"
    data_type: TYPE_STRING
    dims: [ 16 ]
  }
]
""",
    "inception_graphdef": """name: "inception_graphdef"
platform: "tensorflow_graphdef"
max_batch_size: 128
input [
  {
    name: "input"
    data_type: TYPE_FP32
    format: FORMAT_NHWC
    dims: [ 299, 299, 3 ]
  }
]
output [
  {
    name: "InceptionV3/Predictions/Softmax"
    data_type: TYPE_FP32
    dims: [ 1001 ]
    label_filename: "inception_labels.txt"
  }
]
""",
}
