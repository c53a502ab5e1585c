"""Where layers run is read from what TensorRT's inspector says, as any version spells it."""

from __future__ import annotations

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from edge_server.backends.tensorrt.plan_options import Placed, io_names, layer_table, placed

LAYERS = [
    {"Name": "Reformatting CopyNode for Input Tensor 0 to {ForeignNode}", "LayerType": "Reformat"},
    {"Name": "{ForeignNode[conv1...conv9]}", "LayerType": "DLA"},
    {"Name": "resize", "LayerType": "Resize"},
    {"Name": "{ForeignNode[softmax]}", "LayerType": "Myelin"},
]


def test_each_layer_is_counted_where_it_runs() -> None:
    found = placed(json.dumps({"Layers": LAYERS}))
    assert found == Placed(
        ("{ForeignNode[conv1...conv9]}",), ("resize", "{ForeignNode[softmax]}"), 1
    )
    assert str(found) == "1 part on NVDLA, 2 layers on the GPU, 1 change of layout"


def test_names_alone_are_layers_of_the_gpu() -> None:
    assert placed(json.dumps({"Layers": ["a", "b"]})) == Placed((), ("a", "b"), 0)


@pytest.mark.parametrize(
    "said",
    [
        {"Bindings": ["x", "y"]},
        {"I/O Tensors": [{"Name": "x", "Datatype": "FP32"}, {"Name": "y"}]},
    ],
)
def test_the_engines_tensors_are_read_in_either_spelling(said: dict[str, object]) -> None:
    assert io_names(json.dumps(said)) == ("x", "y")


def test_the_table_has_a_line_for_each_layer() -> None:
    assert layer_table(json.dumps({"Layers": LAYERS[1:3]})) == [
        "DLA     {ForeignNode[conv1...conv9]}",
        "Resize  resize",
    ]


JSON = st.recursive(
    st.none() | st.integers() | st.text(max_size=4),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=4), inner),
)


@given(st.text() | JSON.map(json.dumps) | JSON.map(lambda x: json.dumps({"Layers": x})))
def test_nothing_that_is_said_breaks_it(said: str) -> None:
    placed(said)
    io_names(said)
    layer_table(said)


def test_the_ways_between_gpu_and_nvdla_are_no_layers_that_fell_back() -> None:
    names = ["images to nvm", "{ForeignNode[Conv_0...Concat_198]}", "head from nvm"]
    kinds = ["", "DLA", ""]
    layers = [{"Name": n, "LayerType": k} for n, k in zip(names, kinds, strict=True)]
    layers += [{"Name": "images copy finish"}, {"Name": "head copy finish"}]
    assert placed(json.dumps({"Layers": layers})) == Placed((names[1],), (), 4)
