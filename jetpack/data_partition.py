#!/usr/bin/env python3
"""Adds the data partition to one of NVIDIA's partition layouts.

    data_partition.py IN.xml OUT.xml [--num-sectors N]

The partition `edge_data` comes last before the backup partition table, so that it can grow to the
end of the disk, whatever its size. It has an id of its own (17, thus /dev/nvme0n1p17), no file, so
that flashing writes nothing into it, and is formatted and grown on the device by `firstboot`.
`reserved`, space that NVIDIA keeps for later partitions, gives way to it, and no other partition
may grow: APP keeps the size that it is flashed with. UDA stays, and stays empty.

Only the standard library: this runs on the machine that flashes.
"""

from __future__ import annotations

import argparse
import sys
import xml.etree.ElementTree as ET
from pathlib import Path

NAME = "edge_data"
ID = "17"
LINUX_FILE_SYSTEM = "0FC63DAF-8483-4772-8E79-3D69D8477DE4"
# Only what a flashed disk starts with; firstboot grows it.
SIZE_BYTES = 512 * 2**20
ALIGN_BYTES = 4 * 2**20
# Of allocation_attribute: the partition takes what is left of the disk.
_EXPAND = 0x800
_LAST = "secondary_gpt"
# Devices that hold the root file system; the others are the boot flash.
_DISKS = {"external", "nvme", "sdmmc_user", "sdcard", "usb"}


class LayoutError(Exception):
    """The layout is not one of those that the data partition fits into."""


def add_data_partition(layout: ET.Element, num_sectors: int | None = None) -> None:
    """Change `layout`, the root element, in place; a second call changes nothing.

    Args:
        num_sectors: the size of the smallest disk that will be flashed, for a layout that leaves it
            open or assumes a larger one.

    Raises:
        LayoutError: it has no disk with APP and a backup partition table, more than one, or another
            partition with the id.
    """
    disks = [
        device
        for device in layout.iter("device")
        if device.get("type") in _DISKS and _partition(device, "APP") is not None
    ]
    if len(disks) != 1:
        raise LayoutError(f"{len(disks)} disks with a partition APP, not one")
    disk = disks[0]
    last = _partition(disk, _LAST)
    if last is None:
        raise LayoutError(f"no partition {_LAST}: the end of the disk is not known")
    for name in ("reserved", NAME):
        if (found := _partition(disk, name)) is not None:
            disk.remove(found)
    for partition in disk.iter("partition"):
        if (partition.get("id") or "").strip() == ID:
            raise LayoutError(f"partition {partition.get('name')} has id {ID} already")
        attribute = partition.find("allocation_attribute")
        if attribute is not None and int((attribute.text or "0").strip(), 0) & _EXPAND:
            attribute.text = f" {int(attribute.text.strip(), 0) & ~_EXPAND:#x} "
    if num_sectors is not None:
        disk.set("num_sectors", str(num_sectors))
    disk.insert(list(disk).index(last), _data_partition())


def _partition(device: ET.Element, name: str) -> ET.Element | None:
    return next((p for p in device.iter("partition") if p.get("name") == name), None)


def _data_partition() -> ET.Element:
    partition = ET.Element("partition", {"name": NAME, "id": ID, "type": "data"})
    for name, text in (
        ("allocation_policy", "sequential"),
        ("filesystem_type", "basic"),
        ("size", str(SIZE_BYTES)),
        ("file_system_attribute", "0"),
        ("allocation_attribute", "0x8"),
        ("partition_type_guid", LINUX_FILE_SYSTEM),
        ("align_boundary", str(ALIGN_BYTES)),
        ("percent_reserved", "0"),
        ("description", "State that image updates leave alone; formatted and grown on the device."),
    ):
        ET.SubElement(partition, name).text = f" {text} "
    return partition


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    parser.add_argument("layout", type=Path, metavar="IN.xml")
    parser.add_argument("out", type=Path, metavar="OUT.xml")
    parser.add_argument("--num-sectors", type=int, metavar="N", help="of 512 bytes, of the disk")
    arguments = parser.parse_args()
    comments = ET.XMLParser(target=ET.TreeBuilder(insert_comments=True))  # noqa: S314 - NVIDIA's
    try:
        tree = ET.parse(arguments.layout, comments)  # noqa: S314 - likewise
        add_data_partition(tree.getroot(), arguments.num_sectors)
    except (OSError, ET.ParseError, LayoutError, ValueError) as error:
        print(f"data_partition.py: {arguments.layout}: {error}", file=sys.stderr)
        return 1
    ET.indent(tree, "    ")
    tree.write(arguments.out, encoding="utf-8", xml_declaration=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
