"""The checks, in the order of the report: the board first, then the software on it."""

from __future__ import annotations

from types import MappingProxyType
from typing import TYPE_CHECKING

from edge_server.board.doctor.checks import appliance, board, cameras, gpu, libraries

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from edge_server.board.doctor.evidence import Evidence, Finding

CHECKS: Mapping[str, Callable[[Evidence], Finding]] = MappingProxyType(
    {
        "jetpack": board.jetpack,
        "power_mode": board.power_mode,
        "heat": board.heat,
        "supply": board.supply,
        "clock": board.clock,
        "memory": board.memory,
        "disk": board.disk,
        "storage": board.storage,
        "gpu_nodes": gpu.gpu_nodes,
        "driver": gpu.driver,
        "cuda_runtime": gpu.cuda_runtime,
        "pycuda": gpu.pycuda,
        "tensorrt": libraries.tensorrt,
        "nvdla": libraries.nvdla,
        "nvdla_compiler": libraries.nvdla_compiler,
        "onnxruntime": libraries.onnxruntime,
        "opencv": libraries.opencv,
        "cameras": cameras.cameras,
        "argus": cameras.argus,
        "gstreamer": cameras.gstreamer,
        "settings": appliance.settings,
        "grpc_port": appliance.grpc_port,
        "broker": appliance.broker,
        "unit": appliance.unit,
    }
)
