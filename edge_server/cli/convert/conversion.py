"""Converts: source → ONNX or GraphDef → further stages, compared, checked, and placed."""

from __future__ import annotations

import shlex
import shutil
import sys
import tempfile
from dataclasses import dataclass
from json import dumps
from pathlib import Path
from typing import TYPE_CHECKING, Any

from edge_server.backends.convert.comparison import LIMITS, compare
from edge_server.backends.convert.environments import ONNX, OPENVINO, Interpreters
from edge_server.backends.convert.formats import (
    DESTINATIONS,
    SOURCES,
    paddle_program,
    source_format,
)
from edge_server.backends.convert.model_directory import SourceModel, read_source, write_model
from edge_server.backends.convert.run import run_step
from edge_server.cli.convert.acceptance import accept, build_plan
from edge_server.cli.exit_codes import FAILED, OK
from edge_server.errors import InvalidRequest, ModelConfigError
from edge_server.model_config.files import CONFIG_NAME
from edge_server.repository.content import usable_tree
from edge_server.repository.manifest import ABOUT_CONTENT
from edge_server.repository.scan import NAME_RULE, is_model_name
from edge_server.repository.transfer import entries_of, receive

if TYPE_CHECKING:
    import argparse
    from collections.abc import Callable, Iterator, Sequence

    from edge_server.backends.convert.environments import FrameworkPackages
    from edge_server.backends.convert.formats import SourceFormat
    from edge_server.repository.transfer import Entry


def convert(arguments: argparse.Namespace) -> int:
    """Convert as `arguments` say; return the exit code. Nothing is written unless it succeeds.

    Raises:
        ModelConfigError: the source, its configuration or the destination cannot be used.
        InvalidRequest: flags contradict each other, or a framework refuses the source.
        Unavailable: a framework is not installed.
        InternalError: a framework failed.
    """
    source = read_source(arguments.source)
    name = arguments.source_format or source_format(source.path)
    if name == "torch-module" and arguments.module:
        name = "torch-weights"
    target = _free_target(arguments.target, arguments.version)
    _check_flags(arguments, name)
    with tempfile.TemporaryDirectory(prefix="edge-server-convert-") as scratch:
        conversion = _Conversion(arguments, source, SOURCES[name], Path(scratch), _show)
        conversion.find_interpreters()
        made = conversion.make()
        for line in made.lines:
            print(line)
        errors = compare(conversion.samples, made.samples, conversion.limit)
        for error in errors:
            print(error)
        recorded = len(conversion.recorded)
        inputs = f"{made.samples - recorded} random and {recorded} recorded inputs"
        if not all(error.agrees for error in errors):
            print(
                f"edge-server: the result differs from {source.path} on {inputs}; nothing is "
                "written; --limit sets what is allowed",
                file=sys.stderr,
            )
            return FAILED
        print(f"the result agrees with {source.path} on {inputs}")
        directory = conversion.write(made, target.name)
        if arguments.to == "plan":
            build_plan(directory, arguments.version, strongly_typed=conversion.precision != "fp32")
        conversion.accept(directory)
        print(f"{target}: {_place(directory, target, arguments.version)}")
    return OK


@dataclass(frozen=True)
class _Converted:
    """The result of the steps.

    Attributes:
        interface: `inputs` and `outputs` of the result.
        samples: number of inputs that both were run on.
        lines: to print.
    """

    interface: dict[str, Any]
    samples: int
    lines: Sequence[str]


class _Conversion:
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
        """Find what every stage needs before the first begins, which may take minutes.

        Raises:
            InvalidRequest: the source does not become what is wanted.
            Unavailable: a framework is not installed.
        """
        arguments = self._arguments
        self._first_function()
        interpreters = Interpreters(arguments.python, arguments.isolated, self._show)
        needed = [self._format.framework, self._destination.framework]
        if arguments.to != "graphdef":
            needed.append(ONNX)
        for framework in needed:
            if framework.name not in self._pythons:
                self._pythons[framework.name] = interpreters.having(framework)

    def make(self) -> _Converted:
        """Run the stages, and the result on the inputs of the source."""
        lines: list[str] = []
        stages = list(self._stages())
        path, first = self._scratch / "0.onnx", self._destination.file
        if not stages:
            path = self._result
        arguments = self._first_arguments(path)
        shown = arguments["source"]
        done = self._run(self._format, self._first_function(), **arguments)
        lines += _commands(done, shown, first if not stages else "0.onnx")
        for index, (framework, step, options) in enumerate(stages, 1):
            is_last = index == len(stages)
            after = self._result if is_last else self._scratch / f"{index}.onnx"
            done = self._step(framework, step, source=str(path), target=str(after), **options)
            shown, path = path.name, after
            lines += _commands(done, shown, first if is_last else after.name)
        sampling = self._sampling()
        runner = self._destination.runner
        interface = self._step(
            self._destination.framework, runner, path=str(self._result), sampling=sampling
        )
        return _Converted(interface, len(list(self.samples.glob("source-*.npz"))), lines)

    def write(self, made: _Converted, name: str) -> Path:
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
        )
        for path in self._result.parent.iterdir():
            shutil.move(path, version / path.name)
        return directory

    def accept(self, directory: Path) -> None:
        """Hold the model's directory to what `check` asks of it. Raises: see `acceptance`."""
        framework = self._destination.framework
        accept(directory, framework, self._pythons[framework.name], self._show)

    def _stages(self) -> Iterator[tuple[FrameworkPackages, tuple[str, str], dict[str, Any]]]:
        """Yield what is done to the ONNX file of the source."""
        arguments = self._arguments
        if arguments.simplify:
            yield ONNX, ("onnx_models", "simplify"), {}
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

    def _first_arguments(self, target: Path) -> dict[str, Any]:
        arguments, source = self._arguments, self._source
        path = source.path
        if self._format is SOURCES["paddle"]:
            path = paddle_program(path) or path
        found: dict[str, Any] = {"source": str(path), "target": str(target)}
        found["sampling"] = self._sampling()
        outputs = list(arguments.outputs or source.outputs)
        if self._format is SOURCES["keras"]:
            found["trust"] = arguments.trust
        elif self._format is SOURCES["savedmodel"]:
            found["signature"] = arguments.signature or source.parameters.get(
                "TF_SIGNATURE_DEF", ""
            )
        elif self._format is SOURCES["graphdef"]:
            found["outputs"] = outputs
        elif self._format.module == "torch_models":
            found |= {"inputs": arguments.shapes or source.inputs, "outputs": outputs}
        if self._format is SOURCES["torch-module"]:
            found["module_path"] = arguments.module_path
        if self._format is SOURCES["torch-weights"]:
            found["module"] = arguments.module
        return found

    def _sampling(self) -> dict[str, Any]:
        arguments = self._arguments
        return {
            "folder": str(self.samples),
            "count": arguments.samples,
            "seed": arguments.seed,
            "recorded": self.recorded,
            "sizes": {name: shape for name, _, shape in arguments.shapes if name},
        }

    def _run(self, source_format: SourceFormat, function: str, **how: Any) -> dict[str, Any]:
        return self._step(source_format.framework, (source_format.module, function), **how)

    def _step(
        self, framework: FrameworkPackages, step: tuple[str, str], **how: Any
    ) -> dict[str, Any]:
        python = self._pythons[framework.name]
        return run_step(python, step, how, self._show, verbose=self._arguments.verbose)


def _show(text: str) -> None:
    print(f"{text} …", file=sys.stderr, flush=True)


def _check_flags(arguments: argparse.Namespace, source: str) -> None:
    if source == "torch-module" and not arguments.trust:
        raise InvalidRequest(
            f"{arguments.source}: a pickled module or checkpoint; loading a module runs the code "
            "in it: --trust, if you know who wrote it; of a checkpoint give --module FILE.py:CLASS"
        )
    if arguments.fp16 and arguments.int8:
        raise InvalidRequest("--fp16 and --int8: give one of the two")
    if arguments.int8 and not arguments.calibration:
        raise InvalidRequest(
            "--int8 needs the ranges of typical inputs: --calibration PATH with recorded ones"
        )
    if arguments.to == "graphdef" and (arguments.fp16 or arguments.int8 or arguments.simplify):
        raise InvalidRequest("--fp16, --int8 and --simplify are of ONNX; leave out --to graphdef")
    if arguments.to == "openvino" and arguments.int8:
        raise InvalidRequest("--int8: not tested with OpenVINO here; leave out one of the two")
    for flag, path in (("--labels", arguments.labels), ("--module-path", arguments.module_path)):
        if path and not Path(path).exists():
            raise InvalidRequest(f"{flag} {path}: no such file")


def _files(paths: Sequence[Path]) -> list[str]:
    """Return the files of arrays at `paths`, those of a directory sorted.

    Raises:
        InvalidRequest: there are none at one of them.
    """
    found: list[str] = []
    for path in paths:
        files = [path]
        if path.is_dir():
            files = sorted((*path.rglob("*.npz"), *path.rglob("*.npy")))
        if not files or not files[0].is_file():
            raise InvalidRequest(f"{path}: no .npz or .npy file is there")
        found += map(str, files)
    return found


def _commands(done: dict[str, Any], source: str, target: str) -> Iterator[str]:
    """Yield the command lines that do the same without edge_server, and a step's note."""
    places = {
        "{source!r}": dumps(source),
        "{target!r}": dumps(target),
        "{source}": source,
        "{target}": target,
        "{folder}": str(Path(source).parent),
    }
    commands = []
    for command in done.get("commands", ()):
        shown = list(command)
        for mark, text in places.items():
            shown = [argument.replace(mark, text) for argument in shown]
        commands.append(shlex.join(shown))
    if commands:
        yield f"the same with: {' && '.join(commands)}"
    if "note" in done:
        yield done["note"]


def _free_target(target: Path, version: int) -> Path:
    place = target.expanduser().absolute()
    if not is_model_name(place.name):
        raise ModelConfigError(f"{target}: '{place.name}' is no model's name: {NAME_RULE}")
    if (place / str(version)).exists():
        raise ModelConfigError(
            f"{place / str(version)}: is there already; --version N adds another version"
        )
    return place


def _place(directory: Path, target: Path, version: int) -> str:
    """Place the model, with the versions that are there, by one rename; return what was done."""
    tree = usable_tree(directory.parent, directory.name)
    target.parent.mkdir(parents=True, exist_ok=True)
    new = entries_of(tree)
    if not target.exists():
        receive(target.parent, new, target.name)
        return f"version {version} of a new model"
    there = usable_tree(target.parent, target.name)
    paths = {file.path for file in there.files}
    mine = (target / CONFIG_NAME).read_bytes() if CONFIG_NAME in paths else b""
    if mine != (directory / CONFIG_NAME).read_bytes():
        raise ModelConfigError(
            f"{target / CONFIG_NAME}: is another than the one of version {version}:\n"
            f"{(directory / CONFIG_NAME).read_text(encoding='utf-8')}convert into a directory of "
            "its own, and move the version"
        )

    def entries() -> Iterator[Entry]:
        yield from entries_of(there, only=lambda path: path not in ABOUT_CONTENT)
        yield from entries_of(tree, only=lambda path: path.partition("/")[0] == str(version))

    receive(target.parent, entries(), target.name)
    return f"version {version}, beside those that were there"
