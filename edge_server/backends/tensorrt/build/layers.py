"""Where the layers of an engine run, as TensorRT's inspector reports it."""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Any

# TensorRT's names of a tensor's copies between the GPU and NVDLA: `input to nvm`.
_TO_AND_FROM_DLA = (" to nvm", " from nvm", " copy finish")


@dataclass(frozen=True)
class Placed:
    """How the layers of an engine are spread.

    Attributes:
        dla: one name for each part that runs on NVDLA, as one loadable there.
        gpu: names of what runs on the GPU, but for changes of layout.
        reformats: how many changes of layout there are, which go with the borders between both.
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
    """Where layers run, by the JSON of `get_engine_information`, whose every field may be missing.

    Layers are objects where the plan was built with detailed verbosity, names alone otherwise.
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
    """The engine's own tensors: `Bindings`, or `I/O Tensors` as TensorRT 11 spells it."""
    parsed = _object(information)
    found = parsed.get("I/O Tensors", parsed.get("Bindings", []))
    if not isinstance(found, list):
        return ()
    names = (entry.get("Name", "") if isinstance(entry, dict) else entry for entry in found)
    return tuple(name for name in names if isinstance(name, str) and name)


def table(information: str) -> list[str]:
    """A line for each layer: what kind it is of, and its name."""
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
