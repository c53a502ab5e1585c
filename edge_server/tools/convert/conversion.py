"""Runs the steps of a conversion in their interpreters, and compares the result with its source."""

from __future__ import annotations

import shlex
import shutil
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from edge_server.errors import InternalError, InvalidRequest
from edge_server.process.child import ChildFailed, run_in_child
from edge_server.tensors import DataType
from edge_server.tools.convert.formats import (
    DESTINATIONS,
    ONNX,
    OPENVINO,
    SIMPLIFIER,
    SOURCES,
    SourceModel,
    interpreter_having,
    paddle_program,
    write_model,
)
from edge_server.tools.convert.steps.step import read as read_sample

if TYPE_CHECKING:
    import argparse
    from collections.abc import Callable, Iterator, Mapping, Sequence

    from numpy.typing import NDArray

    from edge_server.tools.convert.formats import FrameworkPackages, SourceFormat

# Quiet libraries: their notes on start are of no use here, and one of them sends telemetry.
_QUIET = {
    "ORT_DISABLE_TELEMETRY": "1",
    "TF_CPP_MIN_LOG_LEVEL": "3",
    "TF_ENABLE_ONEDNN_OPTS": "0",
    "CUDA_VISIBLE_DEVICES": "",
}


def run_step(
    python: Path,
    step: tuple[str, str],
    job: Mapping[str, Any],
    options: Mapping[str, Any],
    progress: Callable[[str], None],
    *,
    verbose: bool,
) -> dict[str, Any]:
    """Run a function of `steps` in `python`; return its result.

    Args:
        step: the module and the function.
        job: the fields of its `StepJob`.
        options: its further arguments, which JSON can carry.
        verbose: show what the framework prints.

    Raises:
        InvalidRequest: the step says why it cannot be done.
        InternalError: the process ended otherwise; with its last words.
    """
    printed = b""

    def on_output(data: bytes) -> None:
        nonlocal printed
        printed = data
        if verbose:
            sys.stderr.buffer.write(data)
            sys.stderr.flush()

    try:
        done: dict[str, Any] = run_in_child(
            "edge_server.tools.convert.steps.step:run",
            *(step, job, options),
            on_event=progress,
            on_output=on_output,
            python=str(python),
            env=_QUIET,
        )
    except InvalidRequest as error:
        hint = "; --verbose shows all that the framework printed" if printed and not verbose else ""
        raise InvalidRequest(f"{error}{hint}") from None
    except ChildFailed as error:
        raise InternalError(f"{'.'.join(step)}: the process {error}") from None
    return done


# The largest error of an output, as a share of the source's largest magnitude in that output.
# FP32: another order of sums. FP16 has 11 bits; INT8 with scales that fit loses some per cent,
# and a network that loses a quarter of its range, as with every operator quantised, is caught.
LIMITS = {"fp32": 1e-4, "fp16": 1e-2, "int8": 5e-2}


@dataclass(frozen=True)
class OutputError:
    """How far an output of the result is from the source's, over all samples.

    Attributes:
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
    """Return the error of each output over `count` samples, `source-N.npz` and `result-N.npz`.

    Args:
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
        yield read_sample(folder, "source", index), read_sample(folder, "result", index)


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


@dataclass(frozen=True)
class Converted:
    """The result of the steps.

    Attributes:
        interface: `inputs` and `outputs` of the result.
        samples: number of inputs that both were run on.
    """

    interface: dict[str, Any]
    samples: int
    lines: Sequence[str]


class Conversion:
    """The stages of one conversion, whose files lie in `scratch`."""

    def __init__(
        self,
        arguments: argparse.Namespace,
        source: SourceModel,
        source_format: SourceFormat,
        scratch: Path,
        show: Callable[[str], None],
    ) -> None:
        self._arguments = arguments
        self._source = source
        self._format = source_format
        self._scratch = scratch
        self._show = show
        self._pythons: dict[str, Path] = {}
        self._destination = DESTINATIONS[arguments.to]
        self._result = scratch / "result" / self._destination.file
        self.precision = "int8" if arguments.int8 else "fp16" if arguments.fp16 else "fp32"
        self.limit = LIMITS[self.precision] if arguments.limit is None else arguments.limit
        self.samples = scratch / "samples"
        self.recorded = _files(arguments.compare)
        self.samples.mkdir()
        self._result.parent.mkdir()

    def find_interpreters(self) -> None:
        """Find what every stage needs before the first begins."""
        arguments = self._arguments
        self._first_function()
        needed = [self._format.framework, self._destination.framework]
        if arguments.to != "graphdef":
            needed += [ONNX, *[SIMPLIFIER] * arguments.simplify]
        for framework in needed:
            if framework.name not in self._pythons:
                self._pythons[framework.name] = interpreter_having(framework, arguments.python)

    def make(self) -> Converted:
        """Run the stages, and the result on the inputs of the source."""
        lines: list[str] = []
        first = (self._format.module, self._first_function())
        stages = [(self._format.framework, first, dict[str, Any]()), *self._stages()]
        path = Path(self._source.path)
        if self._format is SOURCES["paddle"]:
            path = paddle_program(path) or path
        shown = str(path)
        for index, (framework, step, options) in enumerate(stages):
            is_last = index == len(stages) - 1
            after = self._result if is_last else self._scratch / f"{index}.onnx"
            done = self._step(framework, step, path, after, **options)
            lines += _told(done, shown, after.name)
            path, shown = after, after.name
        destination = self._destination
        interface = self._step(destination.framework, destination.runner, path)
        _, left_out = self._source.fields_for(self._destination)
        if left_out:
            lines.append(f"note: {left_out} of the source are for its backend, and are left out")
        return Converted(interface, len(list(self.samples.glob("source-*.npz"))), lines)

    def write(self, made: Converted, name: str) -> Path:
        """Return the model's new directory, which has everything but a plan."""
        arguments, source = self._arguments, self._source
        labels = dict(source.labels)
        if arguments.labels is not None:
            labels = {made.interface["outputs"][0]["name"]: arguments.labels}
        batch = source.max_batch_size if arguments.max_batch is None else arguments.max_batch
        directory = self._scratch / "repository" / name
        directory.mkdir(parents=True)
        version = write_model(
            directory,
            arguments.version,
            self._destination.fields,
            made.interface["inputs"],
            made.interface["outputs"],
            labels=labels,
            max_batch_size=batch,
            more=source.fields_for(self._destination)[0],
        )
        for path in self._result.parent.iterdir():
            shutil.move(path, version / path.name)
        return directory

    def interpreter(self) -> tuple[FrameworkPackages, Path]:
        """Return what runs the result, and an interpreter that has it."""
        framework = self._destination.framework
        return framework, self._pythons[framework.name]

    def _stages(self) -> Iterator[tuple[FrameworkPackages, tuple[str, str], dict[str, Any]]]:
        """Yield what is done to the ONNX file of the source."""
        arguments = self._arguments
        if arguments.simplify:
            yield SIMPLIFIER, ("onnx_models", "simplify"), {}
        if arguments.int8:
            options = {
                "operators": arguments.int8_operators,
                "calibration": _files(arguments.calibration),
                "per_channel": not arguments.per_tensor,
            }
            yield ONNX, ("onnx_models", "to_int8"), options
        if arguments.fp16 and arguments.to != "openvino":
            yield ONNX, ("onnx_models", "to_fp16"), {}
        if arguments.to == "openvino":
            yield OPENVINO, ("openvino_models", "from_onnx"), {"half": arguments.fp16}

    def _first_function(self) -> str:
        to = "graphdef" if self._arguments.to == "graphdef" else "onnx"
        if to not in self._format.functions:
            raise InvalidRequest(
                f"--to {to}: {self._format.text} is not converted to that; leave out --to for ONNX"
            )
        return self._format.functions[to]

    def _step(
        self,
        framework: FrameworkPackages,
        step: tuple[str, str],
        source: Path,
        target: Path | None = None,
        **options: Any,
    ) -> dict[str, Any]:
        arguments, model = self._arguments, self._source
        given = arguments.input or model.inputs
        job = {
            "source": str(source),
            "target": str(target or ""),
            "samples": str(self.samples),
            "count": arguments.samples,
            "seed": arguments.seed,
            "recorded": self.recorded,
            "sizes": {name: shape for name, _, shape in arguments.input if name},
            "inputs": [
                (name, kind and DataType(kind).numpy.name, shape) for name, kind, shape in given
            ],
            "outputs": arguments.outputs or model.outputs,
            "signature": arguments.signature or model.parameters.get("TF_SIGNATURE_DEF", ""),
            "trust": arguments.trust,
            "module": arguments.module or "",
            "module_args": arguments.module_args or "",
            "module_path": arguments.module_path or "",
        }
        python = self._pythons[framework.name]
        return run_step(python, step, job, options, self._show, verbose=arguments.verbose)


def _files(paths: Sequence[Path]) -> list[str]:
    """Return the files of arrays at `paths`, those of a directory sorted."""
    found: list[str] = []
    for path in paths:
        files = [path]
        if path.is_dir():
            files = sorted((*path.rglob("*.npz"), *path.rglob("*.npy")))
        if not files or not files[0].is_file():
            raise InvalidRequest(f"{path}: no .npz or .npy file is there")
        found += map(str, files)
    return found


def _told(done: dict[str, Any], source: str, target: str) -> Iterator[str]:
    """Yield the public tool's command line that does the same, and the step's note."""
    if "command" in done:
        places = {"{source}": source, "{target}": target, "{folder}": str(Path(source).parent)}
        yield f"the same with: {shlex.join(places.get(each, each) for each in done['command'])}"
    if "note" in done:
        yield done["note"]
