"""Triton's names for the arguments and the results of a function, which has none of its own.

Inputs: all are arguments of the function, or all are `<text>__<index>`, or they are in order; of a
`model.pt2` also `ARGS[0]` and `KWARGS[name]`. Outputs: `<text>__<index>`, or in order; of a
`model.pt2` also `RESULT`, `RESULT[0]` and `RESULT[name]`.
"""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Sequence

_INDEXED = re.compile(r".*__(\d+)")
_ARGUMENT = re.compile(r"ARGS\[(\d+)\]|KWARGS\[(\w+)\]")
_RESULT = re.compile(r"RESULT(?:\[(\w+)\])?")


def call_order(names: Sequence[str], arguments: Sequence[str] = ()) -> list[str]:
    """Return the inputs in the order of the call.

    Args:
        names: in the order of the configuration.
        arguments: the function's own names; empty where they are not known.

    Raises:
        ValueError: the indices of the names are not 0, 1, 2 …, or there are too many inputs.
    """
    if arguments and len(names) > len(arguments):
        raise ValueError(
            f"{len(names)} inputs for a function of {len(arguments)}: {', '.join(arguments)}"
        )
    if arguments and set(names) <= set(arguments):
        return sorted(names, key=list(arguments).index)
    indexed = _indexed(names)
    if len(indexed) < len(names):
        return list(names)
    if [index for index, _ in indexed] != list(range(len(names))):
        raise ValueError(f"the inputs {', '.join(names)} are not numbered 0 to {len(names) - 1}")
    return [name for _, name in indexed]


def exported_call(names: Sequence[str]) -> tuple[list[str], dict[str, str]]:
    """Return the inputs of an exported program: those in order, and argument → input for the
    rest."""
    matches = {name: _ARGUMENT.fullmatch(name) for name in names}
    by_name = {m[2]: name for name, m in matches.items() if m and m[2]}
    placed = {int(m[1]): name for name, m in matches.items() if m and m[1]}
    unplaced = [name for name in names if not matches[name]]
    return [placed[place] for place in sorted(placed)] or call_order(unplaced), by_name


def name_of(names: Sequence[str], index: int, word: str) -> str:
    """Return the name of tensor `index`: the configuration's, `<word>__<index>` where it has
    none."""
    indexed = _indexed(names)
    if names and len(indexed) == len(names):
        return dict(indexed).get(index, f"{word}__{index}")
    return names[index] if index < len(names) else f"{word}__{index}"


def result_of(made: Any, index: int, name: str) -> Any:
    """Return the result of a call that is output `index` of the configuration.

    Raises:
        LookupError: there is no such result.
        TypeError: the result is a dict, and `name` names no key of it.
    """
    place = _RESULT.fullmatch(name)
    key = place[1] if place else None
    if isinstance(made, dict):
        if key in made:
            return made[key]
        raise TypeError(
            f"output '{name}': the model returns a dict, whose tensors have no order: of a "
            "model.pt2 RESULT[key] names one; TorchScript has to return a tuple"
        )
    # A list of texts is one tensor.
    several = isinstance(made, (tuple, list)) and not is_texts(made)
    results = made if several else (made,)
    if place:
        index = int(key) if key and key.isdigit() else 0 if key is None else len(results)
    elif indexed := _INDEXED.fullmatch(name):
        index = int(indexed[1])
    if index >= len(results):
        raise IndexError(f"output '{name}': the model has {len(results)} results")
    return results[index]


def is_texts(made: object) -> bool:
    return isinstance(made, list) and all(isinstance(each, str) for each in made)


def _indexed(names: Sequence[str]) -> list[tuple[int, str]]:
    """Return the numbered names with their numbers, in that order."""
    return sorted((int(m[1]), name) for name in names if (m := _INDEXED.fullmatch(name)))
