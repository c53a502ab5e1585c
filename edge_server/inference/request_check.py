"""Checks a request against its model's configuration; the error texts are Triton's."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

from edge_server.errors import InvalidRequest
from edge_server.requests import log_prefix
from edge_server.tensors import shape_text

if TYPE_CHECKING:
    from collections.abc import Collection, Mapping, Set

    from edge_server.model_config.config import ModelConfig
    from edge_server.requests import InferRequest
    from edge_server.tensors import DataType

_VERSION = re.compile(r"-?[0-9]{1,18}\Z")
_BATCH_NOTE = (
    "NOTE: Setting a non-zero max_batch_size in the model config requires a batch dimension to be "
    "prepended to each input shape. If you want to specify the full shape including the batch dim "
    "in your input dims config, try setting max_batch_size to zero. See the model configuration "
    "docs for more info on max_batch_size."
)


def check_request(config: ModelConfig, request: InferRequest) -> None:
    """Raise InvalidRequest where names, types or shapes differ from the model's."""
    # Most requests have every input, with the type and shape that the model states; of the others
    # the checks of each find what is wrong, if anything is.
    inputs = request.inputs
    if inputs.keys() != config.input_names or not config.output_names.issuperset(request.outputs):
        return _check_each(config, request)
    batch_sizes = set()
    for name, (datatype, expected, fixed) in config.full_inputs.items():
        array = inputs[name].array
        if array.dtype != datatype.numpy or len(array.shape) != len(expected):
            return _check_each(config, request)
        if [at for at, size in fixed if array.shape[at] != size]:
            return _check_each(config, request)
        batch_sizes.add(array.shape[0] if expected else 0)
    most = config.max_batch_size
    if most and not (len(batch_sizes) == 1 and 1 <= batch_sizes.pop() <= most):
        _check_each(config, request)
    return None


def _check_each(config: ModelConfig, request: InferRequest) -> None:
    inputs = request.inputs
    check_names(config, request.id, inputs.keys(), request.outputs)
    batch_sizes = {
        spec.name: check_tensor(
            config, request.id, spec.name, inputs[spec.name].datatype, inputs[spec.name].shape
        )
        for spec in config.inputs
        if spec.name in inputs
    }
    check_batch_sizes(config, request.id, batch_sizes)


def check_batch_sizes(config: ModelConfig, request_id: str, batch_sizes: Mapping[str, int]) -> None:
    """Raise InvalidRequest where the inputs' batch sizes differ, or the model takes none of that
    size."""
    if config.max_batch_size == 0 or not batch_sizes:
        return
    first = next(iter(batch_sizes.values()))
    for name, batch_size in batch_sizes.items():
        if batch_size != first:
            raise InvalidRequest(
                f"{log_prefix(request_id)}input '{name}' batch size does not match other inputs "
                f"for '{config.name}'"
            )
    if not 1 <= first <= config.max_batch_size:
        raise InvalidRequest(
            f"{log_prefix(request_id)}inference request batch-size must be "
            f"{'<=' if first else '>= 1 and <='} {config.max_batch_size} for '{config.name}'"
        )


def check_names(
    config: ModelConfig, request_id: str, inputs: Set[str], outputs: Collection[str]
) -> None:
    """Raise InvalidRequest where an input is missing, or a name is unknown to the model."""
    if inputs == config.input_names and config.output_names.issuperset(outputs):
        return
    for name in outputs:
        if name not in config.output_names:
            raise InvalidRequest(f"unexpected inference output '{name}' for model '{config.name}'")
    missing = [spec.name for spec in config.inputs if not spec.optional and spec.name not in inputs]
    known = config.input_names
    least = sum(not spec.optional for spec in config.inputs)
    most, got = len(known), len(inputs)
    unexpected = [name for name in inputs if name not in known]
    # The count is compared first: a wrong name among the right number is "unexpected".
    if not least <= got <= most or (missing and not unexpected):
        expected = f"{most} inputs"
        if least < most:
            expected = f"number of inputs between {least} and {most}"
        raise InvalidRequest(
            f"{log_prefix(request_id)}expected {expected} but got {got} inputs for model "
            f"'{config.name}'. Got input(s) {_names(inputs)}, but missing required "
            f"input(s) {_names(missing)}. Please provide all required input(s)."
        )
    for name in unexpected:
        raise InvalidRequest(f"unexpected inference input '{name}' for model '{config.name}'")


def check_tensor(
    config: ModelConfig, request_id: str, name: str, datatype: DataType, shape: tuple[int, ...]
) -> int:
    """Return the batch size of the input `name`, 0 where the model does not batch; raise
    InvalidRequest where it takes another type or shape."""
    expected_type, expected, fixed = config.full_inputs[name]
    if datatype is not expected_type:
        raise InvalidRequest(
            f"{log_prefix(request_id)}inference input '{name}' data-type is "
            f"'{datatype.value}', but model '{config.name}' expects "
            f"'{expected_type.value}'"
        )
    batched = config.max_batch_size > 0
    if batched and not shape:
        raise InvalidRequest(
            f"{log_prefix(request_id)}input '{name}' has no shape but model requires batch "
            f"dimension for '{config.name}'"
        )
    # As `shape_fits`: every request comes by here.
    if len(shape) != len(expected) or [at for at, size in fixed if shape[at] != size]:
        raise InvalidRequest(
            f"{log_prefix(request_id)}unexpected shape for input '{name}' for model "
            f"'{config.name}'. Expected {shape_text(expected)}, got {shape_text(shape)}. "
            f"{_BATCH_NOTE if batched else ''}"
        )
    return shape[0] if batched else 0


def parse_version(text: str) -> int:
    """Parse a version as the protocol spells it: decimal digits that fit 64 bits; raise
    InvalidRequest where that is no integral value > 0 (Triton's texts)."""
    if not _VERSION.match(text):
        raise InvalidRequest(
            f"failed to get model version from specified version string '{text[:32]}' (details: "
            "stol), version should be an integral value > 0"
        )
    if text.startswith(("-", "0")):
        raise InvalidRequest(
            f"invalid model version specified '{text}' , version should be an integral value > 0"
        )
    return int(text)


def _names(names: object) -> str:
    return "[" + ",".join(f"'{name}'" for name in names) + "]"  # type: ignore[attr-defined]
