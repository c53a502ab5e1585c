"""No sequence of updates, failures, warm and cold boots ends a board in the recovery kernel.

The board's firmware is simulated (`tests/support/simulated_jetson`); the script that verifies each
boot and the code that commits an update are the real ones.
"""

from __future__ import annotations

import os
import subprocess
import tempfile
from contextlib import suppress
from pathlib import Path
from typing import Literal

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule
from support.simulated_jetson.firmware import TRIES, Firmware

from edge_server.board.update import BootSlots, RecordFile, Slot
from edge_server.cli.update import UpdatedDevice
from edge_server.errors import Unavailable

GUARD = Path(__file__).parents[2] / "jetpack" / "update" / "guard"
# Of `nvbootctrl`, what the script calls; the machine hands it on to the firmware.
NVBOOTCTRL = """#!/bin/sh
case $1 in verify) : >"$EDGE_HERE/verified" ;; *) cat "$EDGE_HERE/current" ;; esac
"""
# `sick` has no healthy lanes; `dead` never gets to its services, and a watchdog resets it.
System = Literal["good", "sick", "dead"]
# What the settings, which both systems share, let come of it: healthy lanes; none; a daemon whose
# start takes until the next reset, so that no commit is reached.
Outcome = Literal["lanes", "no lanes", "no commit"]


class Truck(RuleBasedStateMachine):
    """A board that is updated, rebooted and switched off; A holds a good system at first."""

    def __init__(self) -> None:
        super().__init__()
        self._folder = tempfile.TemporaryDirectory()
        self.here = Path(self._folder.name)
        self.firmware = Firmware.flashed(self.here / "board")
        (self.here / "nvbootctrl").write_text(NVBOOTCTRL)
        (self.here / "nvbootctrl").chmod(0o755)
        self.systems: dict[str, System] = {"A": "good", "B": "dead"}
        self.outcome: Outcome = "lanes"
        self.runs = "A"
        self.boots = 0

    def teardown(self) -> None:
        self._folder.cleanup()

    @property
    def device(self) -> UpdatedDevice:
        slots = BootSlots(self.firmware.root, self.firmware.nvbootctrl)
        return UpdatedDevice(slots, RecordFile(self.here), f"boot-{self.boots}", "1.0")

    def guard(self) -> None:
        (self.here / "current").write_text(
            self.firmware.nvbootctrl(["-t", "rootfs", "get-current-slot"])
        )
        here = {"EDGE_HERE": str(self.here), "STATE_DIRECTORY": str(self.here)}
        path = f"{self.here}:{os.environ['PATH']}"
        subprocess.run(
            [GUARD, "verify"], env={"PATH": path, **here}, check=True, capture_output=True
        )
        verified = self.here / "verified"
        if verified.exists():
            verified.unlink()
            self.firmware.nvbootctrl(["verify"])

    def boot(self) -> None:
        """Reset until a system stays: one on trial that is sick resets the board."""
        for _ in range(4 * TRIES):
            self.boots += 1
            slot = self.firmware.boot()
            assert slot is not None, f"recovery, with {self.systems}"
            if self.systems[slot] == "dead":
                continue
            self.guard()
            self.runs = slot
            if self.outcome == "no commit":
                return
            healthy = self.systems[slot] == "good" and self.outcome == "lanes"
            with suppress(Unavailable):
                self.device.commit(lambda healthy=healthy: "" if healthy else "no lanes")
                return
        raise AssertionError("resets for ever")

    @rule()
    def reboots(self) -> None:
        self.boot()

    @rule(times=st.integers(2, 3 * TRIES))
    def reboots_again_and_again(self, times: int) -> None:
        for _ in range(times):
            self.boot()

    @rule()
    def loses_its_power(self) -> None:
        self.firmware.cut_power()
        self.boot()

    @precondition(lambda self: not RecordFile(self.here).read().is_trial(self.runs))
    @rule(system=st.sampled_from(["good", "sick", "dead"]))
    def installs(self, system: System) -> None:
        other: Slot = "B" if self.runs == "A" else "A"
        self.device.set_bad(other)
        self.systems[other] = system
        self.device.switch(other)

    @precondition(lambda self: not RecordFile(self.here).read().is_trial(self.runs))
    @rule()
    def loses_its_power_while_an_image_is_written(self) -> None:
        other: Slot = "B" if self.runs == "A" else "A"
        self.device.set_bad(other)
        self.systems[other] = "dead"
        self.loses_its_power()

    @rule(outcome=st.sampled_from(["lanes", "no lanes", "no commit"]))
    def gets_settings(self, outcome: Outcome) -> None:
        self.outcome = outcome

    @invariant()
    def only_a_good_system_is_kept(self) -> None:
        on_trial = RecordFile(self.here).read().is_trial(self.runs)
        assert on_trial or self.systems[self.runs] == "good"


TestTruck = Truck.TestCase
# Each step starts programs.
TestTruck.settings = settings(
    max_examples=settings.default.max_examples // 2, stateful_step_count=8
)
