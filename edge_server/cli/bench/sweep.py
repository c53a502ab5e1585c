"""Measures a model with other instance counts, batching delays and backends; recommends one."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import product
from typing import TYPE_CHECKING, Any

from google.protobuf import json_format, text_format
from tritonclient.grpc import model_config_pb2 as pb

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from edge_server.cli.bench.windows import Measurement
    from edge_server.model_config.config import ModelConfig

# What differs by less is the noise of a measurement.
WORTH = 0.05
# Triton's execution accelerators of a GPU; any other is one of the processor.
_OF_A_GPU = ("tensorrt", "cuda")


@dataclass(frozen=True)
class ModelVariant:
    """Settings of a model; None leaves that one as the repository has it.

    Attributes:
        delay_us: the longest that a request waits for others of its batch.
        backend: its name, or with an execution accelerator `onnxruntime+cuda`.
    """

    instances: int | None = None
    delay_us: int | None = None
    backend: str | None = None

    def __str__(self) -> str:
        parts = [self.backend] if self.backend else []
        if self.instances:
            parts.append(f"{self.instances} instance{'s' if self.instances > 1 else ''}")
        if self.delay_us is not None:
            parts.append(f"batches wait {self.delay_us} us")
        return ", ".join(parts) or "as it is"

    def apply(self, message: Any) -> Any:
        """Return the configuration `message` with these settings."""
        changed = pb.ModelConfig()
        changed.CopyFrom(message)
        if self.backend not in (None, message.backend):
            self._change_backend(changed)
        if self.instances is not None:
            del changed.instance_group[1:]
            if not changed.instance_group:
                changed.instance_group.add()
            changed.instance_group[0].count = self.instances
        if self.delay_us is not None:
            changed.dynamic_batching.max_queue_delay_microseconds = self.delay_us
        return changed

    def _change_backend(self, changed: Any) -> None:
        name, _, accelerator = (self.backend or "").partition("+")
        if name != changed.backend:
            changed.backend = name
            # Names of files are those of the other backend.
            changed.platform = changed.default_model_filename = ""
        # Devices are chosen anew.
        del changed.instance_group[:]
        changed.ClearField("optimization")
        if name == "tensorrt":
            changed.parameters["auto_build"].string_value = "true"
        if accelerator:
            accelerators = changed.optimization.execution_accelerators
            if accelerator in _OF_A_GPU:
                accelerators.gpu_execution_accelerator.add(name=accelerator)
                changed.instance_group.add(kind=pb.ModelInstanceGroup.KIND_GPU)
            else:
                accelerators.cpu_execution_accelerator.add(name=accelerator)

    def snippet(self, message: Any) -> str:
        """Return what to write into config.pbtxt: the fields in which `message` changes."""
        changed = self.apply(message)
        lines = []
        if changed.backend != message.backend:
            lines.append(f'backend: "{changed.backend}"')
        if "auto_build" in changed.parameters and "auto_build" not in message.parameters:
            lines.append('parameters { key: "auto_build" value { string_value: "true" } }')
        if changed.optimization != message.optimization and changed.HasField("optimization"):
            optimization = text_format.MessageToString(changed.optimization, as_one_line=True)
            lines.append(f"optimization {{ {optimization} }}")
        if self.instances is not None:
            kind = pb.ModelInstanceGroup.Kind.Name(changed.instance_group[0].kind)
            kind_text = "" if kind == "KIND_AUTO" else f"kind: {kind} "
            lines.append(f"instance_group [ {{ {kind_text}count: {self.instances} }} ]")
        if self.delay_us is not None:
            delay = f"max_queue_delay_microseconds: {self.delay_us}"
            lines.append(f"dynamic_batching {{ {delay} }}")
        return "\n".join(lines)


@dataclass(frozen=True)
class VariantResult:
    """What was measured of a variant.

    Attributes:
        resident_bytes: memory of the daemon that ran it.
        failure: why there are no measurements, or no more.
    """

    variant: ModelVariant
    measurements: tuple[Measurement, ...] = ()
    resident_bytes: int | None = None
    failure: str = ""


@dataclass(frozen=True)
class Recommendation:
    """The variant to take, and the measurement that speaks for it; `gain` is a share of the
    throughput of the model as it is, None where that cannot be compared."""

    result: VariantResult
    measurement: Measurement
    gain: float | None


def variants(
    config: ModelConfig,
    instances: Sequence[int],
    delays_us: Sequence[int],
    backends: Sequence[str] | None,
) -> Iterator[ModelVariant]:
    """Yield the model as it is, and then every combination; no delays of a model that does not
    batch."""
    yield ModelVariant()
    batches = config.max_batch_size > 1
    delays: list[int | None] = [None, *delays_us] if batches else [None]
    names: Sequence[str | None] = backends or (None,)
    for backend, count, delay_us in product(names, instances, delays):
        variant = ModelVariant(count, delay_us, backend)
        same = variant.apply(config.message) == config.message
        if not same:
            yield variant


def as_json(message: Any) -> str:
    """Return a configuration as a load request carries it."""
    return str(json_format.MessageToJson(message, preserving_proto_field_name=True))


def recommend(results: Sequence[VariantResult], budget_ms: float | None) -> Recommendation | None:
    """Return the variant with the highest throughput; None where none is within the budget.

    Of variants that differ by `WORTH` at most, it is the one as it is, then the one with fewer
    instances, then the one with the lower 99th percentile.

    Args:
        results: the first one is of the model as it is.
        budget_ms: the 99th percentile may be so high.
    """
    fitting = [
        (result, each)
        for result in results
        for each in result.measurements
        if not each.failed and (budget_ms is None or each.latency.percentiles[99] <= budget_ms)
    ]
    if not fitting:
        return None
    fastest = max(each.per_s for _, each in fitting)
    close = [pair for pair in fitting if pair[1].per_s >= fastest * (1 - WORTH)]

    def rank(pair: tuple[VariantResult, Measurement]) -> tuple[Any, ...]:
        variant = pair[0].variant
        is_changed = variant != ModelVariant()
        return is_changed, variant.instances or 0, pair[1].latency.percentiles[99]

    result, measurement = min(close, key=rank)
    before = max((each.per_s for r, each in fitting if r is results[0]), default=None)
    gain = None if before is None else measurement.per_s / before - 1
    return Recommendation(result, measurement, gain)
