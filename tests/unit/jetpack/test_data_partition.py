"""The data partition in NVIDIA's layouts, on a mock of them."""

from __future__ import annotations

import importlib.util
import xml.etree.ElementTree as ET
from pathlib import Path
from typing import Any

import pytest
from support.mock_linux_for_tegra import layout

_SCRIPT = Path(__file__).parents[3] / "jetpack/data_partition.py"


@pytest.fixture(scope="module")
def script() -> Any:
    spec = importlib.util.spec_from_file_location("data_partition", _SCRIPT)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def of_text(text: str) -> ET.Element:
    return ET.fromstring(text)  # noqa: S314 - of this test


def names(root: ET.Element) -> list[str]:
    return [str(partition.get("name")) for partition in root.iter("partition")]


def field(partition: ET.Element, name: str) -> str:
    return str(partition.findtext(name)).strip()


@pytest.mark.parametrize("slots", [True, False])
def test_it_comes_last_and_alone_may_grow(script: Any, slots: bool) -> None:
    root = of_text(layout(slots=slots))
    before = names(root)
    script.add_data_partition(root)
    assert names(root) == [
        *(name for name in before if name not in ("reserved", "secondary_gpt")),
        "edge_data",
        "secondary_gpt",
    ]
    data = next(p for p in root.iter("partition") if p.get("name") == "edge_data")
    assert data.get("id") == "17"
    assert data.find("filename") is None, "tegraparser fails for a file that is not there"
    assert field(data, "partition_type_guid") == "0FC63DAF-8483-4772-8E79-3D69D8477DE4"
    assert int(field(data, "align_boundary")) == 4 * 2**20
    growing = [
        p.get("name")
        for p in root.iter("partition")
        if int(field(p, "allocation_attribute"), 0) & 0x800
    ]
    assert growing == []


def test_a_second_time_changes_nothing(script: Any) -> None:
    root = of_text(layout())
    script.add_data_partition(root, 60_000_000)
    once = ET.tostring(root)
    script.add_data_partition(root, 60_000_000)
    assert ET.tostring(root) == once
    assert root[0].get("num_sectors") == "60000000"


@pytest.mark.parametrize(
    ("text", "fault"),
    [
        ("<partition_layout/>", "0 disks with a partition APP"),
        (layout().replace("secondary_gpt", "last"), "no partition secondary_gpt"),
        (layout().replace('name="UDA"', 'name="UDA" id="17"'), "partition UDA has id 17 already"),
    ],
)
def test_a_layout_that_it_does_not_fit_is_refused(script: Any, text: str, fault: str) -> None:
    with pytest.raises(script.LayoutError, match=fault):
        script.add_data_partition(of_text(text))
