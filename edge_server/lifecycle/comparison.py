"""Compares an output of a model with the recorded one, and finds the largest difference."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from edge_server.tensors import DataType, Tensor, as_floats, is_finite, shape_text

if TYPE_CHECKING:
    from numpy.typing import NDArray

# Relative and absolute tolerance. Another board, another version of the runtime and an engine with
# half precision inside stay within these; a model with other weights does not.
TOLERANCES = {
    DataType.FP64: (1e-3, 1e-6),
    DataType.FP32: (1e-2, 1e-3),
    DataType.FP16: (2e-2, 1e-2),
    DataType.BF16: (5e-2, 5e-2),
}


def not_finite(tensor: Tensor) -> str:
    """Return the value and place of an infinity or NaN in `tensor`, or "" if there is none."""
    if is_finite(tensor):
        return ""
    values = as_floats(tensor)
    at = _place(~np.isfinite(values))
    return f"is {values[at]} at {_at(at)}"


def difference(made: Tensor, recorded: Tensor, tolerance: float | None) -> str:
    """Return how `made` differs from `recorded`, or "" if it does not.

    Args:
        made: the output of the model.
        recorded: the output of the golden pair.
        tolerance: the largest allowed absolute difference; None uses `TOLERANCES`.
    """
    if made.datatype is not recorded.datatype:
        return f"is {made.datatype.value}, recorded as {recorded.datatype.value}"
    if made.shape != recorded.shape:
        return f"has shape {shape_text(made.shape)}, recorded as {shape_text(recorded.shape)}"
    exact = made.datatype is DataType.BYTES or (
        tolerance is None and made.datatype not in TOLERANCES
    )
    if exact:
        wrong = made.array != recorded.array
        if not wrong.any():
            return ""
        at = _place(wrong)
        return f"differs at {_at(at)}: {_shown(made, at)}, recorded {_shown(recorded, at)}"
    got, want = as_floats(made), as_floats(recorded)
    relative, absolute = TOLERANCES.get(made.datatype, (0.0, 0.0))
    allowed = absolute + relative * np.abs(want) if tolerance is None else np.array(tolerance)
    off = np.abs(got - want)
    # Negated, so that a recorded infinity or NaN counts as different.
    wrong = ~(off <= allowed)
    if not wrong.any():
        return ""
    at = _place(np.where(wrong, np.nan_to_num(off, nan=np.inf), -1.0))
    return (
        f"differs by up to {off[at]:.6g}, at {_at(at)}: {got[at]:.6g}, recorded {want[at]:.6g}, "
        f"and may by {np.broadcast_to(allowed, off.shape)[at]:.3g}"
    )


def _place(values: NDArray[Any]) -> tuple[int, ...]:
    """Return the index of the largest value."""
    return tuple(int(i) for i in np.unravel_index(int(np.argmax(values)), values.shape))


def _at(place: tuple[int, ...]) -> str:
    return shape_text(place)


def _shown(tensor: Tensor, at: tuple[int, ...]) -> str:
    return repr(tensor.array.item(at))[:40]
