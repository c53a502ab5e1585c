"""A mock of NVIDIA's Linux_for_Tegra: names, places and the layout's shape are the real ones.

Of R36.5, from public copies of its files and notes about them: where scripts, layouts and images
lie, the partitions of flash_l4t_t234_nvme_rootfs_ab.xml with their ids and sizes, what
nvautoflash.sh prints. Nothing of NVIDIA's is copied, no file has its content, and the scripts only
write down how they were called.
"""

from __future__ import annotations

import os
import shlex
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from pathlib import Path

# Name, id, bytes (or what flash.sh puts in its place), allocation_attribute, file.
_NVME_AB = (
    ("master_boot_record", "", "512", "8", ""),
    ("primary_gpt", "", "19968", "8", ""),
    ("A_kernel", "3", "134217728", "8", "LNXFILE"),
    ("A_kernel-dtb", "", "786432", "8", "DTB_FILE"),
    ("A_reserved_on_user", "", "33161216", "8", ""),
    ("B_kernel", "", "134217728", "8", "LNXFILE_b"),
    ("B_kernel-dtb", "", "786432", "8", "DTB_FILE"),
    ("B_reserved_on_user", "", "33161216", "8", ""),
    ("RECNAME", "", "RECSIZE", "8", "RECFILE"),
    ("RECDTB-NAME", "", "524288", "8", "RECDTB-FILE"),
    ("esp", "", "67108864", "0x8", "ESP_FILE"),
    ("RECNAME_alt", "", "RECSIZE", "8", ""),
    ("RECDTB-NAME_alt", "", "524288", "8", ""),
    ("esp_alt", "", "67108864", "0x8", ""),
    ("UDA", "", "419430400", "8", ""),
    ("reserved", "", "502792192", "8", ""),
    ("APP", "1", "APPSIZE", "0x8", "APPFILE"),
    ("APP_b", "2", "APPSIZE", "0x8", "APPFILE_b"),
    ("secondary_gpt", "", "0xFFFFFFFFFFFFFFFF", "8", ""),
)
# With one root file system APP grows to the end of the disk: 0x800.
_NVME = tuple(
    (name, number, size, "0x808" if name == "APP" else attribute, file)
    for name, number, size, attribute, file in _NVME_AB
    if name != "APP_b"
)
_CALLED = """\
#!/bin/bash
# A mock: writes down its call.
echo "$(env | grep -E '^(ROOTFS_|BOARD|FAB)' | sort | tr '\\n' ' ')$0 ${{*@Q}}" >>{calls}
exit ${{MOCK_CODE:-0}}
"""
_BOARD_ID = """\
#!/bin/bash
# A mock: what NVIDIA's prints of a board's EEPROM.
[ "$1" = --print_boardid ] || exit 2
echo "--- Reading board information succeeded."
echo "--- Parsing board ID ({id}) succeeded."
echo "--- Parsing board version () succeeded."
echo "--- Parsing board SKU ({sku}) succeeded."
echo "--- Parsing board REV () succeeded."
echo "--- Parsing baseboard ID (3768) succeeded."
echo "jetson-orin-nano-devkit found."
"""


def layout(*, slots: bool = True, disk: str = "external") -> str:
    """The text of a partition layout, as NVIDIA writes them."""
    partitions = "".join(_partition(*partition) for partition in (_NVME_AB if slots else _NVME))
    return (
        '<?xml version="1.0"?>\n\n<!-- Nvidia Tegra Partition Layout Version 1.0.0 -->\n'
        '<partition_layout version="01.00.0000">\n'
        f'    <device type="{disk}" instance="0" sector_size="512"'
        ' num_sectors="EXT_NUM_SECTORS" >\n'
        f"{partitions}    </device>\n</partition_layout>\n"
    )


def _partition(name: str, number: str, size: str, attribute: str, file: str) -> str:
    identity = f' id="{number}"' if number else ""
    kind = name if name.endswith("_gpt") else "data"
    named = f"            <filename> {file} </filename>\n" if file else ""
    return (
        f'        <partition name="{name}"{identity} type="{kind}">\n'
        "            <allocation_policy> sequential </allocation_policy>\n"
        f"            <size> {size} </size> <!-- a comment -->\n"
        f"            <allocation_attribute> {attribute} </allocation_attribute>\n"
        f"{named}        </partition>\n"
    )


class MockLinuxForTegra:
    """The tree after apply_binaries.sh and customize_rootfs.sh, and boards on a mock of sysfs."""

    def __init__(self, folder: Path, l4t: str = "36.5.0") -> None:
        self.path = folder / "Linux_for_Tegra"
        self.sysfs = folder / "sys"
        self._calls = folder / "calls"
        major, _, revision = l4t.partition(".")
        (self.sysfs / "bus/usb/devices").mkdir(parents=True)
        self.write(
            "rootfs/etc/nv_tegra_release", f"# R{major} (release), REVISION: {revision}, GCID: 1\n"
        )
        self.write("rootfs/etc/machine-id", "")
        self.write("rootfs/etc/shadow", "root:!*:20000::::::\nedge:*:20000::::::\n")
        self.write("rootfs/usr/lib/edge-server-image/firstboot", "#!/bin/bash\n", 0o755)
        self.write("rootfs/boot/initrd", "initrd")
        for name in ("kernel/Image", "rootfs/boot/Image"):
            self.write(name, "kernel")
        self.write("bootloader/l4t_initrd.img", "initrd")
        self.write("bootloader/generic/cfg/flash_t234_qspi.xml", "<partition_layout/>")
        for suffix, slots in (("", False), ("_rootfs_ab", True)):
            for encrypted in ("", "_enc") if suffix else ("", "_rootfs_enc"):
                name = f"tools/kernel_flash/flash_l4t_t234_nvme{suffix}{encrypted}.xml"
                self.write(name, layout(slots=slots))
            name = f"bootloader/generic/cfg/flash_t234_qspi_sdmmc{suffix}.xml"
            self.write(name, layout(slots=slots, disk="sdmmc_user"))
        for board in ("orin-nano-devkit", "orin-nano-devkit-super", "agx-orin-devkit"):
            self.write(f"jetson-{board}.conf", "# a mock\n")
        script = (
            "l4t_initrd_flash.sh" if int(major) >= 39 else "tools/kernel_flash/l4t_initrd_flash.sh"
        )
        self.write(script, _CALLED.format(calls=shlex.quote(str(self._calls))), 0o755)
        self.eeprom("3767", "0005")

    def write(self, name: str, text: str, mode: int = 0o644) -> None:
        path = self.path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
        path.chmod(mode)

    def eeprom(self, board_id: str, sku: str) -> None:
        self.write("nvautoflash.sh", _BOARD_ID.format(id=board_id, sku=sku), 0o755)

    def connect(self, product: str = "7523", port: str = "1-3") -> None:
        """A board in recovery mode, on USB."""
        device = self.sysfs / "bus/usb/devices" / port
        device.mkdir()
        (device / "idVendor").write_text("0955\n")
        (device / "idProduct").write_text(f"{product}\n")

    def calls(self) -> list[str]:
        """Variables, script and arguments of each call of NVIDIA's flashing script."""
        return self._calls.read_text().splitlines() if self._calls.exists() else []

    def files(self) -> dict[str, bytes]:
        return {
            os.fspath(path.relative_to(self.path)): path.read_bytes()
            for path in sorted(self.path.rglob("*"))
            if path.is_file()
        }
