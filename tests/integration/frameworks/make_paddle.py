"""Makes the models of `networks` with Paddle: the newer format, and with an argument `old` the
older one."""

from __future__ import annotations

import sys
from typing import Any

import networks
import paddle
from paddle.nn import functional

old = sys.argv[2:] == ["old"]


def parameters(layer: Any, weights: list[Any]) -> list[Any]:
    """The weights as parameters of the layer, which alone are saved."""
    made = []
    for index, weight in enumerate(weights):
        value = paddle.nn.initializer.Assign(weight)
        made.append(layer.create_parameter(weight.shape, default_initializer=value))
        layer.add_parameter(f"w{index}", made[-1])
    return made


class Net(paddle.nn.Layer):
    def __init__(self) -> None:
        super().__init__()
        self.weight, self.bias = parameters(self, networks.net_weights())

    def forward(self, x: Any) -> Any:
        return functional.relu(functional.conv2d(x, self.weight, self.bias, padding=1))


class Lane(paddle.nn.Layer):
    def __init__(self) -> None:
        super().__init__()
        self.weights = parameters(self, networks.lane_weights())

    def forward(self, x: Any) -> Any:
        for at in (0, 2, 4):
            weight, bias = self.weights[at], self.weights[at + 1]
            x = functional.relu(functional.conv2d(x, weight, bias, stride=2, padding=1))
        x = functional.relu(x.mean([2, 3]) @ self.weights[6] + self.weights[7])
        made = x @ self.weights[8] + self.weights[9]
        return made.reshape([-1, networks.LANE_ROWS, networks.LANE_COLUMNS])


def save(layer: Any, name: str, shape: list[int | None], stem: str) -> None:
    path = networks.place(name, "", stem)
    layer.eval()
    spec = paddle.static.InputSpec([None, *shape], "float32", "x")
    paddle.jit.save(layer, str(path), input_spec=[spec])
    # The program alone knows what its output is called.
    suffix = ".pdmodel" if old else ".json"
    read = paddle.inference.Config(f"{path}{suffix}", f"{path}.pdiparams")
    (y,) = paddle.inference.create_predictor(read).get_output_names()
    make = networks.config if name == "net" else networks.lane_config
    config = f'backend: "paddle" {make("x", y)}'
    (path.parent.parent / "config.pbtxt").write_text(config)


if old:
    save(Lane(), "lane", list(networks.LANE_SHAPE), "model")
else:
    save(Net(), "net", [3, None, None], "inference")
