"""`paddle`: inference models of PaddlePaddle: `model.pdmodel` or the newer `inference.json`, with
`.pdiparams` of the same stem.

The configuration names inputs and outputs as the program does: a file says no more of its outputs.
The execution accelerator `mkldnn` (oneDNN) for the processor takes `cpu_threads` and `capacity`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
from paddle import inference

from edge_server.backends.frameworks.runner import BadInput

if TYPE_CHECKING:
    from edge_server.backends.frameworks.runner import Arrays, ModelFile
    from edge_server.tensors import Signature

# A GPU's first pool of memory; Paddle takes more as it needs it.
_POOL_MIB = 64


class PaddleModel:
    """A predictor; its inputs and outputs are copied."""

    signature: Signature | None = None

    def __init__(self, file: ModelFile) -> None:
        config = inference.Config(str(file.path), str(file.path.with_suffix(".pdiparams")))
        config.disable_glog_info()
        mkldnn = file.accelerators.get("mkldnn")
        config.set_cpu_math_library_num_threads(
            int((mkldnn or {}).get("cpu_threads", file.threads))
        )
        if file.device == "GPU":
            config.enable_use_gpu(_POOL_MIB, 0)
        else:
            config.disable_gpu()
            if mkldnn is None:
                config.disable_mkldnn()
            else:
                config.enable_mkldnn()
                config.set_mkldnn_cache_capacity(int(mkldnn.get("capacity", 10)))
        self._predictor = inference.create_predictor(config)
        self._outputs = list(self._predictor.get_output_names())
        self._inputs = list(self._predictor.get_input_names())
        _check("input", [spec.name for spec in file.inputs], self._inputs)
        _check("output", [spec.name for spec in file.outputs], self._outputs)
        if missing := set(self._inputs) - {spec.name for spec in file.inputs}:
            raise ValueError(f"the model has an input '{min(missing)}' that is not configured")

    def run(self, inputs: Arrays, outputs: frozenset[str]) -> Arrays:
        for name in self._inputs:
            if (array := inputs.get(name)) is None:
                # The predictor would take that of the last request.
                raise BadInput(f"input '{name}' was left out, and the model cannot do without")
            handle = self._predictor.get_input_handle(name)
            handle.reshape(list(array.shape))
            handle.copy_from_cpu(np.ascontiguousarray(array))
        self._predictor.run()
        made: dict[str, Any] = {
            name: self._predictor.get_output_handle(name).copy_to_cpu() for name in outputs
        }
        return made


def _check(kind: str, configured: list[str], names: list[str]) -> None:
    for name in configured:
        if name not in names:
            raise ValueError(f"no {kind} '{name}': the model's {kind}s are {', '.join(names)}")


open_model = PaddleModel
