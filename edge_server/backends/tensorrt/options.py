"""Options in a model's configuration for running its plan."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

from tritonclient.grpc import model_config_pb2 as pb

from edge_server.backends.parameters import Parameters
from edge_server.board.jetson import NVDLA_SUPPORT
from edge_server.errors import ModelConfigError
from edge_server.model_config.files import is_file_name

if TYPE_CHECKING:
    from pathlib import Path

    from edge_server.model_config.config import ModelConfig


_PRIORITIES: dict[int, Literal["max", "min"]] = {
    pb.ModelOptimizationPolicy.PRIORITY_MAX: "max",
    pb.ModelOptimizationPolicy.PRIORITY_MIN: "min",
}
# Triton's text.
NOT_ON_A_GPU = "unable to load model '{model}', TensorRT backend supports only GPU device"


class TensorRtParameters(Parameters, frozen=True):
    """The parameters that the docstring of `backend` lists."""

    dla_fallback: Literal["", "gpu"] = ""
    mapped_memory: bool = True
    auto_build: bool = False


def plan_name(config: ModelConfig, compute_capability: str) -> str:
    """Return the plan's file for a GPU of that capability, `8.7`: `cc_model_filenames` may name
    one."""
    names = config.message.cc_model_filenames
    found: str = names.get(compute_capability) or config.default_model_filename
    if not is_file_name(found):
        raise ModelConfigError(
            f"model '{config.name}': cc_model_filenames: '{found}' leaves the version directory; "
            "give a plain file name"
        )
    return found


def on_gpu_alone(plan: Path) -> Path:
    """Return `model.gpu.plan`, which replaces `model.plan` on a device without its NVDLA core."""
    return plan.with_suffix(f".gpu{plan.suffix}")


def no_such_core(core: int, cores: int, tensorrt: str) -> str:
    """Return the text for a missing core; its first part is Triton's."""
    return (
        f"unable to create TensorRT runtime with DLA Core ID: {core}, available number of DLA "
        f"cores: {cores}; TensorRT {tensorrt}. {NVDLA_SUPPORT}. Take secondary_devices out of the "
        "instance_group and build the plan for the GPU, or allow that with the parameter "
        "dla_fallback"
    )


@dataclass(frozen=True)
class Options:
    """Execution options of one model's instances.

    Attributes:
        mapped: inputs and outputs lie in host memory that the GPU accesses, where it can.
        pinned_inputs, pinned_outputs: copies go through pinned memory.
        graphs: batches run as CUDA graphs, where possible.
        busy_wait: a thread that waits for the GPU busy-waits instead of sleeping.
        priority: of the runs among all work of the GPU; empty is the default. Recorded runs always
            have the default.
        copy_stream: outputs are copied to the host on a separate stream.
        batched: tensors have a leading batch dimension.
    """

    mapped: bool = True
    pinned_inputs: bool = True
    pinned_outputs: bool = True
    graphs: bool = False
    busy_wait: bool = False
    priority: Literal["", "max", "min"] = ""
    copy_stream: bool = False
    batched: bool = False

    @staticmethod
    def of(config: ModelConfig, parameters: TensorRtParameters) -> Options:
        optimization = config.message.optimization
        return Options(
            mapped=parameters.mapped_memory,
            pinned_inputs=optimization.input_pinned_memory.enable,
            pinned_outputs=optimization.output_pinned_memory.enable,
            graphs=optimization.cuda.graphs,
            busy_wait=optimization.cuda.busy_wait_events,
            priority=_PRIORITIES.get(optimization.priority, ""),
            copy_stream=optimization.cuda.output_copy_stream,
            batched=config.max_batch_size > 0,
        )
