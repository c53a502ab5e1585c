"""The trained network as an ONNX file that ONNX Runtime and TensorRT read without plugins."""

from __future__ import annotations

import copy
import itertools
import time
from typing import TYPE_CHECKING

import numpy as np
import onnx
import onnx.numpy_helper
import onnxruntime
import torch
from torch import Tensor, nn
from torch.nn.utils.fusion import fuse_conv_bn_eval

from edge_server.lanes.decode import (
    COLUMN_COUNT,
    FIRST_X_COLUMN,
    INPUT_WIDTH_PX,
    LENGTH_COLUMN,
    START_Y_COLUMN,
)
from lane_training.anchors import ANCHOR_COUNT, INPUT_HEIGHT_PX
from lane_training.labels import MaterialError
from lane_training.network import (
    HIDDEN,
    LENGTH_SCALE,
    OFFSET_SCALE_PX,
    POOLED_COLUMNS,
    POOLED_ROWS,
    LaneNetwork,
    StripContext,
)

if TYPE_CHECKING:
    from pathlib import Path

    from numpy.typing import NDArray

INPUT_NAME, OUTPUT_NAME = "input", "predict_lanes"
INPUT_SHAPE = (1, 3, INPUT_HEIGHT_PX, INPUT_WIDTH_PX)
OPSET = 13
# Largest difference to PyTorch that reordered float32 sums explain, in pixels or logits.
TOLERANCE = 2e-2
LATENCY_RUNS = 50


class ExportedNetwork(nn.Module):
    """`LaneNetwork` for one image with everything folded that training needs apart."""

    def __init__(self, network: LaneNetwork) -> None:
        super().__init__()
        self.trunk = copy.deepcopy(network).eval()
        for module in list(self.trunk.modules()):
            if isinstance(module, nn.Sequential):
                _fold_sequence(module)
            elif isinstance(module, StripContext):
                _fold_strip(module)
        _fold_fusion(self.trunk)
        self.pooling = nn.Parameter(network.interpolation.float())
        self.shape = nn.Parameter(network.anchor_shape.clone())
        scale = torch.cat(
            (torch.ones(2), torch.tensor([LENGTH_SCALE]), torch.full((72,), OFFSET_SCALE_PX))
        )
        weight, bias = torch.zeros(COLUMN_COUNT, HIDDEN), torch.zeros(COLUMN_COUNT)
        predicted = [*range(START_Y_COLUMN), *range(LENGTH_COLUMN, COLUMN_COUNT)]
        weight[predicted] = network.predict.weight.detach() * scale[:, None]
        bias[predicted] = network.predict.bias.detach() * scale
        self.weight = nn.Parameter(weight.T.contiguous())
        ones = torch.ones(ANCHOR_COUNT, 1)
        self.lines = nn.Parameter(torch.cat((network.anchor_lines, ones), 1))
        self.columns = nn.Parameter(torch.cat((network.anchor_columns, bias[None])))

    def forward(self, image: Tensor) -> Tensor:
        """As `LaneNetwork`, for (1, 3, 360, 640)."""
        trunk = self.trunk
        cells = trunk.features(image).permute(0, 2, 3, 1) @ trunk.row_weights
        cells = cells.reshape(1, POOLED_ROWS * POOLED_COLUMNS, HIDDEN)
        along_anchor = self.pooling @ cells
        hidden = torch.relu(along_anchor + trunk.shape_term(self.shape))
        return hidden @ self.weight + self.lines @ self.columns


def _scale_and_shift(norm: nn.BatchNorm2d) -> tuple[Tensor, Tensor]:
    assert norm.running_var is not None
    assert norm.running_mean is not None
    scale = norm.weight / torch.sqrt(norm.running_var + norm.eps)
    return scale.detach(), (norm.bias - norm.running_mean * scale).detach()


def _fold_sequence(sequence: nn.Sequential) -> None:
    """Normalisation right after a convolution, moved into it."""
    for place, (module, after) in enumerate(itertools.pairwise(list(sequence))):
        if isinstance(module, nn.Conv2d) and isinstance(after, nn.BatchNorm2d):
            sequence[place] = fuse_conv_bn_eval(module, after)
            sequence[place + 1] = nn.Identity()


def _fold_strip(strip: StripContext) -> None:
    """Normalisation of a sum of two convolutions, moved into both."""
    scale, shift = _scale_and_shift(strip.norm)
    with torch.no_grad():
        for convolution in (strip.across, strip.along):
            convolution.weight *= scale[:, None, None, None]
            assert convolution.bias is not None
            convolution.bias *= scale
        strip.across.bias += shift
    strip.norm = nn.Identity()


def _fold_fusion(network: LaneNetwork) -> None:
    """The same for the two branches that meet at 40 columns."""
    scale, shift = _scale_and_shift(network.fuse[0])
    with torch.no_grad():
        network.lateral.weight *= scale[:, None, None, None]
        network.widen.weight *= scale[None, :, None, None]
        assert network.widen.bias is not None
        network.widen.bias.mul_(scale).add_(shift)
    network.fuse = nn.Sequential(nn.ReLU())


def export(network: LaneNetwork, path: Path) -> None:
    """Writes the model beside its place and renames it, so that a watcher sees one change."""
    path.parent.mkdir(parents=True, exist_ok=True)
    beside = path.with_suffix(".new")
    torch.onnx.export(
        ExportedNetwork(network).eval(),
        (torch.zeros(INPUT_SHAPE),),
        str(beside),
        input_names=[INPUT_NAME],
        output_names=[OUTPUT_NAME],
        opset_version=OPSET,
        # Folding would write out every anchor.
        do_constant_folding=False,
        dynamo=False,
    )
    model = onnx.load(str(beside))
    _store_half(model.graph, (ANCHOR_COUNT, POOLED_ROWS * POOLED_COLUMNS))
    store_indices(model.graph)
    onnx.checker.check_model(model, full_check=True)
    model.producer_name, model.producer_version, model.doc_string = "edge_server", "", ""
    onnx.save(model, str(beside))
    beside.replace(path)


def _store_half(graph: onnx.GraphProto, shape: tuple[int, ...]) -> None:
    """Stores the pooling weights, which are half-precision numbers, in half the space."""
    [wide] = [tensor for tensor in graph.initializer if tuple(tensor.dims) == shape]
    name = wide.name
    half = onnx.numpy_helper.to_array(wide).astype(np.float16)
    wide.CopyFrom(onnx.numpy_helper.from_array(half, f"{name}_half"))
    widen = onnx.helper.make_node("Cast", [f"{name}_half"], [name], to=onnx.TensorProto.FLOAT)
    graph.node.insert(0, widen)


def store_indices(graph: onnx.GraphProto) -> None:
    """Stores what is sliced as tensors, where PyTorch writes `Unsqueeze` of constants: TensorRT 8.6
    refuses axes that are computed ("does not support dynamic axes")."""
    constants = {tensor.name: tensor for tensor in graph.initializer}
    constants |= {n.output[0]: n.attribute[0].t for n in graph.node if n.op_type == "Constant"}
    for node in list(graph.node):
        if node.op_type == "Unsqueeze" and all(name in constants for name in node.input):
            what, axes = (onnx.numpy_helper.to_array(constants[name]) for name in node.input)
            array = np.ascontiguousarray(np.expand_dims(what, tuple(axes)))
            graph.initializer.append(onnx.numpy_helper.from_array(array, node.output[0]))
            graph.node.remove(node)
    used = {name for node in graph.node for name in node.input}
    for node in list(graph.node):
        if node.op_type == "Constant" and node.output[0] not in used:
            graph.node.remove(node)


def load_exported(network: LaneNetwork, path: Path) -> list[str]:
    """Gives a network the weights of an exported file; it then answers the same.

    An exported file has no normalisation left: that of the network becomes none (mean 0, variance
    1) until `trainer.settle` makes it one that training can go on from.

    Returns:
        The names of its normalisation layers.

    Raises:
        MaterialError: the file is not of a network of this shape.
    """
    tensors = {
        tensor.name.removeprefix("trunk."): torch.from_numpy(
            onnx.numpy_helper.to_array(tensor).copy()
        )
        for tensor in onnx.load(str(path)).graph.initializer
    }
    state = network.state_dict()
    norms = [name for name, part in network.named_modules() if isinstance(part, nn.BatchNorm2d)]
    try:
        for norm in norms:
            state[f"{norm}.running_mean"].zero_()
            state[f"{norm}.running_var"].fill_(1.0 - dict(network.named_modules())[norm].eps)
            state[f"{norm}.weight"].fill_(1.0)
            before, _, place = norm.rpartition(".")
            bias = f"{before}.{int(place) - 1}.bias" if place.isdigit() else ""
            state[f"{norm}.bias"].copy_(tensors.pop(bias) if bias in tensors else torch.zeros(()))
        scale = torch.cat(
            (torch.ones(2), torch.tensor([LENGTH_SCALE]), torch.full((72,), OFFSET_SCALE_PX))
        )
        predicted = [*range(START_Y_COLUMN), *range(LENGTH_COLUMN, COLUMN_COUNT)]
        state["predict.weight"].copy_(tensors.pop("weight").T[predicted] / scale[:, None])
        state["predict.bias"].copy_(tensors.pop("columns")[-1][predicted] / scale)
        for name in ("pooling_half", "shape", "lines"):
            del tensors[name]
        tensors = {name: each for name, each in tensors.items() if not name.startswith("/")}
        for name, tensor in tensors.items():
            state[name].copy_(tensor)
    except (KeyError, RuntimeError) as error:
        raise MaterialError(
            f"{path}: is no network that this script exported: {error}; give another "
            "--begin-with, or none to begin with random weights"
        ) from error
    return norms


def blend(path: Path, begun: Path, share: float) -> LaneNetwork:
    """Gives an exported file `share` of the weights of another, and the rest of its own.

    Between the weights that training begins with and those that it ends with lie weights that know
    both sets of images (Wortsman et al., "Robust fine-tuning of zero-shot models").

    Returns:
        The network of the file.

    Raises:
        MaterialError: the other file is not of a network of this shape.
    """
    load_exported(LaneNetwork(), begun)
    kept = {
        tensor.name: onnx.numpy_helper.to_array(tensor)
        for tensor in onnx.load(str(begun)).graph.initializer
    }
    model = onnx.load(str(path))
    for tensor in model.graph.initializer:
        own = onnx.numpy_helper.to_array(tensor)
        # The others are indices.
        if np.issubdtype(own.dtype, np.floating):
            mixed = share * kept[tensor.name].astype(np.float64) + (1.0 - share) * own
            tensor.CopyFrom(onnx.numpy_helper.from_array(mixed.astype(own.dtype), tensor.name))
    beside = path.with_suffix(".new")
    onnx.save(model, str(beside))
    beside.replace(path)
    network = LaneNetwork()
    load_exported(network, path)
    return network


def session(path: Path, threads: int = 2) -> onnxruntime.InferenceSession:
    """ONNX Runtime on the CPU."""
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = threads
    return onnxruntime.InferenceSession(str(path), options, providers=["CPUExecutionProvider"])


def infer(model: onnxruntime.InferenceSession, bgr: NDArray[np.uint8]) -> NDArray[np.float32]:
    """Proposals (2784, 77) float32 of one (360, 640, 3) uint8 BGR image."""
    tensor = np.ascontiguousarray(bgr.transpose(2, 0, 1)[None], np.float32) / np.float32(255.0)
    return np.asarray(model.run([OUTPUT_NAME], {INPUT_NAME: tensor})[0][0], np.float32)


def verify(network: LaneNetwork, path: Path, images: NDArray[np.uint8]) -> float:
    """Compares the file with PyTorch on images and returns the largest difference.

    Raises:
        RuntimeError: the file answers something else, or in another shape.
    """
    model, largest = session(path), 0.0
    for bgr in images:
        tensor = torch.from_numpy(bgr.transpose(2, 0, 1)[None].copy()).float() / 255.0
        with torch.no_grad():
            expected = network.eval()(tensor)[0].numpy()
        answered = infer(model, bgr)
        if answered.shape != expected.shape:
            raise RuntimeError(f"{path}: expected {expected.shape}, got {answered.shape}")
        # Anchors far outside the image have large x and matter to nobody.
        near = np.abs(expected) < 2 * INPUT_WIDTH_PX
        near[:, :FIRST_X_COLUMN] = True
        largest = max(largest, float(np.abs(answered - expected)[near].max()))
    if largest > TOLERANCE:
        raise RuntimeError(f"{path}: differs from PyTorch by {largest:.3g}")
    return largest


def latency_ms(path: Path, threads: int) -> float:
    """Median time of one inference."""
    model = session(path, threads)
    tensor = np.random.default_rng(0).random(INPUT_SHAPE, np.float32)
    times = []
    for _ in range(LATENCY_RUNS):
        began = time.perf_counter()
        model.run([OUTPUT_NAME], {INPUT_NAME: tensor})
        times.append(time.perf_counter() - began)
    return float(np.median(times[5:]) * 1e3)
