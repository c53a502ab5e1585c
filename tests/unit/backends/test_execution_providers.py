"""Which of ONNX Runtime's providers a configuration asks for, with Triton's names and texts."""

from __future__ import annotations

import pytest
from google.protobuf import text_format
from tritonclient.grpc import model_config_pb2 as pb

from edge_server.backends.onnxruntime import CPU, providers_of
from edge_server.errors import ModelConfigError
from edge_server.model_config.config import ON_CPU, ModelConfig, Placement

CUDA, TENSORRT = "CUDAExecutionProvider", "TensorrtExecutionProvider"
OPENVINO = "OpenVINOExecutionProvider"
ALL = (TENSORRT, CUDA, OPENVINO, CPU)
ON_GPU = Placement("GPU", 1)


def config_of(accelerators: str) -> ModelConfig:
    text = f"optimization {{ execution_accelerators {{ {accelerators} }} }}" if accelerators else ""
    return ModelConfig.of(text_format.Parse(text, pb.ModelConfig()))


def accelerator(kind: str, name: str, **parameters: str) -> str:
    given = "".join(
        f' parameters {{ key: "{key}" value: "{value}" }}' for key, value in parameters.items()
    )
    return f'{kind}_execution_accelerator {{ name: "{name}" {given} }} '


def found(accelerators: str, placement: Placement = ON_CPU) -> list[tuple[str, object]]:
    return [tuple(each) for each in providers_of(config_of(accelerators), placement, ALL)]


def test_without_accelerators_the_kind_of_the_instance_decides() -> None:
    assert found("") == [(CPU, {})]
    assert found("", ON_GPU) == [(CUDA, {"device_id": "1"}), (CPU, {})]


def test_what_tensorrt_does_not_run_cuda_does() -> None:
    made = found(
        accelerator(
            "gpu",
            "tensorrt",
            precision_mode="FP16",
            max_workspace_size_bytes="1073741824",
            engine_cache_enable="true",
        ),
        ON_GPU,
    )
    options = {
        "trt_fp16_enable": "1",
        "trt_max_workspace_size": "1073741824",
        "trt_engine_cache_enable": "true",
        "device_id": "1",
    }
    assert made == [(TENSORRT, options), (CUDA, {"device_id": "1"}), (CPU, {})]


def test_cudas_parameters_are_the_providers_own() -> None:
    made = found(accelerator("gpu", "cuda", cudnn_conv_use_max_workspace="0"), ON_GPU)
    assert made[0] == (CUDA, {"cudnn_conv_use_max_workspace": "0", "device_id": "1"})
    assert len(made) == 2


def test_a_models_parameters_for_cuda_are_the_providers_options_in_its_words() -> None:
    numbers = {
        "gpu_mem_limit": "268435456",
        "cudnn_conv_algo_search": "1",
        "arena_extend_strategy": "1",
        "do_copy_in_default_stream": "0",
    }
    message = pb.ModelConfig()
    for name, value in numbers.items():
        message.parameters[name].string_value = value
    (cuda, _) = providers_of(ModelConfig.of(message), ON_GPU, ALL)
    assert cuda.options == {
        "gpu_mem_limit": "268435456",
        "cudnn_conv_algo_search": "HEURISTIC",
        "arena_extend_strategy": "kSameAsRequested",
        "do_copy_in_default_stream": "0",
        "device_id": "1",
    }


def test_openvino_runs_on_the_processor() -> None:
    assert found(accelerator("cpu", "openvino", num_of_threads="2")) == [
        (OPENVINO, {"num_of_threads": "2"}),
        (CPU, {}),
    ]


def test_full_precision_needs_no_option() -> None:
    made = found(accelerator("gpu", "tensorrt", precision_mode="FP32"), ON_GPU)
    assert made[0] == (TENSORRT, {"device_id": "1"})


@pytest.mark.parametrize(
    ("accelerators", "placement", "fault"),
    [
        (accelerator("gpu", "dml"), ON_GPU, "unknown Execution Accelerator 'dml' is requested"),
        (accelerator("cpu", "cuda"), ON_CPU, "unknown Execution Accelerator 'cuda' is requested"),
        (accelerator("gpu", "cuda"), ON_CPU, "this one is of KIND_CPU; there is no GPU here"),
        (
            accelerator("gpu", "tensorrt", precision_mode="INT4"),
            ON_GPU,
            "unsupported precision mode 'INT4' is requested; known: FP32, FP16, BF16, INT8",
        ),
        (
            accelerator("gpu", "tensorrt", speed="11"),
            ON_GPU,
            "unknown parameter 'speed' is provided for TensorRT Execution Accelerator",
        ),
        (
            accelerator("cpu", "openvino", speed="11"),
            ON_CPU,
            "unknown parameter 'speed' is provided for OpenVINO Execution Accelerator",
        ),
    ],
)
def test_what_is_unknown_is_refused(accelerators: str, placement: Placement, fault: str) -> None:
    with pytest.raises(ModelConfigError) as caught:
        found(accelerators, placement)
    assert fault in str(caught.value)


@pytest.mark.parametrize(
    ("accelerators", "placement", "wheel"),
    [
        (accelerator("cpu", "openvino"), ON_CPU, "install onnxruntime-openvino"),
        (accelerator("gpu", "tensorrt"), ON_GPU, "install onnxruntime-gpu"),
        ("", ON_GPU, "install onnxruntime-gpu"),
    ],
)
def test_nothing_runs_on_the_processor_for_want_of_its_provider(
    accelerators: str, placement: Placement, wheel: str
) -> None:
    with pytest.raises(ModelConfigError) as caught:
        providers_of(config_of(accelerators), placement, (CPU,))
    assert f"(it has {CPU})" in str(caught.value)
    assert wheel in str(caught.value)
