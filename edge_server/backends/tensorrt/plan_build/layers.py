"""Placement of an engine's layers, as TensorRT's inspector reports it."""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Any

# TensorRT's names of a tensor's copies between the GPU and NVDLA: `input to nvm`.
_TO_AND_FROM_DLA = (" to nvm", " from nvm", " copy finish")


@dataclass(frozen=True)
class Placed:
    """Placement of an engine's layers.

    Attributes:
        dla: one name for each part that runs on NVDLA, as one loadable.
        gpu: names of the layers on the GPU, without changes of layout.
        reformats: number of layout changes, which occur at the borders between NVDLA and GPU.
    """

    dla: tuple[str, ...] = ()
    gpu: tuple[str, ...] = ()
    reformats: int = 0

    def __str__(self) -> str:
        return (
            f"{_count(len(self.dla), 'part')} on NVDLA, {_count(len(self.gpu), 'layer')} on the "
            f"GPU, {_count(self.reformats, 'change')} of layout"
        )


def placed(information: str) -> Placed:
    """Parse the placement from the JSON of `get_engine_information`, in which every field may be
    missing.

    Layers are objects if the plan was built with detailed verbosity, otherwise bare names.
    """
    dla: list[str] = []
    gpu: list[str] = []
    reformats = 0
    for layer in _layers(information):
        name, kind = _name_and_kind(layer)
        if kind.upper() == "DLA":
            dla.append(name)
        elif (
            kind.lower() in ("reformat", "noop")
            or name.startswith("Reformatting CopyNode")
            or name.endswith(_TO_AND_FROM_DLA)
        ):
            reformats += 1
        else:
            gpu.append(name)
    return Placed(tuple(dla), tuple(gpu), reformats)


def io_names(information: str) -> tuple[str, ...]:
    """Return the engine's own tensors: `Bindings`, or `I/O Tensors` in TensorRT 11's spelling."""
    parsed = _object(information)
    found = parsed.get("I/O Tensors", parsed.get("Bindings", []))
    if not isinstance(found, list):
        return ()
    names = (entry.get("Name", "") if isinstance(entry, dict) else entry for entry in found)
    return tuple(name for name in names if isinstance(name, str) and name)


def table(information: str) -> list[str]:
    """Return a line for each layer: its type and its name."""
    pairs = [_name_and_kind(layer) for layer in _layers(information)]
    width = max((len(kind) for _, kind in pairs), default=0)
    return [f"{kind:{width}}  {name}" for name, kind in pairs]


def _layers(information: str) -> list[Any]:
    found = _object(information).get("Layers", [])
    return found if isinstance(found, list) else []


def _object(information: str) -> dict[str, Any]:
    try:
        parsed = json.loads(information)
    except ValueError:
        return {}
    return parsed if isinstance(parsed, dict) else {}


def _name_and_kind(layer: Any) -> tuple[str, str]:
    if isinstance(layer, dict):
        return str(layer.get("Name", "")), str(layer.get("LayerType", ""))
    return str(layer), ""


def _count(number: int, thing: str) -> str:
    return f"{number} {thing}" if number == 1 else f"{number} {thing}s"
