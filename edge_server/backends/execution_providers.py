"""ONNX Runtime's execution providers for a model, from `optimization.execution_accelerators`.

As in Triton: `gpu_execution_accelerator` takes `tensorrt` and `cuda`, for instances on a GPU, where
CUDA runs what TensorRT does not; `cpu_execution_accelerator` takes `openvino`. A provider that this
ONNX Runtime lacks is an error: nothing runs on the processor that was to run elsewhere. Operators
that a provider does not know run on the next one, the processor last.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

from edge_server.errors import ModelConfigError

if TYPE_CHECKING:
    from collections.abc import Collection, Iterator, Mapping

    from edge_server.model_config.config import ModelConfig, Placement

CPU = "CPUExecutionProvider"
_CUDA = "CUDAExecutionProvider"
_PROVIDERS = {
    "tensorrt": "TensorrtExecutionProvider",
    "cuda": _CUDA,
    "openvino": "OpenVINOExecutionProvider",
}
_WHEELS = {
    "tensorrt": "onnxruntime-gpu (on a Jetson NVIDIA's build for its JetPack)",
    "cuda": "onnxruntime-gpu (on a Jetson NVIDIA's build for its JetPack)",
    "openvino": "onnxruntime-openvino",
}

# Triton's parameters of TensorRT that ONNX Runtime has with `trt_` in front.
_TENSORRT = frozenset(
    {
        *("max_partition_iterations", "min_subgraph_size", "dla_enable", "dla_core"),
        *("engine_cache_enable", "engine_cache_path", "engine_cache_prefix", "dump_subgraphs"),
        *("force_sequential_engine_build", "context_memory_sharing_enable"),
        *("layer_norm_fp32_fallback", "timing_cache_enable", "timing_cache_path"),
        *("force_timing_cache", "detailed_build_log", "build_heuristics_enable"),
        *("sparsity_enable", "builder_optimization_level", "auxiliary_streams"),
        *("tactic_sources", "extra_plugin_lib_paths", "profile_min_shapes"),
        *("profile_max_shapes", "profile_opt_shapes", "cuda_graph_enable"),
        *("dump_ep_context_model", "ep_context_file_path", "ep_context_embed_mode"),
        *("int8_calibration_table_name", "int8_use_native_calibration_table"),
    }
)
_PRECISIONS = {"FP32": "", "FP16": "fp16", "BF16": "bf16", "INT8": "int8"}
# Triton passes OpenVINO nothing; these are the provider's own.
_OPENVINO = frozenset({"device_type", "precision", "num_of_threads", "num_streams", "cache_dir"})


class Provider(NamedTuple):
    """A provider as a session takes it."""

    name: str
    options: Mapping[str, str]


def providers_of(
    config: ModelConfig, placement: Placement, available: Collection[str]
) -> list[Provider]:
    """Return the providers of an instance, the processor's last.

    Args:
        available: what this ONNX Runtime has.

    Raises:
        ModelConfigError: an accelerator or a parameter is unknown, does not fit the instance, or
            needs a provider that is not available.
    """
    chosen = config.message.optimization.execution_accelerators
    asked = [
        *_known(chosen.gpu_execution_accelerator, ("tensorrt", "cuda")),
        *_known(chosen.cpu_execution_accelerator, ("openvino",)),
    ]
    on_gpu = placement.kind == "GPU"
    if chosen.gpu_execution_accelerator and not on_gpu:
        raise ModelConfigError(
            f"gpu_execution_accelerator '{asked[0][0]}' is for instances on a GPU, and this one is "
            f"of KIND_{placement.kind}; give KIND_GPU, or remove the accelerator"
        )
    if on_gpu and "cuda" not in dict(asked):
        asked.append(("cuda", {}))
    device = {"device_id": str(placement.gpu or 0)} if on_gpu else {}
    found = []
    for name, parameters in asked:
        provider = _PROVIDERS[name]
        if provider not in available:
            raise ModelConfigError(
                f"execution accelerator '{name}': this ONNX Runtime has no {provider} (it has "
                f"{', '.join(available)}); install {_WHEELS[name]} instead, or "
                f"{'give KIND_CPU' if on_gpu else 'remove the accelerator'}"
            )
        options = dict(_options(name, parameters))
        found.append(Provider(provider, options if name == "openvino" else {**options, **device}))
    return [*found, Provider(CPU, {})]


def _known(accelerators: Any, known: tuple[str, ...]) -> Iterator[tuple[str, dict[str, str]]]:
    for each in accelerators:
        if each.name not in known:
            raise ModelConfigError(
                f"unknown Execution Accelerator '{each.name}' is requested; there it may be "
                f"{' or '.join(known)}"
            )
        yield each.name, dict(each.parameters)


def _options(name: str, parameters: Mapping[str, str]) -> Iterator[tuple[str, str]]:
    """Yield the provider's options for Triton's parameters; those of CUDA are the same."""
    for key, value in sorted(parameters.items()):
        if name == "cuda" or (name == "openvino" and key in _OPENVINO):
            yield key, value
        elif name == "tensorrt" and key in _TENSORRT:
            yield f"trt_{key}", value
        elif name == "tensorrt" and key == "max_workspace_size_bytes":
            yield "trt_max_workspace_size", value
        elif name == "tensorrt" and key == "precision_mode":
            if value not in _PRECISIONS:
                raise ModelConfigError(
                    f"unsupported precision mode '{value}' is requested; known: "
                    f"{', '.join(_PRECISIONS)}"
                )
            if _PRECISIONS[value]:
                yield f"trt_{_PRECISIONS[value]}_enable", "1"
        else:
            shown = {"tensorrt": "TensorRT", "openvino": "OpenVINO"}[name]
            raise ModelConfigError(
                f"unknown parameter '{key}' is provided for {shown} Execution Accelerator"
            )
