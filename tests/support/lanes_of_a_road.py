"""Prints the lanes that the shipped models find on a drawn road, as JSON.

The package's own Python runs it: `/usr/lib/edge-server/bin/python3 -I lanes_of_a_road.py`.
"""

from __future__ import annotations

import json
from contextlib import ExitStack
from pathlib import Path

from edge_server.requests import InferRequest
from edge_server.tensors import Tensor
from edge_server.tools.plan import load_models
from edge_server.tools.road.renderer import render
from edge_server.tools.road.scene import RoadScene

with ExitStack() as stack:
    data_plane = load_models(Path("/usr/share/edge_server/models"), stack)
    image, _ = render(RoadScene.for_camera(seed=7), 0.0)
    request = InferRequest("lane_detection", {"image": Tensor.of(image[None])})
    found = data_plane.infer(request).outputs
    print(json.dumps({name: tensor.array.tolist() for name, tensor in found.items()}))
