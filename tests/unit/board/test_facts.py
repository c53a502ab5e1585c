"""What runs on a board is read from its files; what they do not report is absent, never zero."""

from __future__ import annotations

from dataclasses import asdict
from typing import TYPE_CHECKING

import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.boards import plant

from edge_server.board.facts import (
    BoardEngine,
    BoardFacts,
    EventCounter,
    PowerMode,
    PowerRail,
    StorageDevice,
    ThermalZone,
    read_board_facts,
    read_within,
)
from edge_server.board.resources import BoardMemory

if TYPE_CHECKING:
    from pathlib import Path

    from support.fake_board import FakeBoard


def test_all_facts_of_an_orin_nx_with_jetpack_6(tmp_path: Path) -> None:
    facts = read_board_facts(plant("orin_nx_jetpack6", tmp_path))
    assert facts.engines == (
        BoardEngine("cpu 0", None, 1_190_400_000, 1_497_600_000),
        BoardEngine("cpu 4", None, 729_600_000, 1_497_600_000),
        BoardEngine("gpu", 0.734, 408_000_000, 408_000_000),
        BoardEngine("nvdla0", powered=True),
        BoardEngine("nvdla1", powered=False),
    )
    assert facts.heat.zones == (
        ThermalZone("cpu-thermal", 61.5, 99.0, 104.5),
        ThermalZone("gpu-thermal", 60.25, 99.0, 104.5),
        ThermalZone("tj-thermal", 63.781),
    )
    assert facts.heat.hottest == ThermalZone("tj-thermal", 63.781)
    assert facts.heat.throttled == facts.heat.low_voltage == ()
    assert [event.count for event in facts.heat.supply_events] == [0, 0, 0]
    assert [rail.name for rail in facts.rails] == ["VDD_IN", "VDD_CPU_GPU_CV", "VDD_SOC"]
    assert facts.rails[0] == PowerRail("VDD_IN", 5.016, 1.856)
    assert facts.rails[0].watts == pytest.approx(9.31, abs=0.01)
    assert facts.power_modes is not None
    assert facts.power_modes.current == PowerMode(3, "25W")
    assert facts.power_modes.highest == PowerMode(0, "MAXN_SUPER")
    assert facts.memory == BoardMemory(15656432 << 10, 12000000 << 10, 7828208 << 10, 7628208 << 10)
    assert facts.storage == (StorageDevice("nvme0", "Samsung SSD 980 500GB", celsius=41.85),)
    assert (facts.uptime_s, facts.boot_reason) == (3605.42, "SYS_RESET_N")


def test_all_facts_of_a_slowed_down_agx_orin_with_jetpack_7(tmp_path: Path) -> None:
    facts = read_board_facts(plant("agx_orin_jetpack7", tmp_path))
    assert facts.engines[-1] == BoardEngine("gpu", None, 306_000_000, 1_300_500_000)
    assert facts.heat.throttled == ("cpu-throttle-alert",)
    assert facts.heat.supply_events == (
        EventCounter("oc1", 2),
        EventCounter("oc2", 0),
        EventCounter("oc3", 37),
    )
    assert [rail.name for rail in facts.rails] == [
        "VDD_GPU_SOC",
        "VDD_CPU_CV",
        "VIN_SYS_5V0",
        "VDDQ_VDD2_1V8AO",
    ]
    assert [rail.alarms for rail in facts.rails] == [(), (), (), ("max",)]
    assert facts.power_modes is not None
    assert facts.power_modes.current == PowerMode(2, "30W")  # the default: nobody chose one
    assert facts.memory.swap_total_bytes is None
    assert facts.storage == (StorageDevice("mmcblk0", "G1M15L", 0.3, "normal"),)
    assert facts.boot_reason == "mainwdt"


def test_a_machine_without_any_of_these_files_has_no_facts(tmp_path: Path) -> None:
    assert read_board_facts(tmp_path / "nowhere") == BoardFacts()


@pytest.mark.parametrize("tree", ["orin_nx_jetpack6", "agx_orin_jetpack7"])
def test_each_file_that_is_missing_only_costs_its_own_fact(tmp_path: Path, tree: str) -> None:
    root = plant(tree, tmp_path)
    whole = asdict(read_board_facts(root))
    for path in sorted(path for path in root.rglob("*") if path.is_file()):
        content = path.read_text()
        path.unlink()
        without = asdict(read_board_facts(root))
        path.write_text(content)
        assert sum(whole[name] != without[name] for name in whole) <= 1, path


@given(st.data())
def test_no_content_of_a_file_is_an_exception(
    tmp_path_factory: pytest.TempPathFactory, data: st.DataObject
) -> None:
    root = plant("orin_nx_jetpack6", tmp_path_factory.mktemp("junk"))
    files = sorted(path for path in root.rglob("*") if path.is_file())
    for path in data.draw(st.lists(st.sampled_from(files), min_size=1, max_size=5)):
        path.write_bytes(data.draw(st.binary(max_size=60)))
    read_board_facts(root)


def test_a_load_beyond_its_range_and_a_trip_point_of_a_sensor_without_one_are_no_facts(
    tmp_path: Path,
) -> None:
    root = plant("orin_nx_jetpack6", tmp_path)
    for load in root.rglob("load"):
        load.write_text("4294967295\n")
    (root / "sys/class/thermal/thermal_zone0/trip_point_1_temp").write_text("-274000\n")
    facts = read_board_facts(root)
    assert [engine.load for engine in facts.engines if engine.name == "gpu"] == [None]
    assert facts.heat.zones[0].throttle_celsius is None


def test_a_voltage_below_its_limit_is_named_by_its_rail(fake_board: FakeBoard) -> None:
    fake_board.write("sys/class/hwmon/hwmon4/in0_lcrit_alarm", "1\n")
    fake_board.write("sys/class/hwmon/hwmon4/name", "supply\n")
    fake_board.write("sys/class/hwmon/hwmon5/in1_min_alarm", "1\n")
    fake_board.write("sys/class/hwmon/hwmon5/in1_label", "VDD_IN\n")
    fake_board.write("sys/class/hwmon/hwmon5/in2_min_alarm", "0\n")
    heat = read_board_facts(fake_board.root).heat
    assert heat.low_voltage == ("VDD_IN", "supply in0")


def test_what_slows_the_board_down_is_reported_and_a_fan_is_not(fake_board: FakeBoard) -> None:
    for number, kind in enumerate(
        (
            *("pwm-fan", "cpu-throttle-alert", "cpufreq-cpu4", "thermal-cpufreq-0", "Processor"),
            "hot-surface-alert",
        )
    ):
        fake_board.cooling(number, kind, 4)
    fake_board.cooling(9, "devfreq-17000000.gpu", 0)
    heat = read_board_facts(fake_board.root).heat
    assert heat.throttled == ("cpu-throttle-alert", "cpufreq-cpu4", "thermal-cpufreq-0")


def test_a_zone_throttles_where_a_cooling_device_slows_an_engine_down(
    fake_board: FakeBoard,
) -> None:
    """As on an Orin: at its lowest passive trip point the kernel only warns of a hot surface."""
    zone = "sys/class/thermal/thermal_zone7"
    devices = (("hot-surface-alert", 2), ("cpu-throttle-alert", 0), ("hot-surface-alert", 0))
    trips = (("passive", 99000), ("critical", 104500), ("passive", 70000))
    fake_board.write(f"{zone}/type", "cpu-thermal\n")
    fake_board.write(f"{zone}/temp", "71000\n")
    for number, (kind, at) in enumerate(trips):
        fake_board.write(f"{zone}/trip_point_{number}_type", f"{kind}\n")
        fake_board.write(f"{zone}/trip_point_{number}_temp", f"{at}\n")
    for number, (kind, trip) in enumerate(devices):
        fake_board.write(f"{zone}/cdev{number}/type", f"{kind}\n")
        fake_board.write(f"{zone}/cdev{number}_trip_point", f"{trip}\n")
    zones = read_board_facts(fake_board.root).heat.zones
    assert ThermalZone("cpu-thermal", 71.0, 99.0, 104.5) in zones


def test_facts_that_are_there_in_time_are_returned(tmp_path: Path) -> None:
    assert read_within(10, plant("agx_orin_jetpack7", tmp_path)) == read_board_facts(tmp_path)
