"""`edge-server infer`: sends one request, and shows what came of it; the inputs of a request, from
arrays in files or from a picture."""

from __future__ import annotations

import json
import time
from typing import TYPE_CHECKING, Any
from zipfile import BadZipFile

import numpy as np

from edge_server.cameras.lane_video import draw_lanes
from edge_server.cameras.recordings import read_picture, write_picture
from edge_server.cli.run import connected, settings_of
from edge_server.errors import InvalidRequest, ModelConfigError, NotFound, SourceError
from edge_server.lanes.types import lanes_from_rows
from edge_server.model_config.config import ModelConfig
from edge_server.pipeline.lane_model import LaneTensors
from edge_server.tensors import DataType

if TYPE_CHECKING:
    import argparse
    from collections.abc import Callable, Iterable, Iterator, Mapping
    from pathlib import Path

    from numpy.typing import NDArray

    from edge_server.api.grpc.client import DaemonClient
    from edge_server.lanes.types import Lane
    from edge_server.tensors import TensorSpec

Arrays = dict[str, "NDArray[Any]"]
# Numbers of an output that are printed; of a longer one, the first ones and what they span.
_MOST_NUMBERS = 24


def run_infer(arguments: argparse.Namespace) -> Iterator[str]:
    """Send one request and yield its outputs."""
    picture = None if arguments.image is None else read_picture(arguments.image)
    with connected(settings_of(arguments)) as client:
        config = config_of(client, arguments.model)
        if picture is None:
            inputs = read_arrays(arguments.input, config)
        else:
            inputs = from_picture(client, config, picture)
        classes = dict.fromkeys(config.output_names, arguments.classes) if arguments.classes else {}
        begun_s = time.monotonic()
        outputs = client.infer(
            config.name, inputs, version=str(arguments.model_version or ""), classes=classes
        )
        took_ms = 1e3 * (time.monotonic() - begun_s)
    lanes = None if classes else lanes_of(config, outputs)
    if arguments.json:
        yield json.dumps(as_object(config, outputs, took_ms), indent=2)
    else:
        yield from lines(config, outputs, took_ms, lanes)
    if arguments.save is not None:
        _save(arguments.save, picture, outputs, lanes)


def lanes_of(config: ModelConfig, outputs: Mapping[str, NDArray[Any]]) -> tuple[Lane, ...] | None:
    """Return the lanes of the response, in px of the picture; None of a model that is no lane
    model."""
    try:
        tensors = LaneTensors.of(config)
    except ModelConfigError:
        return None
    points, scores = outputs[tensors.points], outputs[tensors.scores]
    if tensors.batched:
        points, scores = points[0], scores[0]
    return lanes_from_rows(points, scores)


def lines(
    config: ModelConfig,
    outputs: Mapping[str, NDArray[Any]],
    took_ms: float,
    lanes: tuple[Lane, ...] | None,
) -> Iterator[str]:
    """Yield what people read of a response: its lanes, or each output."""
    yield f"{config.name}: {took_ms:.1f} ms"
    if lanes is not None:
        yield f"{len(lanes)} lanes"
        for number, lane in enumerate(lanes, 1):
            (x0, y0), (x1, y1) = lane.points[0], lane.points[-1]
            yield (
                f"  {number}: score {lane.score:.2f}, {len(lane.points)} points from "
                f"({x0:.0f}, {y0:.0f}) to ({x1:.0f}, {y1:.0f}) px"
            )
        return
    for name, array in outputs.items():
        yield f"{name}: {_kind(array)} {list(array.shape)}"
        yield from (f"  {line}" for line in _values(array))


def _values(array: NDArray[Any]) -> Iterator[str]:
    if array.dtype.kind == "O":
        for element in array.ravel()[:_MOST_NUMBERS]:
            yield _text(element)
        if array.size > _MOST_NUMBERS:
            yield f"… {array.size - _MOST_NUMBERS} more"
        return
    if array.size > _MOST_NUMBERS:
        values = array.astype(np.float64)
        least, most, mean = np.min(values), np.max(values), np.mean(values)
        yield f"from {least:g} to {most:g}, mean {mean:g}; it begins with"
    numbers = array.ravel()[:_MOST_NUMBERS]
    yield np.array2string(numbers, separator=", ", max_line_width=90, precision=5)


def _text(element: Any) -> str:
    text = element.decode(errors="replace") if isinstance(element, bytes) else str(element)
    return text if text.isprintable() else repr(text)


def as_object(
    config: ModelConfig, outputs: Mapping[str, NDArray[Any]], took_ms: float
) -> dict[str, Any]:
    """Return the response as JSON has it, in the names of Triton's HTTP protocol."""
    found = []
    for name, array in outputs.items():
        values = array.ravel().tolist()
        if array.dtype.kind == "O":
            values = [v.decode(errors="replace") if isinstance(v, bytes) else v for v in values]
        about = {"name": name, "datatype": _kind(array), "shape": array.shape}
        found.append({**about, "data": values})
    return {"model_name": config.name, "latency_ms": took_ms, "outputs": found}


def _kind(array: NDArray[Any]) -> str:
    datatype = DataType.from_numpy(array.dtype)
    return str(array.dtype) if datatype is None else datatype.value


def _save(
    path: Path,
    picture: NDArray[np.uint8] | None,
    outputs: Mapping[str, NDArray[Any]],
    lanes: tuple[Lane, ...] | None,
) -> None:
    if path.suffix.lower() == ".npz":
        try:
            np.savez(path, **outputs)  # type: ignore[arg-type]  # its own flag is no output's name
        except OSError as error:
            raise SourceError(f"{path}: {error.strerror}; choose another place") from error
    elif picture is None or lanes is None:
        raise InvalidRequest(
            f"--save {path}: there are no lanes to draw, or no --image to draw them into; a name "
            "that ends in .npz has all outputs"
        )
    else:
        write_picture(path, draw_lanes(picture, lanes))


def read_arrays(files: Iterable[tuple[str, Path]], config: ModelConfig) -> Arrays:
    """Return the arrays of `files`, each with a batch dimension where the model wants one.

    A file whose name does not end in .npy is its bytes: an array of UINT8, or one element of BYTES.

    Raises:
        SourceError: a file cannot be read, or is none of numpy's.
        InvalidRequest: the model has no input of that name, or none that takes bytes.
    """
    arrays = {}
    specs = {spec.name: spec for spec in config.inputs}
    for name, path in files:
        if name not in specs:
            raise InvalidRequest(f"--input {name}: {_inputs_text(config)}")
        spec = specs[name]
        try:
            # Opened here, as numpy leaves a damaged file open.
            with path.open("rb") as file:
                if path.suffix.lower() in (".npy", ".npz"):
                    array = np.load(file, allow_pickle=False)
                else:
                    array = _bytes_for(spec, file.read(), path)
        except (OSError, ValueError, EOFError, BadZipFile) as error:
            reason = getattr(error, "strerror", None) or str(error)
            raise SourceError(f"{path}: {reason}; write it with numpy.save") from error
        if not isinstance(array, np.ndarray):
            raise SourceError(f"{path}: has several arrays; give one .npy file for each input")
        if config.max_batch_size and array.ndim == len(spec.shape):
            array = array[np.newaxis]
        arrays[name] = array
    return arrays


def _bytes_for(spec: TensorSpec, data: bytes, path: Path) -> NDArray[Any]:
    if spec.datatype is DataType.BYTES:
        return np.full([1] * max(1, len(spec.shape)), data, np.object_)
    if spec.datatype is DataType.UINT8 and len(spec.shape) == 1:
        return np.frombuffer(data, np.uint8)
    raise InvalidRequest(
        f"--input {spec.name}={path}: the bytes of a file are for BYTES, or UINT8 of one "
        f"dimension, and this input is {spec.datatype.value} {list(spec.shape)}; give an array "
        "that numpy.save wrote (.npy), or a picture's pixels with --image"
    )


def picture_input(config: ModelConfig) -> TensorSpec | None:
    """Return the one needed input of a model that takes pictures: UINT8, (H, W, 3)."""
    needed = [spec for spec in config.inputs if not spec.optional]
    if len(needed) == 1 and needed[0].datatype is DataType.UINT8:
        shape = needed[0].shape
        if len(shape) == 3 and shape[2] in (3, -1):
            return needed[0]
    return None


def from_picture(client: DaemonClient, config: ModelConfig, picture: NDArray[np.uint8]) -> Arrays:
    """Return the inputs of the model for a picture: itself, or what the steps before the model make
    of it in an ensemble that the daemon serves.

    Raises:
        InvalidRequest: the model takes no picture, in no ensemble either.
    """
    if (spec := picture_input(config)) is not None:
        return {spec.name: picture[np.newaxis] if config.max_batch_size else picture}
    for entry in client.index():
        if entry.state != "READY":
            continue
        ensemble = ModelConfig.of(client.config(entry.name))
        taker = picture_input(ensemble)
        if taker is None or all(step.model_name != config.name for step in ensemble.steps):
            continue
        image = picture[np.newaxis] if ensemble.max_batch_size else picture
        return steps_before(client.infer, ensemble, config.name, {taker.name: image})
    raise InvalidRequest(
        f"model '{config.name}' takes no picture, and is in no ensemble that does: "
        f"{_inputs_text(config)}; give infer --input NAME=FILE; perf_analyzer measures any model"
    )


def steps_before(
    infer: Callable[[str, Mapping[str, NDArray[Any]]], Mapping[str, NDArray[Any]]],
    ensemble: ModelConfig,
    model: str,
    known: Arrays,
) -> Arrays:
    """Return the inputs of the step `model` of an ensemble, by running the steps before it.

    Args:
        known: the ensemble's inputs; gets the tensors of the steps that were run.
    """

    def tensor(name: str) -> NDArray[Any]:
        if name not in known:
            step = next(each for each in ensemble.steps if name in each.output_map.values())
            outputs = infer(step.model_name, {i: tensor(t) for i, t in step.input_map.items()})
            known.update({t: outputs[o] for o, t in step.output_map.items()})
        return known[name]

    (last, *_) = (step for step in ensemble.steps if step.model_name == model)
    return {name: tensor(mapped) for name, mapped in last.input_map.items()}


def config_of(client: DaemonClient, model: str) -> ModelConfig:
    """Return the configuration of a loaded model.

    Raises:
        NotFound: there is no such model, or it is not loaded; the text has the reason.
    """
    entries = [entry for entry in client.index() if entry.name == model]
    if not entries:
        there = ", ".join(sorted({entry.name for entry in client.index()})) or "none"
        raise NotFound(f"no model '{model}'; there are: {there}")
    if all(entry.state != "READY" for entry in entries):
        states = "; ".join(f"version {e.version} {e.state}: {e.reason}" for e in entries)
        raise NotFound(f"model '{model}' is not ready: {states}")
    return ModelConfig.of(client.config(model))


def _inputs_text(config: ModelConfig) -> str:
    specs = (f"{each.name} {each.datatype.value} {list(each.shape)}" for each in config.inputs)
    return f"its inputs are {', '.join(specs)}"
