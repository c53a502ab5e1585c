"""`edge-server infer`: sends one request, and shows what came of it."""

from __future__ import annotations

import json
import time
from typing import TYPE_CHECKING, Any

import numpy as np

from edge_server.cameras.lane_video import draw_lanes
from edge_server.cameras.recordings import write_picture
from edge_server.cli.running_daemon import connected, settings_of
from edge_server.errors import InvalidRequest, ModelConfigError, SourceError
from edge_server.lanes.types import lanes_from_rows
from edge_server.pipeline.lane_model import LaneTensors
from edge_server.tensors import DataType
from edge_server.tools.inputs import config_of, from_picture, read_arrays, read_picture

if TYPE_CHECKING:
    import argparse
    from collections.abc import Iterator, Mapping
    from pathlib import Path

    from numpy.typing import NDArray

    from edge_server.lanes.types import Lane
    from edge_server.model_config.config import ModelConfig

# Numbers of an output that are printed; of a longer one, the first ones and what they span.
_MOST_NUMBERS = 24


def run_infer(arguments: argparse.Namespace) -> None:
    """Send one request and print its outputs.

    Raises:
        EdgeServerError: the daemon, the model or a file cannot be used; the text has the remedy.
    """
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
        print(json.dumps(as_object(config, outputs, took_ms), indent=2))
    else:
        print("\n".join(lines(config, outputs, took_ms, lanes)))
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
        datatype = DataType.from_numpy(array.dtype)
        kind = str(array.dtype) if datatype is None else datatype.value
        yield f"{name}: {kind} {list(array.shape)}"
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
        datatype = DataType.from_numpy(array.dtype)
        values = array.ravel().tolist()
        if array.dtype.kind == "O":
            values = [v.decode(errors="replace") if isinstance(v, bytes) else v for v in values]
        kind = str(array.dtype) if datatype is None else datatype.value
        found.append({"name": name, "datatype": kind, "shape": array.shape, "data": values})
    return {"model_name": config.name, "latency_ms": took_ms, "outputs": found}


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
