"""Makes the models of `networks` with PyTorch: TorchScript, and one saved `torch.export`."""

from __future__ import annotations

import networks
import torch
from torch import nn
from torch.nn import functional


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight, self.bias = (nn.Parameter(torch.from_numpy(w)) for w in networks.net_weights())

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.relu(functional.conv2d(x, self.weight, self.bias, padding=1))


class Lane(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weights = nn.ParameterList(torch.from_numpy(w) for w in networks.lane_weights())

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for at in (0, 2, 4):
            weight, bias = self.weights[at], self.weights[at + 1]
            x = torch.relu(functional.conv2d(x, weight, bias, stride=2, padding=1))
        x = torch.relu(x.mean((2, 3)) @ self.weights[6] + self.weights[7])
        return (x @ self.weights[8] + self.weights[9]).reshape(
            -1, networks.LANE_ROWS, networks.LANE_COLUMNS
        )


class Texts(nn.Module):
    def forward(self, texts: list[str]) -> list[str]:
        return [text + "!" for text in texts]


class Classes(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x.mean((2, 3)) @ torch.ones(3, 1000)


net = Net().eval()
platform = 'platform: "pytorch_libtorch" '
torch.jit.script(net).save(
    networks.place("net", platform + networks.config("INPUT__0", "OUTPUT__0"), "model.pt")
)
lane = torch.jit.trace(Lane().eval(), torch.zeros(1, *networks.LANE_SHAPE))
lane.save(networks.place("lane", platform + networks.lane_config("x", "y"), "model.pt"))
texts = (
    'input { name: "texts" data_type: TYPE_STRING dims: -1 } '
    'output { name: "y" data_type: TYPE_STRING dims: -1 }'
)
torch.jit.script(Texts()).save(networks.place("texts", platform + texts, "model.pt"))
shapes = {0: torch.export.Dim("batch", min=1, max=64)}
exported = torch.export.export(
    net, (torch.zeros(2, *networks.NET_SHAPE),), dynamic_shapes=(shapes,)
)
torch.export.save(exported, networks.place("completed", "", "model.pt2"))
for name in ("tutorial_pytorch/resnet50", "resnet_torchscript"):
    path = networks.place(name, networks.EXAMPLES[name], "model.pt")
    torch.jit.script(Classes()).save(path)
    labels = "".join(f"class {number}\n" for number in range(1000))
    (path.parent.parent / "resnet_labels.txt").write_text(labels)
