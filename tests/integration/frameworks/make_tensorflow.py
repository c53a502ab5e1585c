"""Makes the models of `networks` with TensorFlow: SavedModels and frozen graphs."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import networks
import tensorflow as tf

if TYPE_CHECKING:
    import numpy as np

graph_def = tf.compat.v1


def conv(x: Any, weight: np.ndarray, bias: np.ndarray, stride: int) -> Any:
    """A convolution with a border of 1, as the others pad it; TensorFlow's CPU takes NHWC only."""
    x = tf.pad(x, [[0, 0], [1, 1], [1, 1], [0, 0]])
    made = tf.nn.conv2d(x, weight.transpose(2, 3, 1, 0), stride, "VALID")
    return tf.nn.relu(made + bias)


def net(x: Any) -> Any:
    weight, bias = networks.net_weights()
    made = conv(tf.transpose(x, [0, 2, 3, 1]), weight, bias, 1)
    return tf.transpose(made, [0, 3, 1, 2])


class Lane(tf.Module):
    @tf.function(input_signature=[tf.TensorSpec([None, *networks.LANE_SHAPE], name="x")])
    def serve(self, x: Any) -> dict[str, Any]:
        weights = networks.lane_weights()
        x = tf.transpose(x, [0, 2, 3, 1])
        for at in (0, 2, 4):
            x = conv(x, weights[at], weights[at + 1], 2)
        x = tf.nn.relu(tf.reduce_mean(x, [1, 2]) @ weights[6] + weights[7])
        shape = [-1, networks.LANE_ROWS, networks.LANE_COLUMNS]
        return {"y": tf.reshape(x @ weights[8] + weights[9], shape)}


class Texts(tf.Module):
    @tf.function(input_signature=[tf.TensorSpec([None, None], tf.string, name="INPUT0")])
    def serve(self, INPUT0: Any) -> dict[str, Any]:  # noqa: N803 - the example's name
        return {"OUTPUT0": tf.identity(INPUT0)}


class Classes(tf.Module):
    @tf.function(input_signature=[tf.TensorSpec([None, 224, 224, 3], name="input_1")])
    def serve(self, input_1: Any) -> dict[str, Any]:
        return {"predictions": tf.reduce_mean(input_1, [1, 2]) @ tf.ones([3, 1000])}


def save(module: Any, name: str, config: str) -> None:
    path = networks.place(name, config, "model.savedmodel")
    tf.saved_model.save(module, str(path), signatures={"serving_default": module.serve})


def freeze(name: str, config: str, graph: Any) -> None:
    path = networks.place(name, config, "model.graphdef")
    path.write_bytes(graph.as_graph_def().SerializeToString())


platform = 'platform: "tensorflow_graphdef" '
with tf.Graph().as_default() as graph:
    tf.identity(net(graph_def.placeholder(tf.float32, [None, 3, None, None], "x")), "y")
freeze("net", platform + networks.config("x", "y"), graph)
save(Lane(), "lane", "")
save(Texts(), "simple_identity", networks.EXAMPLES["simple_identity"])
save(Classes(), "tutorial_tensorflow/resnet50", networks.EXAMPLES["tutorial_tensorflow/resnet50"])
with tf.Graph().as_default() as graph:
    one, other = (
        tf.strings.to_number(graph_def.placeholder(tf.string, [None, 16], name), tf.int32)
        for name in ("INPUT0", "INPUT1")
    )
    tf.strings.as_string(one + other, name="OUTPUT0")
    tf.strings.as_string(one - other, name="OUTPUT1")
freeze("simple_string", networks.EXAMPLES["simple_string"], graph)
with tf.Graph().as_default() as graph:
    images = graph_def.placeholder(tf.float32, [None, 299, 299, 3], "input")
    tf.nn.softmax(
        tf.reduce_mean(images, [1, 2]) @ tf.ones([3, 1001]),
        name="InceptionV3/Predictions/Softmax",
    )
freeze("inception_graphdef", networks.EXAMPLES["inception_graphdef"], graph)
labels = "".join(f"class {number}\n" for number in range(1001))
(networks.Path(networks.sys.argv[1]) / "inception_graphdef" / "inception_labels.txt").write_text(
    labels
)
