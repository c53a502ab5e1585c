"""Golden pairs: recorded inputs of a model and their expected outputs, stored with the model.

An output is compared with the recorded one by `difference`.
"""

from __future__ import annotations

import zipfile
import zlib
from dataclasses import dataclass
from typing import IO, TYPE_CHECKING, Any

import numpy as np
from numpy.lib import format as npy

from edge_server.errors import ModelConfigError
from edge_server.model_config.files import GOLDEN_DIRECTORY, reading
from edge_server.tensors import (
    DataType,
    Tensor,
    as_floats,
    element_count,
    is_finite,
    shape_text,
)

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping
    from pathlib import Path

    from numpy.typing import NDArray

    from edge_server.model_config.config import ModelConfig
    from edge_server.tensors import TensorSpec

# Limits against an accident or an attack; more pairs would only delay the publication.
MOST_PAIRS = 64
MOST_ARRAYS = 256
MOST_BYTES = 256 << 20

# Relative and absolute tolerance. Another board, another version of the runtime and an engine with
# half precision inside stay within these; a model with other weights does not.
TOLERANCES = {
    DataType.FP64: (1e-3, 1e-6),
    DataType.FP32: (1e-2, 1e-3),
    DataType.FP16: (2e-2, 1e-2),
    DataType.BF16: (5e-2, 5e-2),
}

_HEADERS = {(1, 0): npy.read_array_header_1_0, (2, 0): npy.read_array_header_2_0}


@dataclass(frozen=True, eq=False)
class GoldenPair:
    """One file `golden/<any>.npz`, as `numpy.savez` writes it.

    Attributes:
        path: the file.
        inputs: the arrays `input.<name>`, as a request carries them, batch dimension included.
        outputs: the arrays `output.<name>`; at least one, not necessarily all of the model.
        tolerances: the scalars `tolerance.<name>`: the largest allowed absolute difference of any
            element of that output.
    """

    path: Path
    inputs: Mapping[str, Tensor]
    outputs: Mapping[str, Tensor]
    tolerances: Mapping[str, float]


def golden_pairs(config: ModelConfig, version: int, directory: Path) -> Iterator[GoldenPair]:
    """Yield the golden pairs of a version of the model in `directory`, sorted by file name.

    The pairs are in `golden/<version>` if that exists, otherwise in `golden`. The files are read
    one by one; no code in them is executed, and the limits of this file bound their memory.

    Raises:
        ModelConfigError: a pair is unusable; the text names file, array and remedy.
    """
    folder = directory / GOLDEN_DIRECTORY
    with reading(folder):
        own = folder / str(version)
        folder = own if own.is_dir() else folder
        paths = sorted(folder.glob("*.npz"))
    if len(paths) > MOST_PAIRS:
        raise ModelConfigError(f"{folder}: {len(paths)} golden pairs; keep at most {MOST_PAIRS}")
    for path in paths:
        yield _pair(config, path)


def _pair(config: ModelConfig, path: Path) -> GoldenPair:
    arrays = _arrays(path)
    found: dict[str, dict[str, Any]] = {"input": {}, "output": {}, "tolerance": {}}
    for key, array in arrays.items():
        part, _, name = key.partition(".")
        if part not in found or not name:
            raise ModelConfigError(
                f"{path}: array '{key}': a golden pair has arrays 'input.<name>', 'output.<name>' "
                "and 'tolerance.<name>'; rename it"
            )
        found[part][name] = array
    if not found["output"]:
        raise ModelConfigError(f"{path}: no array 'output.<name>'; record what shall come out")
    for name in found["tolerance"].keys() - found["output"].keys():
        raise ModelConfigError(f"{path}: 'tolerance.{name}' is of no output in it; remove it")
    inputs = {spec.name: spec for spec in config.inputs}
    outputs = {spec.name: spec for spec in config.outputs}
    return GoldenPair(
        path,
        {n: _tensor(path, f"input.{n}", a, inputs.get(n)) for n, a in found["input"].items()},
        {n: _tensor(path, f"output.{n}", a, outputs.get(n)) for n, a in found["output"].items()},
        {n: _tolerance(path, n, a) for n, a in found["tolerance"].items()},
    )


def _tensor(path: Path, key: str, array: NDArray[Any], spec: TensorSpec | None) -> Tensor:
    if spec is None:
        raise ModelConfigError(f"{path}: '{key}': the model has no tensor of that name; rename it")
    if spec.datatype is DataType.BYTES and array.dtype.kind in "SU":
        texts = [t.encode() if isinstance(t, str) else t for t in array.reshape(-1).tolist()]
        return Tensor(np.array([*texts, None], np.object_)[:-1].reshape(array.shape))
    if DataType.from_numpy(array.dtype) is not spec.datatype:
        raise ModelConfigError(
            f"{path}: '{key}' is {array.dtype}, the configuration says {spec.datatype.config_name}"
            "; record it with that type"
        )
    return Tensor(array.astype(spec.datatype.numpy, order="C", copy=False))


def _tolerance(path: Path, name: str, array: NDArray[Any]) -> float:
    value = float(array.reshape(-1)[0]) if array.size == 1 and array.dtype.kind in "fiu" else -1.0
    if not 0 <= value < np.inf:
        raise ModelConfigError(f"{path}: 'tolerance.{name}' must be one number, 0 or above")
    return value


def _arrays(path: Path) -> dict[str, NDArray[Any]]:
    try:
        # The open of a pipe would block for ever.
        with reading(path):
            if not path.is_file():
                raise ModelConfigError(f"{path}: is no regular file; remove it")
            with zipfile.ZipFile(path) as archive:
                members = archive.infolist()
                size_bytes = sum(member.file_size for member in members)
                if len(members) > MOST_ARRAYS or size_bytes > MOST_BYTES:
                    raise ModelConfigError(
                        f"{path}: {len(members)} arrays of {size_bytes >> 20} MiB; a golden pair "
                        f"has at most {MOST_ARRAYS} of {MOST_BYTES >> 20} MiB together"
                    )
                arrays = {}
                for member in members:
                    with archive.open(member) as file:
                        name = member.filename.removesuffix(".npy")
                        arrays[name] = _array(file)
                return arrays
    # RuntimeError: a password; NotImplementedError: an unknown compression.
    except (zipfile.BadZipFile, zlib.error, ValueError, EOFError, RuntimeError) as error:
        raise ModelConfigError(
            f"{path}: is no file of arrays: {error}; write it with numpy.savez"
        ) from error


def _array(file: IO[bytes]) -> NDArray[Any]:
    """Return the array as `numpy.load` does, without allocating more than the file contains.

    Raises:
        ValueError: the file is not an array of plain elements as `numpy.save` writes it.
    """
    read_header = _HEADERS.get(npy.read_magic(file))
    if read_header is None:
        raise ValueError("arrays of named fields cannot be used")
    shape, column_major, dtype = read_header(file)
    if dtype.hasobject:
        raise ValueError("arrays of Python objects cannot be used; texts are arrays of 'S' or 'U'")
    expected = element_count(shape) * dtype.itemsize
    # The read allocates no more than is there; one byte more, as zipfile checks the CRC at the end.
    data = file.read(expected + 1)
    if len(data) != expected:
        raise ValueError(f"an array of shape {shape} is recorded in {len(data)} bytes")
    if not expected:
        return np.empty(shape, dtype)
    return np.frombuffer(data, dtype).reshape(shape, order="F" if column_major else "C")


def not_finite(tensor: Tensor) -> str:
    """Return the value and place of an infinity or NaN in `tensor`, or "" if there is none."""
    if is_finite(tensor):
        return ""
    values = as_floats(tensor)
    at = _place(~np.isfinite(values))
    return f"is {values[at]} at {shape_text(at)}"


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
        return f"differs at {shape_text(at)}: {_shown(made, at)}, recorded {_shown(recorded, at)}"
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
        f"differs by up to {off[at]:.6g}, at {shape_text(at)}: {got[at]:.6g}, recorded "
        f"{want[at]:.6g}, and may by {np.broadcast_to(allowed, off.shape)[at]:.3g}"
    )


def _place(values: NDArray[Any]) -> tuple[int, ...]:
    """Return the index of the largest value."""
    return tuple(int(i) for i in np.unravel_index(int(np.argmax(values)), values.shape))


def _shown(tensor: Tensor, at: tuple[int, ...]) -> str:
    return repr(tensor.array.item(at))[:40]
