"""`edge-server update`: the part of an update that knows this board: slots, trial, verdict.

An update engine downloads, verifies and writes; these verbs choose what boots (`slot`, the backend
that RAUC calls), judge the system that booted (`commit`) and show what became of it (`status`).
"""

from __future__ import annotations

import logging
import sys
import time
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec

from edge_server.board.update import BootSlots, RecordFile, UpdateRecord
from edge_server.cli.health import STABLE_S, Stability, faults_of, wait_until_healthy
from edge_server.cli.tables import answer
from edge_server.cli.verbs import OK, USAGE
from edge_server.errors import EdgeServerError, Unavailable
from edge_server.settings import read_settings

if TYPE_CHECKING:
    import argparse
    from collections.abc import Callable, Iterable, Iterator

    from edge_server.board.update import Slot

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class UpdatedDevice:
    """What decides about an update on one device.

    Attributes:
        boot_id: changes with every boot.
        version: of edge-server in the slot that runs.
        trial_mark: of a system that a bundle has brought, for where there is no record.
    """

    slots: BootSlots
    record: RecordFile
    boot_id: str
    version: str
    now_s: Callable[[], float] = time.time
    trial_mark: Path = Path("/boot/edge-server-on-trial")

    def switch(self, slot: Slot, engine: str = "") -> None:
        """Have `slot` boot next, and note that its system is on trial then.

        The note comes first: a power cut between the two boots the present system, which finds that
        the new one did not run.

        Raises:
            Unsupported, Unavailable: see `BootSlots.require_switch`; nothing is noted.
            Unavailable: see `BootSlots.set_primary`, and `RecordFile.write`.
        """
        self.slots.require_switch()
        current = self.slots.current()
        last = self.record.read()
        if last.is_trial(current) and slot == last.before:
            # The slot before was good: it is not on trial, and this one was given up.
            fault = "it was given up by hand"
            self._note(last, "pending", f"slot {slot} is to boot again: {fault}", fault=fault)
            self.slots.set_primary(slot)
            return
        if slot != current:
            result = f"slot {slot} is to boot; {current} runs"
            places = {"target": slot, "before": current, "engine": engine, "fault": ""}
            self._note(last, "pending", result, **places)
        self.slots.set_primary(slot)
        if slot != current and not self.slots.tries(slot):
            result = f"slot {slot} is to boot, but has no tries left: power-cycle needed"
            fault = "it had no tries left when it was chosen; install it again and cut the power"
            self._note(self.record.read(), "pending", result, fault=fault)
            log.warning("update: %s; after a warm reboot %s runs again", result, current)
        if slot == current and last.state == "pending" and not last.is_trial(current):
            self._note(last, "cancelled", f"slot {current} was chosen again before a reboot")

    def set_good(self, slot: Slot) -> None:
        """Give `slot`, which runs, all its tries back.

        Raises:
            Unsupported, Unavailable: see `BootSlots.set_good`; or the slot is on trial: with its
                tries back, the firmware would boot a system that crashes again and again.
        """
        if self.record.read().is_trial(slot):
            raise Unavailable(
                f"slot {slot} is on trial: edge-server update commit judges it, and gives its "
                "tries back where it is healthy"
            )
        self.slots.set_good(slot)

    def set_bad(self, slot: Slot) -> None:
        """Keep the firmware from booting `slot`, which an engine does before it writes there.

        Raises:
            Unsupported, Unavailable: see `BootSlots.set_bad`; or the system that runs is on trial,
                and `slot` has the one to go back to.
        """
        current = self.slots.current()
        if slot != current and self.record.read().is_trial(current):
            raise Unavailable(
                f"slot {current} is on trial, and {slot} has the system to go back to: install "
                "when edge-server update status says committed"
            )
        self.slots.set_bad(slot)

    def commit(self, unhealthy: Callable[[], str]) -> str:
        """Judge a system on trial, once after each boot; return the verdict for people.

        A healthy one is kept: its slot gets all its tries back. One that is not healthy makes the
        slot before it boot next; the caller reboots. A system that is not on trial is kept whatever
        its health: its slot was good, and a board of which no boot is verified ends in recovery.

        Args:
            unhealthy: waits for the daemon to be healthy; returns why it is not, or nothing.

        Raises:
            Unavailable: the system on trial is not healthy, or the firmware refuses.
        """
        current = self.slots.current()
        record = self.record.read()
        if not record.is_trial(current):
            return self._keep(current, record)
        if self._is_given_up(record):
            return f"slot {current} was given up in this boot"
        if self.slots.primary() != current:
            self.slots.set_primary(current)
        fault = unhealthy()
        # Another slot may have been chosen by hand in these minutes; what that noted stays.
        record = self.record.read()
        if not record.is_trial(current) or self._is_given_up(record):
            return f"slot {current} is no longer on trial"
        if fault:
            text = f"slot {current} was not healthy: {fault}"
            self._note(record, "pending", text, fault=fault)
            self.slots.set_primary("A" if record.before == "A" else "B")
            raise Unavailable(f"{text}; slot {record.before} boots next")
        self._set_good(current)
        self._note(record, "committed", f"slot {current} was healthy and is kept", fault="")
        return f"slot {current} is healthy and is kept"

    def _is_given_up(self, record: UpdateRecord) -> bool:
        return record.fault != "" and record.boot_id == self.boot_id

    def _keep(self, current: Slot, record: UpdateRecord) -> str:
        # Without a target it is another engine's, which comes to its own verdict.
        pending = record.state == "pending" and record.target != ""
        waits_for_reboot = pending and record.boot_id == self.boot_id
        if pending and not waits_for_reboot:
            why = record.fault or "it did not start, or was not switched to"
            text = f"slot {record.target} was not kept, {current} runs again: {why}"
            self._note(record, "rolled_back", text)
        elif (record.slot, record.version) != (current, self.version):
            self._note(record, record.state, record.result)
        if not waits_for_reboot and self.slots.primary() != current:
            # After a fall back the firmware may still prefer the other; it would cancel capsules.
            self.slots.set_primary(current)
        self._set_good(current)
        return f"slot {current} is not on trial, and is kept"

    def _set_good(self, current: Slot) -> None:
        self.slots.set_good(current)
        try:
            self.trial_mark.unlink(missing_ok=True)
        except OSError as error:
            log.warning("update: %s: %s; remove it", self.trial_mark, error.strerror)

    def _note(self, last: UpdateRecord, state: str, result: str, **more: str) -> UpdateRecord:
        changed_s = last.changed_s if state == last.state and not more else int(self.now_s())
        record = msgspec.structs.replace(
            last,
            state=state,
            result=result,
            slot=self.slots.current(),
            version=self.version,
            boot_id=self.boot_id,
            changed_s=changed_s,
            **more,
        )
        self.record.write(record)
        return record


def _device(arguments: argparse.Namespace) -> UpdatedDevice:
    boot_id = Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii").strip()
    record = RecordFile(arguments.state_directory)
    return UpdatedDevice(BootSlots(arguments.root), record, boot_id, version("edge-server"))


def show(arguments: argparse.Namespace) -> Iterable[str]:
    """Return what became of the last update."""
    file = RecordFile(arguments.state_directory)
    try:
        file.path.stat()
    except FileNotFoundError:
        pass  # no update so far
    except OSError as error:
        remedy = "run this as root" if isinstance(error, PermissionError) else "check the path"
        raise Unavailable(f"{file.path}: {error.strerror}; {remedy}") from error
    record = file.read()
    at = f", slot {record.slot}" if record.slot else ""
    line = f"{record.state}{at}{': ' if record.result else ''}{record.result}"
    return answer(arguments, msgspec.to_builtins(record), (line,))


def commit(arguments: argparse.Namespace) -> Iterator[str]:
    """Judge the system that runs; yield the verdict."""

    def unhealthy() -> str:
        # New settings that the new system cannot read are a fault of the update, too.
        try:
            settings = read_settings(arguments.config, {})
            faults = faults_of(arguments.require, settings)
        except EdgeServerError as error:
            return str(error)
        if faults:
            return "; ".join(faults)
        stability = Stability(arguments.stable or STABLE_S)
        required, wait_s = arguments.require, arguments.wait
        if wait_until_healthy(settings, required, stability, wait_s=wait_s):
            return ""
        unmet = "; ".join(f"{name}: {why}" for name, why in stability.last.unmet.items())
        return unmet or f"not for {stability.stable_s:g} s in a row in {wait_s:g} s"

    yield _device(arguments).commit(unhealthy)


def record(arguments: argparse.Namespace) -> None:
    """Note what became of an update without slots."""
    file = RecordFile(arguments.state_directory)
    last = file.read()
    if last.state == "pending" and last.target:
        raise Unavailable(
            f"the update of slot {last.target} waits for its verdict, which needs the record as it "
            "is: edge-server update status"
        )
    noted = UpdateRecord(
        state=arguments.outcome,
        slot=last.slot,
        version=version("edge-server"),
        result=arguments.result or "",
        engine=arguments.engine,
        changed_s=int(time.time()),
    )
    file.write(noted)


def slot(arguments: argparse.Namespace) -> int:
    """Ask or change the firmware's slots; return the exit code."""
    device = _device(arguments)
    action, slot, state = arguments.action, arguments.slot, arguments.state
    if (slot is None) == (action in ("set-primary", "get-state", "set-state")) or (
        (state is None) == (action == "set-state")
    ):
        print(f"edge-server update slot {action}: wrong number of arguments", file=sys.stderr)
        return USAGE
    if action == "get-current":
        print(device.slots.current())
    elif action == "get-primary":
        print(device.slots.primary())
    elif action == "get-state":
        print("good" if device.slots.is_good(slot) else "bad")
    elif action == "set-primary":
        device.switch(slot, arguments.engine)
    elif state == "good":
        device.set_good(slot)
    else:
        device.set_bad(slot)
    return OK
