"""Which TensorRT is played, and what of it shall go wrong.

Words parted by commas, from the environment or from a test:

    version=10.3.0.30   what it is; the table has those of names.json
    dla_cores=2         how many NVDLA cores it sees
    fail=WHAT:N         the call after N good ones fails: deserialize, context, profile, enqueue,
                        build, or run, which breaks the device, in the stream
    crash=deserialize   the process dies there
    capture=refused     no run can be recorded
    build_s=2           how long a plan is built
    off=0.5             what every output of floats is too large by
"""

from __future__ import annotations

import json
import os
from pathlib import Path

_TABLE = Path(__file__).parents[2] / "support" / "tensorrt_api" / "names.json"
_USUAL = "version=10.3.0.30,dla_cores=2"


class Settings:
    def __init__(self) -> None:
        self._members: dict[str, dict[str, set[str]]] = {}
        self.reset()

    def reset(self) -> None:
        self.set(f"{_USUAL},fail=,crash=,capture=,build_s=0,off=0")
        self.set(os.environ.get("EDGE_SIMULATED_TENSORRT", ""))

    def set(self, words: str) -> None:
        for word in filter(None, words.split(",")):
            name, _, value = word.partition("=")
            if name == "version":
                self.version = value
            elif name == "dla_cores":
                self.dla_cores = int(value)
            elif name == "fail":
                self._fail, _, after = value.partition(":")
                self._after = int(after or 0)
            elif name == "crash":
                self.crash = value
            elif name == "build_s":
                self.build_s = float(value)
            elif name == "off":
                self.off = float(value)
            elif name == "capture":
                self.capture = value
            else:
                raise ValueError(f"the simulation of TensorRT knows no '{word}'")

    def failing(self, what: str) -> bool:
        if self._fail != what:
            return False
        if self._after > 0:
            self._after -= 1
            return False
        self._fail = ""
        return True

    @property
    def number(self) -> tuple[int, int]:
        major, minor = self.version.split(".")[:2]
        return int(major), int(minor)

    def members(self, name: str) -> set[str]:
        """What the class has in the version that is played."""
        version = ".".join(self.version.split(".")[:2])
        if version not in self._members:
            table: dict[str, set[str]] = {}
            for class_name, groups in json.loads(_TABLE.read_text()).items():
                for versions, members in groups.items():
                    if version in versions.split():
                        names = {member.partition(":")[0] for member in members.split()}
                        table.setdefault(class_name, set()).update(names)
            self._members[version] = table
        return self._members[version].get(name, set())


settings = Settings()


def has_name(class_name: str, name: str) -> bool:
    return name in settings.members(class_name)


class Versioned:
    """Has what its class of that name has in the version that is played, and no more."""

    _real_name = ""

    def __getattribute__(self, name: str) -> object:
        if not name.startswith("_"):
            real = type(self)._real_name
            if not has_name(real, name):
                raise AttributeError(f"TensorRT {settings.version}: {real} has no '{name}'")
        return object.__getattribute__(self, name)
