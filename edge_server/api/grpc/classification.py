"""The classification extension: returns an output's k best classes with score and label."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from edge_server.errors import InvalidRequest
from edge_server.tensors import DataType, Tensor

if TYPE_CHECKING:
    from collections.abc import Sequence

    from numpy.typing import NDArray

_UNSUPPORTED = frozenset({DataType.BOOL, DataType.FP16, DataType.BF16, DataType.BYTES})
# Each class is a separate text; a dense output requested in full would be millions of texts.
_MOST_CLASSES = 65536


@dataclass(frozen=True)
class Classification:
    """The requested classification of one output.

    Attributes:
        count: maximum number of classes.
        batched: the output's first dimension counts batch elements.
        labels: of the classes, by index; a class without a label is returned without one.
    """

    count: int
    batched: bool
    labels: Sequence[str] = ()

    def of(self, scores: Tensor) -> Tensor:
        """Return `<score as %f>:<index>[:<label>]`, highest first, equal scores in index order.

        Args:
            scores: of any shape; the dimensions after the batch are flattened to one class list.

        Returns:
            BYTES of shape [batch, k], or [k] where the model does not batch.

        Raises:
            InvalidRequest: the type has no scores, or the request wants too many classes.
        """
        if scores.datatype in _UNSUPPORTED:
            raise InvalidRequest(
                "class result not available for output due to unsupported type "
                f"'{scores.datatype.value}'"
            )
        array = scores.array
        batch = array.shape[0] if self.batched else 1
        rows = array.reshape(batch, array.size // batch if batch else 0)
        count = min(self.count, rows.shape[1])
        if batch * count > _MOST_CLASSES:
            raise InvalidRequest("classification output tensor too large")
        told = np.empty((batch, count), dtype=np.object_)
        for row, texts in zip(rows, told, strict=True):
            texts[:] = [self._text(row, place) for place in _best_first(row)[:count]]
        return Tensor(told if self.batched else told[0])

    def _text(self, row: NDArray[Any], place: int) -> bytes:
        label = self.labels[place] if place < len(self.labels) else ""
        return f"{row[place]:f}:{place}{':' if label else ''}{label}".encode()


def _best_first(row: NDArray[Any]) -> NDArray[np.intp]:
    """Return indices from the highest value to the lowest; equal values in order."""
    return row.size - 1 - np.argsort(row[::-1], kind="stable")[::-1]
