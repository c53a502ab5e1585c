"""Holds the outputs of a converted model against those of its source."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from edge_server.backends.convert.steps import samples
from edge_server.errors import InternalError

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from numpy.typing import NDArray

# The largest error of an output, as a share of the source's largest magnitude in that output.
# FP32: another order of sums. FP16 has 11 bits; INT8 with scales that fit loses some per cent,
# and a network that loses a quarter of its range, as with every operator quantised, is caught.
LIMITS = {"fp32": 1e-4, "fp16": 1e-2, "int8": 5e-2}


@dataclass(frozen=True)
class OutputError:
    """How far an output of the result is from the source's, over all samples.

    Attributes:
        name: the output.
        largest: the largest absolute error; of texts, truths and whole numbers the share of those
            that differ.
        mean: the mean absolute error.
        magnitude: the source's largest absolute value; 0 for what must be equal.
        allowed: the largest error that passes.
    """

    name: str
    largest: float
    mean: float
    magnitude: float
    allowed: float

    @property
    def agrees(self) -> bool:
        # Negated: NaN is no agreement.
        return not self.largest > self.allowed

    def __str__(self) -> str:
        if not self.magnitude:
            same = "is the same" if self.agrees else f"differs in {self.largest:.2%}, and may not"
            return f"output {self.name}: {same}"
        return (
            f"output {self.name}: largest error {self.largest:.3g}, mean {self.mean:.3g}, of "
            f"values up to {self.magnitude:.3g}; at most {self.allowed:.3g} is allowed"
        )


def compare(folder: Path, count: int, limit: float) -> list[OutputError]:
    """Return the error of each output over `count` samples, whose files lie in `folder`.

    Args:
        folder: has `source-N.npz` and `result-N.npz`.
        count: number of samples.
        limit: the largest error, as a share of the source's largest magnitude.

    Raises:
        InternalError: the result has other outputs.
    """
    pairs: dict[str, list[tuple[NDArray[Any], NDArray[Any]]]] = {}
    for source, result in _read(folder, count):
        if source.keys() != result.keys():
            raise InternalError(
                f"the result's outputs are {', '.join(result)}, the source's {', '.join(source)}"
            )
        for name, wanted in source.items():
            if wanted.shape != result[name].shape:
                raise InternalError(
                    f"output {name}: the result's shape is {result[name].shape}, the source's "
                    f"{wanted.shape}, on the same input"
                )
            pairs.setdefault(name, []).append((wanted, result[name]))
    return [_error(name, each, limit) for name, each in pairs.items()]


def _read(
    folder: Path, count: int
) -> Iterator[tuple[dict[str, NDArray[Any]], dict[str, NDArray[Any]]]]:
    for index in range(count):
        yield samples.read(folder, "source", index), samples.read(folder, "result", index)


def _error(name: str, pairs: list[tuple[NDArray[Any], NDArray[Any]]], limit: float) -> OutputError:
    if pairs[0][0].dtype.kind != "f":
        size = sum(wanted.size for wanted, _ in pairs)
        share = sum(int((wanted != got).sum()) for wanted, got in pairs) / max(size, 1)
        return OutputError(name, share, share, 0.0, 0.0)
    errors = [_distance(wanted, got) for wanted, got in pairs]
    magnitude = max((_largest(wanted) for wanted, _ in pairs), default=0.0)
    largest = max((float(np.max(each)) for each in errors if each.size), default=0.0)
    size = max(sum(each.size for each in errors), 1)
    mean = sum(float(each.sum()) for each in errors) / size
    # All zeros: nothing to be a share of, and nothing may be added.
    return OutputError(name, largest, mean, magnitude or 1e-30, limit * magnitude)


def _distance(wanted: NDArray[Any], got: NDArray[Any]) -> NDArray[np.float64]:
    """Return the absolute difference; infinite where only one is finite."""
    a, b = wanted.astype(np.float64), got.astype(np.float64)
    with np.errstate(invalid="ignore"):
        off = np.abs(a - b)
    same = (a == b) | (np.isnan(a) & np.isnan(b))
    found: NDArray[np.float64] = np.where(same, 0.0, np.where(np.isnan(off), np.inf, off))
    return found


def _largest(array: NDArray[Any]) -> float:
    finite = array[np.isfinite(array)]
    return float(np.abs(finite).max()) if finite.size else 0.0
