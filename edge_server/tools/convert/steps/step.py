"""One step of a conversion, in the interpreter of its framework: its job, and the samples that two
models are compared on."""

from __future__ import annotations

import importlib
import sys
import traceback
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypedDict
from zipfile import BadZipFile

import numpy as np

from edge_server.errors import InvalidRequest

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, Sequence

    from numpy.typing import NDArray


def run_command_line(
    main: Callable[[], object], words: Sequence[str], places: Mapping[str, str]
) -> None:
    """Run a converter's own command line in this process.

    Args:
        main: reads `sys.argv`.
        words: the program's name and its arguments.
        places: what stands for some of these → the path.
    """
    before = sys.argv
    sys.argv = [places.get(each, each) for each in words]
    try:
        main()
    finally:
        sys.argv = before


def run(
    progress: Callable[[str], None],
    step: tuple[str, str],
    job: Mapping[str, Any],
    options: Mapping[str, Any],
) -> object:
    """Return the result of a module's function here, for the `StepJob` of these fields."""
    module, function = step
    try:
        found = importlib.import_module(f".{module}", __package__)
        return getattr(found, function)(StepJob(progress=progress, **job), **options)
    except InvalidRequest:
        raise
    except BaseException as error:  # noqa: BLE001 - reported to the process that waits for it
        traceback.print_exc()
        lines = traceback.format_exception_only(error)[-1].strip().splitlines()
        raise InvalidRequest(lines[0] if lines else type(error).__name__) from None


# A size that the model leaves open, other than that of its first dimension.
OPEN_SIZE = 64
# The type of a tensor of texts; every other one has numpy's name.
TEXT = "text"


class TensorInfo(TypedDict):
    """One tensor of a model: its datatype is numpy's name, or `text`; its shape has all dimensions,
    that of the batch too, with -1 for any size."""

    name: str
    datatype: str
    shape: list[int]


Arrays = dict[str, "NDArray[Any]"]


@dataclass(frozen=True, kw_only=True)
class StepJob:
    """What a step makes of what; each reads what concerns its format.

    Attributes:
        progress: gets lines for people.
        source, target: the file or directory to read, and the one to write.
        samples: directory of the inputs, and of what source and result make of them.
        count, seed: of random inputs.
        recorded: files of recorded ones.
        sizes: input → shape of its random samples; for open sizes.
        inputs: name, numpy's type and shape of each input, in order; a name may be empty.
        outputs: their names; if empty, those of the source.
        signature: of a SavedModel; empty is the default one.
        trust: the code in the source may run.
        module: FILE.py:CLASS of a checkpoint.
        module_args: of that class: values with commas, a JSON array, or a JSON object by name.
        module_path: directory that the classes of a pickled module are imported from.
    """

    progress: Callable[[str], None]
    source: str
    target: str = ""
    samples: str = ""
    count: int = 0
    seed: int = 0
    recorded: Sequence[str] = ()
    sizes: Mapping[str, Sequence[int]] = field(default_factory=dict)
    inputs: Sequence[tuple[str, str, list[int]]] = ()
    outputs: Sequence[str] = ()
    signature: str = ""
    trust: bool = False
    module: str = ""
    module_args: str = ""
    module_path: str = ""

    def run_source(
        self, inputs: Sequence[TensorInfo], run: Callable[[Arrays], Mapping[str, NDArray[Any]]]
    ) -> None:
        """Write samples of `inputs`, and what `run`, the source, makes of them.

        Raises:
            InvalidRequest: a recorded sample is of other tensors.
        """
        self.write_inputs(inputs)
        self.progress("running the source")
        self._run("source", run)

    def run_result(
        self, framework: str, run: Callable[[Arrays], Mapping[str, NDArray[Any]]]
    ) -> None:
        """Write what `run`, the result, makes of the same samples."""
        self.progress(f"running the result in {framework}")
        self._run("result", run)

    def write_inputs(self, inputs: Sequence[TensorInfo]) -> None:
        """Write `inputs-0.npz` and so on, the recorded samples first."""
        samples = [recorded_sample(path, inputs) for path in self.recorded]
        random = np.random.default_rng(self.seed)
        for index in range(self.count):
            # Two sizes of the batch, in turn: a result that has lost the open one is found out.
            batch = 1 + index % 2
            samples.append(
                {each["name"]: _random(each, batch, random, self.sizes) for each in inputs}
            )
        for index, sample in enumerate(samples):
            self._write("inputs", index, sample)

    def _run(self, which: str, run: Callable[[Arrays], Mapping[str, NDArray[Any]]]) -> None:
        """Write `<which>-N.npz`, the outputs of `run`, for each `inputs-N.npz`."""
        for index in range(len(list(Path(self.samples).glob("inputs-*.npz")))):
            outputs = run(read(self.samples, "inputs", index))
            self._write(which, index, {name: _plain(array) for name, array in outputs.items()})

    def _write(self, which: str, index: int, arrays: Mapping[str, NDArray[Any]]) -> None:
        path = Path(self.samples) / f"{which}-{index}.npz"
        # A name of its own for each, as savez's first argument is called `file`.
        np.savez(path, **{f"array.{name}": array for name, array in arrays.items()})  # type: ignore[arg-type]  # of keywords


def info(name: str, dtype: Any, shape: Sequence[Any]) -> TensorInfo:
    """Return the tensor with that numpy type (None for texts); whatever is no size becomes -1."""
    sizes = [d if isinstance(d, int) and d >= 0 else -1 for d in shape]
    return {
        "name": name,
        "datatype": TEXT if dtype is None else np.dtype(dtype).name,
        "shape": sizes,
    }


def read(folder: str | Path, which: str, index: int) -> dict[str, NDArray[Any]]:
    """Return the arrays of one file that a `StepJob` wrote."""
    with np.load(Path(folder) / f"{which}-{index}.npz", allow_pickle=False) as arrays:
        return {key.partition(".")[2]: arrays[key] for key in arrays.files}


def recorded_sample(path: str, inputs: Sequence[TensorInfo]) -> dict[str, NDArray[Any]]:
    """Return the inputs in a file of arrays, with a batch dimension where the model has one.

    Args:
        path: `.npz` with arrays `<name>` or `input.<name>`; `.npy` for a model of one input.
        inputs: the tensors of the model.

    Raises:
        InvalidRequest: the file cannot be used for this model.
    """
    try:
        # Opened here, as numpy leaves a damaged file open.
        with Path(path).open("rb") as file:
            loaded = np.load(file, allow_pickle=False)
            if isinstance(loaded, np.ndarray):
                found = {inputs[0]["name"]: loaded} if len(inputs) == 1 else {}
            else:
                found = {key.removeprefix("input."): loaded[key] for key in loaded.files}
    except (OSError, ValueError, EOFError, BadZipFile) as error:
        raise InvalidRequest(
            f"{path}: is no file of arrays: {error}; write it with numpy.savez"
        ) from None
    missing = [each["name"] for each in inputs if each["name"] not in found]
    if missing:
        raise InvalidRequest(
            f"{path}: has no array for input {', '.join(missing)}; write it with "
            f"numpy.savez({Path(path).stem!r}, **{{'input.{missing[0]}': array}})"
        )
    return {each["name"]: _fitting(path, each, found[each["name"]]) for each in inputs}


def recorded_samples(
    paths: Sequence[str], inputs: Sequence[TensorInfo]
) -> Iterator[dict[str, NDArray[Any]]]:
    """Yield the sample of each file; one is in memory at a time."""
    for path in paths:
        yield recorded_sample(path, inputs)


def _fitting(path: str, tensor: TensorInfo, array: NDArray[Any]) -> NDArray[Any]:
    if tensor["datatype"] != TEXT and array.dtype.name != tensor["datatype"]:
        raise InvalidRequest(
            f"{path}: input {tensor['name']} is {array.dtype.name}, the model takes "
            f"{tensor['datatype']}; record it with that type"
        )
    if array.ndim == len(tensor["shape"]) - 1:
        array = array[np.newaxis]
    fits = array.ndim == len(tensor["shape"]) and all(
        wanted in (-1, size) for wanted, size in zip(tensor["shape"], array.shape, strict=True)
    )
    if not fits:
        raise InvalidRequest(
            f"{path}: input {tensor['name']} has shape {array.shape}, the model takes "
            f"{tuple(tensor['shape'])}"
        )
    return np.ascontiguousarray(array)


def _random(
    tensor: TensorInfo,
    batch: int,
    random: np.random.Generator,
    sizes: Mapping[str, Sequence[int]],
) -> NDArray[Any]:
    shape = [
        size if size >= 0 else batch if place == 0 else OPEN_SIZE
        for place, size in enumerate(tensor["shape"])
    ]
    given = sizes.get(tensor["name"], shape)
    shape = [size if wanted < 0 else wanted for wanted, size in zip(given, shape, strict=True)]
    if tensor["datatype"] == TEXT:
        return np.array(random.integers(0, 10, shape).astype(str))
    dtype = np.dtype(tensor["datatype"])
    if dtype.kind == "f":
        values: NDArray[Any] = random.random(shape, np.float32)
    elif dtype.kind == "b":
        values = random.integers(0, 2, shape)
    else:
        # Small, because an index or a class is: 0 to 9; but the whole range of an image's bytes.
        values = random.integers(0, 256 if dtype == np.uint8 else 10, shape)
    return values.astype(dtype)


def _plain(made: Any) -> NDArray[Any]:
    """Return the array with texts as numpy's own, which a file holds without pickling."""
    array: NDArray[Any] = np.asarray(made)
    if array.dtype.kind != "O":
        return array
    texts = [
        t.decode("utf-8", "surrogateescape") if isinstance(t, bytes) else t for t in array.flat
    ]
    return np.array(texts, str).reshape(array.shape)
