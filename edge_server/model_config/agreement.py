"""Completes a model's configuration from the signature in its file, and checks both agree.

The texts are Triton's; every model whose file has names, types and shapes is completed here.
"""

from __future__ import annotations

import logging
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from tritonclient.grpc import model_config_pb2 as pb

from edge_server.errors import ModelConfigError
from edge_server.model_config.completion import complete_scheduling
from edge_server.model_config.config import ModelConfig
from edge_server.model_config.interface import unified
from edge_server.tensors import DataType, TensorSpec, shape_text

if TYPE_CHECKING:
    from collections.abc import Iterable

    from edge_server.model_config.files import ModelFiles

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Signature:
    """A model's tensors in the file's order; the batch dimension is included.

    Attributes:
        with_defaults: inputs for which the file has default values; they count as inputs of the
            model where the configuration names them.
    """

    inputs: tuple[TensorSpec, ...]
    outputs: tuple[TensorSpec, ...]
    with_defaults: tuple[TensorSpec, ...] = ()


def complete_from(files: ModelFiles, config: ModelConfig, signature: Signature) -> ModelConfig:
    """Return `config` completed from `signature`; what `config` does give must agree with it.

    A model batches where every tensor's first dimension is free. If the configuration then has no
    `max_batch_size` it gets the default one, with dynamic batching; but a configuration that gives
    any tensor's dims with the batch dimension, or an optional input, describes a model that does
    not batch. (0 and "not given" are the same in the protocol.) A model that was exported for a
    batch of exactly 1 agrees with `max_batch_size: 1`.

    Controls and states of the sequence batcher are among the model's tensors but not among the
    configuration's inputs and outputs.

    Raises:
        ModelConfigError: configuration and signature disagree.
    """
    agreement = _SignatureCheck(files, config, signature)
    message = pb.ModelConfig()
    message.CopyFrom(config.message)
    message.max_batch_size = agreement.max_batch_size()
    if (
        config.completion.auto
        and message.max_batch_size > 1
        and not message.WhichOneof("scheduling_choice")
    ):
        message.dynamic_batching.SetInParent()
    complete_scheduling(message)
    batched = ModelConfig.of(message, config.completion)
    agreement = _SignatureCheck(files, batched, signature)
    return batched.with_io(agreement.inputs(), agreement.outputs())


class _SignatureCheck:
    """Compares one configuration with one signature, one aspect per method."""

    def __init__(self, files: ModelFiles, config: ModelConfig, signature: Signature) -> None:
        self._path = files.config_path
        self._config = config
        self._signature = signature
        sequences = config.sequence_batching
        controls = sequences.controls if sequences else ()
        self._states = sequences.states if sequences else ()
        # Input → the datatype of the sequence batcher for it.
        self._filled_in = {c.input_name: c.datatype for c in controls} | {
            s.input_name: s.datatype for s in self._states
        }
        self._carried_on = {s.output_name: s.datatype for s in self._states}

    def max_batch_size(self) -> int:
        config, real = self._config, (*self._signature.inputs, *self._signature.outputs)
        size = config.max_batch_size
        fixed = [spec for spec in real if spec.shape[:1] != (-1,)]
        if size == 1:
            fixed = [spec for spec in fixed if spec.shape[:1] != (1,)]
        if size > 0 and fixed:
            raise self._no_batching(fixed[0])
        if size > 0 or fixed or not config.completion.auto or self._means_no_batching():
            return size
        size = max(0, config.completion.default_max_batch_size)
        log.warning(
            "model %s: max_batch_size set to %d, since the model batches and the configuration "
            "does not say; give it to batch more, or the tensors' dims in full to batch nothing",
            config.name,
            size,
        )
        return size

    def _no_batching(self, spec: TensorSpec) -> ModelConfigError:
        name, shape = self._config.name, shape_text(spec.shape)
        if self._config.completion.auto:
            return ModelConfigError(
                f"{self._path}: autofill failed for model '{name}': model does not support "
                f"batching while non-zero max_batch_size is specified; tensor '{spec.name}' has "
                f"shape {shape}: set max_batch_size to 0, or export with a free first dimension"
            )
        return ModelConfigError(
            f"{self._path}: model '{name}', tensor '{spec.name}': for the model to support "
            "batching the shape should have at least 1 dimension and the first dimension must be "
            f"-1; but shape expected by the model is {shape}"
        )

    def _means_no_batching(self) -> bool:
        message = self._config.message
        if any(t.optional for t in message.input) or any(
            s.optional for s in self._signature.inputs
        ):
            return True
        for said, real in (
            (message.input, self._signature.inputs),
            (message.output, self._signature.outputs),
        ):
            ranks = {spec.name: len(spec.shape) for spec in real}
            for tensor in said:
                dims = tensor.reshape.shape if tensor.HasField("reshape") else tensor.dims
                if tensor.dims and ranks.get(tensor.name) == len(dims):
                    return True
        return False

    def inputs(self) -> list[TensorSpec]:
        named = {tensor.name for tensor in self._config.message.input}
        defaults = [spec for spec in self._signature.with_defaults if spec.name in named]
        return self._agreed(
            "input",
            self._config.message.input,
            [*self._signature.inputs, *defaults],
            self._filled_in,
        )

    def outputs(self) -> list[TensorSpec]:
        said, real = self._config.message.output, self._signature.outputs
        return self._agreed("output", said, real, self._carried_on)

    def _agreed(
        self,
        kind: str,
        said: Iterable[Any],
        real: Iterable[TensorSpec],
        batchers: dict[str, DataType],
    ) -> list[TensorSpec]:
        """The model's tensors in the file's order; a free size on one side is fixed by the other.

        Tensors of the sequence batcher are hidden, except a state that the configuration names
        among its outputs, so that clients can read it.
        """
        model = f"unable to load model '{self._config.name}', "
        found = {spec.name: spec for spec in real}
        for name, datatype in batchers.items():
            self._check_name(kind, name, found)
            self._check_type(kind, name, datatype, found[name].datatype)
        self._check_states(kind, found)
        tensors = {tensor.name: tensor for tensor in said}
        shown = {n: spec for n, spec in found.items() if n in tensors or n not in batchers}
        count = len(tensors)
        if count > len(shown) or (count < len(shown) and not self._config.completion.auto):
            raise self._error(
                f"{model}configuration expects {count} {kind}s, model provides {len(shown)}"
            )
        for name in tensors:
            self._check_name(kind, name, shown)
        return [
            self._agreed_tensor(kind, tensors[name], spec)
            if name in tensors
            else replace(spec, shape=self._unbatched(spec))
            for name, spec in shown.items()
        ]

    def _agreed_tensor(self, kind: str, said: Any, real: TensorSpec) -> TensorSpec:
        if kind == "input":
            self._check_optional(said, real)
        if said.data_type != pb.TYPE_INVALID:
            datatype = DataType.from_config(pb.DataType.Name(said.data_type))
            self._check_type(kind, said.name, datatype, real.datatype)
        shape, dims = self._unbatched(real), tuple(said.dims)
        reshaped = said.HasField("reshape") and bool(dims)
        if not dims:
            dims = shape
        agreed = unified(tuple(said.reshape.shape) if reshaped else dims, shape)
        if agreed is None:
            raise self._other_dims(said, real)
        return TensorSpec(said.name, real.datatype, dims if reshaped else agreed)

    def _unbatched(self, spec: TensorSpec) -> tuple[int, ...]:
        return spec.shape[1:] if self._config.max_batch_size > 0 else spec.shape

    def _check_name(self, kind: str, name: str, known: dict[str, TensorSpec]) -> None:
        if name not in known:
            raise self._error(
                f"unexpected inference {kind} '{name}', allowed {kind}s are: {', '.join(known)}"
            )

    def _check_type(self, kind: str, name: str, said: DataType | None, real: DataType) -> None:
        if said is not real:
            raise self._error(
                f"unable to load model '{self._config.name}', configuration expects datatype "
                f"{said.config_name if said else 'TYPE_INVALID'} for {kind} '{name}', model "
                f"provides {real.config_name}"
            )

    def _check_states(self, kind: str, found: dict[str, TensorSpec]) -> None:
        for state in self._states:
            spec = found[state.input_name if kind == "input" else state.output_name]
            if unified(state.shape, self._unbatched(spec)) is None:
                raise self._error(
                    f"model '{self._config.name}', state '{spec.name}': the model has shape "
                    f"{shape_text(spec.shape)} but the configuration has dims "
                    f"{shape_text(state.shape)}"
                )

    def _check_optional(self, said: Any, real: TensorSpec) -> None:
        if said.optional and self._config.max_batch_size > 0:
            raise self._error(
                f"optional input '{said.name}' is not supported for models that support batching"
            )
        if said.optional and not real.optional:
            raise self._error(
                f"input '{said.name}' is optional in the configuration of model "
                f"'{self._config.name}', but the model cannot do without; remove 'optional', or "
                "export the model with a default for it"
            )

    def _other_dims(self, said: Any, real: TensorSpec) -> ModelConfigError:
        dims = tuple(said.reshape.shape if said.HasField("reshape") else said.dims)
        shown = f"(shape {shape_text(dims)})"
        if self._config.max_batch_size > 0:
            dims = (-1, *dims)
            shown = (
                "(an initial batch dimension because max_batch_size > 0 followed by the explicit "
                f"tensor shape, making complete shape {shape_text(dims)})"
            )
        return self._error(
            f"model '{self._config.name}', tensor '{said.name}': the model expects "
            f"{len(real.shape)} dimensions (shape {shape_text(real.shape)}) but the model "
            f"configuration specifies {len(dims)} dimensions {shown}"
        )

    def _error(self, text: str) -> ModelConfigError:
        return ModelConfigError(f"{self._path}: {text}")
