"""Samples for INT8 calibration, from a directory of .npy files."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import numpy as np

from edge_server.errors import InvalidRequest

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from numpy.typing import NDArray

    from edge_server.backends.tensorrt.build.build_options import Shape

Sample = Mapping[str, "NDArray[Any]"]


class Samples:
    """Typical inputs of a network, one batch after the other.

    A network of one input has `DIR/*.npy`, one of several `DIR/<input>/*.npy`: the first files of
    all inputs form the first batch, then the second files. A file holds an input's array, batch
    dimension included; a batch of one may lack its batch dimension, which is then added.

    Args:
        wanted: input → its shape during calibration, and its numpy type.

    Raises:
        InvalidRequest: the directory has no files, or the inputs have different numbers of files.
    """

    def __init__(self, directory: Path, wanted: Mapping[str, tuple[Shape, np.dtype[Any]]]) -> None:
        self._wanted = wanted
        folders = {n: directory if len(wanted) == 1 else directory / n for n in wanted}
        self._paths = {name: sorted(folder.glob("*.npy")) for name, folder in folders.items()}
        for name, paths in self._paths.items():
            if not paths:
                raise InvalidRequest(
                    f"{folders[name]}: no .npy file to calibrate input '{name}' with; save some "
                    "hundred typical inputs there with numpy.save"
                )
        counts = {name: len(paths) for name, paths in self._paths.items()}
        if len(set(counts.values())) > 1:
            raise InvalidRequest(f"{directory}: of each input as many samples: {counts}")

    def __len__(self) -> int:
        return len(next(iter(self._paths.values())))

    def __iter__(self) -> Iterator[Sample]:
        """Yield the samples.

        Raises:
            InvalidRequest: a file's array does not have the input's shape.
        """
        for at in range(len(self)):
            yield {name: self._read(name, paths[at]) for name, paths in self._paths.items()}

    def _read(self, name: str, path: Path) -> NDArray[Any]:
        shape, dtype = self._wanted[name]
        try:
            array = np.load(path, allow_pickle=False)
        except (OSError, ValueError, EOFError) as error:
            raise InvalidRequest(f"{path}: no array can be read from it: {error}") from error
        if array.shape == shape[1:] and shape[:1] == (1,):
            array = array[np.newaxis]
        if array.shape != shape:
            raise InvalidRequest(
                f"{path}: has shape {list(array.shape)}, input '{name}' takes {list(shape)}"
            )
        return np.ascontiguousarray(array, dtype)
