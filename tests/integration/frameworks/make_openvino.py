"""Makes the models of `networks` with OpenVINO, from the ONNX files beside the repository."""

from __future__ import annotations

import shutil
import sys
from pathlib import Path

import networks

# It would write to HOME as it is imported.
sys.modules["openvino_telemetry"] = None
import openvino  # noqa: E402

sources = Path(networks.sys.argv[1]).parent
net = openvino.Core().read_model(sources / "net.onnx")
more = 'parameters { key: "INFERENCE_NUM_THREADS" value { string_value: "1" } }'
path = networks.place(
    "net", 'backend: "openvino" ' + networks.config("x", "y", more=more), "model.xml"
)
openvino.save_model(net, path, compress_to_fp16=False)
openvino.save_model(net, networks.place("completed", "", "model.xml"), compress_to_fp16=False)
config = 'backend: "openvino" default_model_filename: "model.onnx" '
path = networks.place("lane", config + networks.lane_config("x", "y"), "model.onnx")
shutil.copy(sources / "lane.onnx", path)
