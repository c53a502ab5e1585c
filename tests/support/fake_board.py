"""The files of a board, of any kind."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from pathlib import Path


class FakeBoard:
    """The files of a board below a folder, as a kernel, a JetPack and systemd make them.

    Nobody is root there: the account `edge-server` (990) is in the groups of GPU and cameras, and
    the unit runs as it.
    """

    def __init__(self, root: Path) -> None:
        self.root = root
        # Who runs the tests can give a file to one of their own groups only, unless they are root.
        self.video = 44 if os.geteuid() == 0 else os.getegid()
        self.write("etc/passwd", "root:x:0:0::/root:/bin/sh\nedge-server:x:990:990::/:/bin/false\n")
        self.write("etc/group", f"root:x:0:\nvideo:x:{self.video}:edge-server\n")

    def write(self, name: str, content: str, mode: int = 0o644) -> Path:
        path = self.root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(content)
        path.chmod(mode)
        return path

    def node(self, name: str, mode: int = 0o660, label: str = "") -> None:
        """A device file of the group video; a camera where it has a label."""
        path = self.write(f"dev/{name}", "", mode)
        os.chown(path, -1, self.video)
        if label:
            self.write(f"sys/class/video4linux/{name}/name", f"{label}\n")

    def jetson(self, model: str, module: str, l4t: str, chip: str = "tegra234") -> None:
        """What every Jetson has; `l4t` is like 36.4.3."""
        major, _, revision = l4t.partition(".")
        release = f"# R{major} (release), REVISION: {revision}, GCID: 38968081, BOARD: generic"
        self.write("etc/nv_tegra_release", f"{release}, EABI: aarch64\n")
        self.write("proc/device-tree/model", f"{model}\0")
        identities = (f"nvidia,p3768-0000+{module}-super", f"nvidia,{module}", f"nvidia,{chip}")
        self.write("proc/device-tree/compatible", "\0".join((*identities, "")))
        self.write("proc/meminfo", "MemTotal: 15656432 kB\nMemAvailable: 12000000 kB\n")
        self.write("proc/sys/kernel/osrelease", "5.15.148-tegra\n")
        for name in ("nvmap", "nvhost-ctrl-gpu", "nvgpu/igpu0/channel", "dri/renderD128"):
            self.node(name)
        self.node("nvhost-power-gpu", 0o600)
        self.power_modes("MAXN", "10W", "15W", "25W")
        for index, (zone, millidegrees) in enumerate((("cpu-thermal", 48250), ("tj", 51031))):
            self.write(f"sys/class/thermal/thermal_zone{index}/type", f"{zone}\n")
            self.write(f"sys/class/thermal/thermal_zone{index}/temp", f"{millidegrees}\n")
        self.cooling(0, "pwm-fan", 3)
        self.cooling(1, "gpu-throttle-alert", 0)
        gpu = "sys/class/devfreq/17000000.gpu"
        for name, hz in (("cur", 306000000), ("min", 306000000), ("max", 918000000)):
            self.write(f"{gpu}/{name}_freq", f"{hz}\n")
        self.write("run/systemd/timesync/synchronized", "")
        self.write("run/systemd/system/.keep", "")
        self.write("etc/systemd/system/edge-server.service", "[Service]\nUser=edge-server\n")
        self.write("usr/local/cuda/version.json", '{"cuda": {"version": "12.6.10"}}')

    def power_modes(self, *names: str, current: int | None = 0) -> None:
        """Those of nvpmodel; without a current one nobody has ever chosen, and 0 is the default."""
        modes = "".join(
            f"< POWER_MODEL ID={number} NAME={name} >\nCPU_ONLINE CORE_0 1\n"
            for number, name in enumerate(names)
        )
        self.write("etc/nvpmodel.conf", f"# a comment\n{modes}< PM_CONFIG DEFAULT=0 >\n")
        if current is not None:
            self.write("var/lib/nvpmodel/status", f"pmode:{current:04} fmode:quiet")

    def cooling(self, number: int, kind: str, state: int) -> None:
        self.write(f"sys/class/thermal/cooling_device{number}/type", f"{kind}\n")
        self.write(f"sys/class/thermal/cooling_device{number}/cur_state", f"{state}\n")
