"""Validates a freshly loaded model, with golden pairs or made-up data, before it is published."""

from __future__ import annotations

import logging
import math
import statistics
import time
import zipfile
import zlib
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from edge_server.backends.contract import GOLDEN_MAX_LATENCY_MS
from edge_server.errors import (
    EdgeServerError,
    InternalError,
    ModelConfigError,
    ModelLoadError,
    may_pass,
)
from edge_server.inference.dynamic_batch import DynamicBatchScheduler
from edge_server.inference.registry import Snapshot, innermost
from edge_server.inference.request_check import check_request
from edge_server.inference.scheduling import RESPONSE_TIMEOUT_S
from edge_server.model_config.files import GOLDEN_DIRECTORY, reading
from edge_server.model_config.parse import FRAMEWORK_BACKENDS
from edge_server.model_config.scheduling import ControlKind
from edge_server.requests import InferRequest, InferResponse, Reply, SequencePlace
from edge_server.tensors import (
    DataType,
    Tensor,
    as_floats,
    is_finite,
    random_data,
    shape_fits,
    shape_text,
    zeros,
)

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping
    from pathlib import Path

    from numpy.typing import NDArray

    from edge_server.inference.registry import LoadedModel
    from edge_server.model_config.config import ModelConfig
    from edge_server.tensors import TensorSpec

log = logging.getLogger(__name__)

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

# Models of these backends only compute, so made-up data can do no harm.
_CALCULATE = FRAMEWORK_BACKENDS | {"onnxruntime", "tensorrt"}
_LATENCY_RUNS = 5


@dataclass(frozen=True, eq=False)
class GoldenPair:
    """One file `golden/<any>.npz`, as `numpy.savez` writes it: the arrays `input.<name>`, as a
    request carries them, at least one of `output.<name>`, and the scalars `tolerance.<name>`: the
    largest allowed absolute difference of any element of that output."""

    path: Path
    inputs: Mapping[str, Tensor]
    outputs: Mapping[str, Tensor]
    tolerances: Mapping[str, float]


def golden_pairs(config: ModelConfig, version: int, directory: Path) -> Iterator[GoldenPair]:
    """Yield the golden pairs of a version of the model in `directory`, sorted by file name: of
    `golden/<version>` if that exists, otherwise of `golden`. They are read one by one; no code in
    them is executed, and the limits of this file bound their memory. Raises ModelConfigError."""
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
                sizes = [member.file_size for member in archive.infolist()]
            if len(sizes) > MOST_ARRAYS or sum(sizes) > MOST_BYTES:
                raise ModelConfigError(
                    f"{path}: {len(sizes)} arrays of {sum(sizes) >> 20} MiB; a golden pair "
                    f"has at most {MOST_ARRAYS} of {MOST_BYTES >> 20} MiB together"
                )
            with np.load(path, allow_pickle=False) as arrays:
                return dict(arrays)
    # RuntimeError: a password; NotImplementedError: an unknown compression; MemoryError: a header
    # of more than there is.
    except (zipfile.BadZipFile, zlib.error, ValueError, EOFError, RuntimeError, MemoryError) as e:
        raise ModelConfigError(
            f"{path}: is no file of arrays: {e}; write it with numpy.savez"
        ) from e


def not_finite(tensor: Tensor) -> str:
    """Return the value and place of an infinity or NaN in `tensor`, or "" if there is none."""
    if is_finite(tensor):
        return ""
    values = as_floats(tensor)
    at = _place(~np.isfinite(values))
    return f"is {values[at]} at {shape_text(at)}"


def difference(made: Tensor, recorded: Tensor, tolerance: float | None) -> str:
    """Return how `made` differs from `recorded`, or "" if it does not.
    Args: tolerance: the largest allowed absolute difference; None uses `TOLERANCES`."""
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
    return tuple(int(i) for i in np.unravel_index(int(np.argmax(values)), values.shape))


def _shown(tensor: Tensor, at: tuple[int, ...]) -> str:
    return repr(tensor.array.item(at))[:40]


@dataclass(frozen=True)
class ValidationReport:
    """The result of the validation of a model version: with how many golden pairs, the reason why
    not, and the median latency of a request through the scheduler; None if no request ran."""

    golden: int = 0
    not_validated: str = ""
    latency_s: float | None = None

    def __str__(self) -> str:
        if self.not_validated:
            return f"not validated: {self.not_validated}"
        how = f"{self.golden} golden pairs" if self.golden else "made-up data"
        return f"validated with {how}, {1e3 * (self.latency_s or 0):.1f} ms"


def validate(
    model: LoadedModel, directory: Path, on_progress: Callable[[], None] = lambda: None
) -> ValidationReport:
    """Validate `model` before it is published.

    If `directory` holds golden pairs, the model must reproduce each of them: every output finite,
    of the recorded type and shape, and within the tolerance. Without golden pairs, a model of a
    backend that only computes runs on zeros and on random data, the same each time, with every free
    dimension 1. Responses to made-up data show little, so the model is refused only for a type that
    its configuration rules out, a batch without a row for each request, and an output without a
    finite element. If the model has the parameter `golden_max_latency_ms`, the median request must
    not take longer.

    Never returns if the model hangs. Raises ModelConfigError where it must not serve."""
    if model.config.is_ensemble:
        return ValidationReport(not_validated="its members are")
    report = _validate(_Running(model, on_progress), directory)
    log.info("model %s: version %d: %s", model.name, model.version, report)
    return report


def _validate(running: _Running, directory: Path) -> ValidationReport:
    config = running.config
    limit_s = _latency_limit_s(config)
    golden = 0
    for pair in golden_pairs(config, running.version, directory):
        _reproduce(running, pair)
        golden += 1
    not_validated = "" if golden else _try_made_up(running)
    if limit_s is not None:
        if not_validated:
            raise ModelConfigError(
                f"model '{config.name}': parameter {GOLDEN_MAX_LATENCY_MS}: nothing can be "
                f"measured: {not_validated}; record a golden pair, or remove the parameter"
            )
        running.repeat()
    latency_s = statistics.median(running.took_s) if running.took_s and not not_validated else None
    if limit_s is not None and latency_s is not None and latency_s > limit_s:
        # May pass: the machine may be busy with its start.
        raise ModelLoadError(
            f"model '{config.name}': a request takes {1e3 * latency_s:.1f} ms, the median of "
            f"{len(running.took_s)}; parameter {GOLDEN_MAX_LATENCY_MS} allows {1e3 * limit_s:g} ms"
        )
    return ValidationReport(golden, not_validated, latency_s)


class _Running:
    """Sends requests to one model through its own scheduler, past its queue, with an empty registry
    snapshot; only a Python model reaches the models that serve already.
    Attributes: took_s: the latency of each successful request, in seconds."""

    def __init__(self, model: LoadedModel, on_progress: Callable[[], None]) -> None:
        self._on_progress = on_progress
        self.config = model.config
        self.version = model.version
        self.took_s: list[float] = []
        # A cached response would hide the latency of the model; a batcher would wait for company.
        self._scheduler = innermost(model.scheduler)
        if isinstance(self._scheduler, DynamicBatchScheduler):
            self._scheduler = self._scheduler.without_queue()
        self._sequences = 0
        self._last: Mapping[str, Tensor] = {}

    def run(self, inputs: Mapping[str, Tensor]) -> Mapping[str, Tensor]:
        self._last = inputs
        request = InferRequest(self.config.name, inputs, id="validation", sequence=self._sequence())
        check_request(self.config, request)
        reply: Reply[InferResponse] = Reply()
        self._on_progress()
        began_s = time.monotonic()
        self._scheduler.submit(request, Snapshot({}), reply)
        while not reply.is_over(RESPONSE_TIMEOUT_S):
            if self._scheduler.running_since() == math.inf:
                raise InternalError(f"no response within {RESPONSE_TIMEOUT_S:g} s")
        outputs = reply.only().outputs
        self.took_s.append(time.monotonic() - began_s)
        return outputs

    def repeat(self) -> None:
        """Repeat the last request for the median latency, and discard the earlier latencies."""
        self.took_s.clear()
        for _ in range(_LATENCY_RUNS):
            self.run(self._last)

    def _sequence(self) -> SequencePlace | None:
        """Return the place of a request that is a whole sequence; None without sequences."""
        batching = self.config.sequence_batching
        if batching is None:
            return None
        self._sequences += 1
        texts = any(
            control.kind is ControlKind.CORRID and control.datatype is DataType.BYTES
            for control in batching.controls
        )
        number = self._sequences
        return SequencePlace(f"validation-{number}" if texts else number, start=True, end=True)


def _latency_limit_s(config: ModelConfig) -> float | None:
    text = config.parameters.get(GOLDEN_MAX_LATENCY_MS)
    if text is None:
        return None
    try:
        limit_ms = float(text)
    except ValueError:
        limit_ms = 0.0
    if not 0 < limit_ms < np.inf:
        raise ModelConfigError(
            f"model '{config.name}': parameter {GOLDEN_MAX_LATENCY_MS} is '{text}'; give a number "
            "of milliseconds above 0"
        )
    return limit_ms / 1e3


def _reproduce(running: _Running, pair: GoldenPair) -> None:
    try:
        made = running.run(pair.inputs)
    except EdgeServerError as error:
        kind = ModelLoadError if may_pass(error) else ModelConfigError
        raise kind(
            f"{pair.path}: the model does not respond to it: {error}; record the pair with this "
            "model, or fix the model"
        ) from error
    for spec in running.config.outputs:
        name = spec.name
        recorded = pair.outputs.get(name)
        fault = not_finite(made[name])
        if not fault and recorded is not None:
            fault = difference(made[name], recorded, pair.tolerances.get(name))
        if fault:
            raise ModelConfigError(
                f"{pair.path}: output '{name}' {fault}; record the pair with this model, or fix "
                "the model"
            )


def _try_made_up(running: _Running) -> str:
    """Run the model on made-up data; return the reason why that proves nothing, or ""."""
    config = running.config
    if config.backend not in _CALCULATE or config.sequence_batching or config.decoupled:
        return "it has no golden pairs, and data that mean nothing might do harm"
    finite: set[str] = set()
    for make in (zeros, _harmless):
        try:
            made = running.run(_inputs(config, make))
        except EdgeServerError as error:
            return f"it has no golden pairs, and does not take data that mean nothing: {error}"
        for spec in config.outputs:
            fault = _misfit(config, made[spec.name], spec)
            if fault and any(-1 in spec.shape for spec in config.inputs):
                # Some models need more than 1 in a free dimension.
                return f"it has no golden pairs, and of the least input {fault}"
            if fault and not _may_serve(config, made[spec.name], spec):
                raise ModelConfigError(
                    f"model '{config.name}': {fault}; correct config.pbtxt or the model"
                )
            if fault:
                log.warning(
                    "model %s: %s: clients get the shape that the model gives", config.name, fault
                )
        finite.update(name for name, tensor in made.items() if np.isfinite(as_floats(tensor)).any())
    for spec in config.outputs:
        if spec.datatype in TOLERANCES and spec.name not in finite and made[spec.name].array.size:
            raise ModelConfigError(
                f"model '{config.name}': output '{spec.name}' has no finite element, neither for "
                "zeros nor for random data; correct the model, or record a golden pair that shows "
                "what it is good for"
            )
    return ""


def _inputs(config: ModelConfig, make: Callable[..., NDArray[Any]]) -> dict[str, Tensor]:

    return {
        spec.name: Tensor(
            make(spec.datatype, tuple(1 if d == -1 else d for d in config.full_shape(spec)))
        )
        for spec in config.inputs
        if not spec.optional
    }


def _harmless(datatype: DataType, shape: tuple[int, ...]) -> NDArray[Any]:
    """Return random data, with wide integers limited to 0 and 1: they may be counts and sizes, and
    a random one could make a model loop for years or fill the memory."""
    dtype = datatype.numpy
    if dtype.kind in "iu" and dtype.itemsize > 1:
        return np.random.default_rng(0).integers(0, 2, shape).astype(dtype)
    return random_data(datatype, shape)


def _may_serve(config: ModelConfig, tensor: Tensor, spec: TensorSpec) -> bool:
    """Whether requests can be served although `tensor` has another shape than is configured: the
    shape may depend on values (NonZero, NMS), but a batch must have a row for each request."""
    rows = tensor.shape[:1] if config.max_batch_size > 0 else (1,)
    return tensor.datatype is spec.datatype and rows == (1,)


def _misfit(config: ModelConfig, tensor: Tensor, spec: TensorSpec) -> str:
    name = spec.name
    shape = (1, *spec.shape) if config.max_batch_size > 0 else spec.shape
    if tensor.datatype is not spec.datatype:
        return f"output '{name}' is {tensor.datatype.value}, configured as {spec.datatype.value}"
    if not shape_fits(tensor.shape, shape):
        return (
            f"output '{name}' has shape {shape_text(tensor.shape)}, configured as "
            f"{shape_text(shape)}"
        )
    return ""
