"""Puts in front of an ONNX network what `image_preprocess` does not do: the order of the planes,
and a mean and a deviation of each.

    prepare_network.py yolo.onnx models/yolo_net/1/model.onnx --rgb
    prepare_network.py text.onnx models/text_net/1/model.onnx --mean .5 .5 .5 --std .5 .5 .5

Needs the package onnx. The network made takes planes B, G, R of 0 to 1, as `image_preprocess` gives
them. Mean and deviation are in the order of the network's own planes, as its authors state them.
"""

from __future__ import annotations

import argparse

import numpy as np
import onnx
from onnx import helper, numpy_helper


def main() -> None:
    """Read one file, write the other."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("network")
    parser.add_argument("out")
    parser.add_argument("--rgb", action="store_true", help="its planes are R, G, B")
    parser.add_argument("--mean", type=float, nargs=3, default=(0.0, 0.0, 0.0), metavar="SHARE")
    parser.add_argument("--std", type=float, nargs=3, default=(1.0, 1.0, 1.0), metavar="SHARE")
    options = parser.parse_args()

    model = onnx.load(options.network)
    graph = model.graph
    (image,) = {each.name for each in graph.input} - {each.name for each in graph.initializer}
    (given,) = (each for each in graph.input if each.name == image)
    kind = helper.tensor_dtype_to_np_dtype(given.type.tensor_type.elem_type)
    for node in graph.node:
        node.input[:] = ["prepared" if name == image else name for name in node.input]
    channels = np.array((2, 1, 0) if options.rgb else (0, 1, 2))
    constants = {
        "prepare_channels": channels,
        "prepare_mean": np.array(options.mean, kind).reshape(1, 3, 1, 1),
        "prepare_std": np.array(options.std, kind).reshape(1, 3, 1, 1),
    }
    graph.initializer.extend(
        numpy_helper.from_array(each, name) for name, each in constants.items()
    )
    nodes = [
        helper.make_node("Gather", [image, "prepare_channels"], ["prepare_ordered"], axis=1),
        helper.make_node("Sub", ["prepare_ordered", "prepare_mean"], ["prepare_centred"]),
        helper.make_node("Div", ["prepare_centred", "prepare_std"], ["prepared"]),
        *graph.node,
    ]
    del graph.node[:]
    graph.node.extend(nodes)
    onnx.checker.check_model(model)
    onnx.save(model, options.out)


if __name__ == "__main__":
    main()
