"""The parameters of each framework in config.pbtxt, under Triton's names.

Any other parameter has no effect, which the log reports. The parameters of the process
(`execution_timeout_s`, `initialize_timeout_s`, `shared_memory_limit_mib`) are those of backend
`python`.
"""

from __future__ import annotations

from typing import Annotated, Literal

import msgspec

from edge_server.backends.parameters import Parameters

ThreadCount = Annotated[int, msgspec.Meta(ge=1, le=1024)]
Switch = Literal["true", "false", "True", "False", "1", "0"]
Yes = Literal["YES", "NO", "yes", "no", "Yes", "No"]


class PyTorchParameters(Parameters, frozen=True):
    """`pytorch`. The first two set threads: of one operator, and of operators side by side.

    `NUM_THREADS` and `NUM_INTEROP_THREADS` are other names for them. The rest is for TorchScript:
    `INFERENCE_MODE` (default true) runs without what training needs, others change its compiler.
    """

    INTRA_OP_THREAD_COUNT: ThreadCount | None = None
    INTER_OP_THREAD_COUNT: ThreadCount | None = None
    NUM_THREADS: ThreadCount | None = None
    NUM_INTEROP_THREADS: ThreadCount | None = None
    INFERENCE_MODE: Switch = "true"
    DISABLE_OPTIMIZED_EXECUTION: Switch = "false"
    DISABLE_CUDNN: Switch = "false"
    ENABLE_JIT_EXECUTOR: Switch = "true"
    ENABLE_JIT_PROFILING: Switch = "true"
    ENABLE_TENSOR_FUSER: Switch = "true"


class TensorFlowParameters(Parameters, frozen=True):
    """`tensorflow`: threads, and which graph and signature of a SavedModel are served."""

    TF_NUM_INTRA_THREADS: ThreadCount | None = None
    TF_NUM_INTER_THREADS: ThreadCount | None = None
    TF_GRAPH_TAG: str = "serve"
    TF_SIGNATURE_DEF: str = "serving_default"


class OpenVinoParameters(Parameters, frozen=True):
    """`openvino`. `HINT_BF16` computes in bfloat16 where the processor can; by default in float32.

    `SKIP_OV_DYNAMIC_BATCHSIZE` keeps the batch size that the file fixes.
    """

    PERFORMANCE_HINT: Literal["LATENCY", "THROUGHPUT", "CUMULATIVE_THROUGHPUT"] = "LATENCY"
    INFERENCE_NUM_THREADS: ThreadCount | None = None
    COMPILATION_NUM_THREADS: ThreadCount | None = None
    NUM_STREAMS: str = "AUTO"
    HINT_BF16: Yes = "NO"
    SKIP_OV_DYNAMIC_BATCHSIZE: Yes = "NO"
    TARGET_DEVICE: str = "CPU"


class PaddleParameters(Parameters, frozen=True):
    """`paddle` has none; the execution accelerator `mkldnn` for CPUs takes `cpu_threads`."""
