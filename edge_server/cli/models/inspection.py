"""Inspection: checks the models of a repository against their manifests and signatures."""

from __future__ import annotations

from types import MappingProxyType
from typing import TYPE_CHECKING, Any

from edge_server.errors import ModelConfigError
from edge_server.repository.manifest import NAME
from edge_server.repository.signature import SignaturePolicy
from edge_server.repository.transfer.content_list import unfit
from edge_server.repository.transfer.inventory import digest_of
from edge_server.repository.verdicts import GOOD, Verdict

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from pathlib import Path

    from edge_server.repository.transfer.inventory import Inventory
    from edge_server.repository.transfer.local import LocalRepository
    from edge_server.repository.transfer.remote import RemoteRepository

_HEAD = ("MODEL", "VERSIONS", "SIZE", "DIGEST", "MANIFEST", "SIGNATURE", "PREVIOUS", "DAEMON")


class Inspection:
    """Compares models with their manifests, and their signatures with keys.

    Args:
        keys: files of public keys; without any, signatures are not checked.
        quarantine: digest → reason why that content is in quarantine.

    Raises:
        SettingsError: a key is invalid.
    """

    def __init__(
        self, keys: Sequence[Path], quarantine: Mapping[str, str] = MappingProxyType({})
    ) -> None:
        self._quarantine = quarantine
        self._policy = SignaturePolicy("require", keys) if keys else None

    def faults(self, inventory: Inventory) -> list[str]:
        """Return the faults of a model's manifest and, if there are keys, of its signature.

        Raises:
            ModelConfigError: the model itself cannot be read.
        """
        if inventory.fault:
            raise ModelConfigError(inventory.fault)
        found = [self._manifest_fault(inventory), self._signature_fault(inventory)]
        return [fault for fault in found if fault]

    def row(self, inventory: Inventory) -> dict[str, Any]:
        """Return all facts about a model, as JSON has them.

        `manifest` is "none", "fits" or the mismatch; `signature` is "none", "unchecked", "good" or
        its fault; `quarantine` is the reason why no daemon with that store loads the model, or
        empty.
        """
        if inventory.fault:
            return {
                "name": inventory.name,
                "fault": inventory.fault,
                "previous": inventory.has_previous,
            }
        manifest, signature = "none", "none"
        if inventory.manifest is not None:
            manifest = self._manifest_fault(inventory) or "fits"
        if inventory.signature is not None:
            good = "unchecked" if self._policy is None else "good"
            signature = self._signature_fault(inventory) or good
        digest = digest_of(inventory.files, inventory.empty)
        return {
            "name": inventory.name,
            "versions": list(inventory.versions),
            "bytes": sum(each.size for each in inventory.files.values()),
            "digest": digest,
            "manifest": manifest,
            "signature": signature,
            "quarantine": self._quarantine.get(digest, ""),
            "previous": inventory.has_previous,
        }

    def _manifest_fault(self, inventory: Inventory) -> str:
        if inventory.manifest is None:
            return f"it has no {NAME}; push it with `edge-server models push`"
        return unfit(inventory.manifest, inventory.name, inventory.files, inventory.empty)

    def _signature_fault(self, inventory: Inventory) -> str:
        if self._policy is None:
            return ""
        try:
            self._policy.check(inventory.name, inventory.manifest, inventory.signature)
        except ModelConfigError as error:
            return str(error).removeprefix(f"model '{inventory.name}': ")
        return ""


def rows(
    repository: LocalRepository | RemoteRepository,
    inspection: Inspection,
    told: Mapping[str, Verdict] | None = None,
) -> list[dict[str, Any]]:
    """Return a row for each model of `repository`, with the daemon's verdict as `daemon`.

    Args:
        told: the daemon's verdicts, by model; None if no reachable daemon follows the repository,
            and the rows have no `daemon`.

    Raises:
        EdgeServerError: the repository cannot be read, or reached.
    """
    found = [inspection.row(repository.inventory(name)) for name in repository.names()]
    if told is not None:
        for row in found:
            verdict = told.get(row["name"], Verdict())
            seen = verdict.digest in ("", row.get("digest", ""))
            row["daemon"] = {
                "outcome": (verdict.outcome if seen else "") or "not seen yet",
                "reason": verdict.reason if seen else "",
                "serves": verdict.serves,
                "last_good": verdict.last_good,
            }
    return found


def table(found: Sequence[dict[str, Any]]) -> list[str]:
    """Return the rows as text, a line for each model, with the faults in full below."""
    cells = [_HEAD, *(_cells(row) for row in found)]
    if not any("daemon" in row for row in found):
        cells = [line[:-1] for line in cells]
    widths = [max(len(line[column]) for line in cells) for column in range(len(cells[0]))]
    lines = [
        "  ".join(c.ljust(w) for c, w in zip(line, widths, strict=True)).rstrip() for line in cells
    ]
    for row in found:
        lines += [
            f"{row['name']}: {row[what]}"
            for what in ("fault", "manifest", "signature")
            if _mark(row.get(what, "none")) == "WRONG"
        ]
        lines += [f"{row['name']}: {line}" for line in _daemon_lines(row)]
    return lines


def _daemon_lines(row: dict[str, Any]) -> list[str]:
    """Return lines for a model that does not serve as stored, and for the content that serves."""
    daemon = row.get("daemon", {})
    lines = [f"{daemon['outcome']}: {daemon['reason']}"] if daemon.get("reason") else []
    serves = daemon.get("serves", "")
    if serves and serves != row.get("digest"):
        good = " (last known good)" if serves == daemon["last_good"] else ""
        lines.append(f"{serves[:12]} serves{good}")
    return lines


def _cells(row: dict[str, Any]) -> tuple[str, ...]:
    before = "yes" if row["previous"] else "-"
    daemon = row.get("daemon", {}).get("outcome", "")
    if "fault" in row:
        return (row["name"], "-", "-", "-", "WRONG", "-", before, daemon)
    return (
        row["name"],
        ",".join(map(str, row["versions"])) or "-",
        size_text(row["bytes"]),
        row["digest"][:12],
        _mark(row["manifest"]),
        _mark(row["signature"]),
        before,
        "serves" if daemon == GOOD else daemon,
    )


def _mark(state: str) -> str:
    return state if state in {"none", "fits", "unchecked", "good"} else "WRONG"


def size_text(size_bytes: int) -> str:
    size, units = float(size_bytes), iter(("B", "KiB", "MiB", "GiB"))
    unit = next(units)
    while size >= 1024 and unit != "GiB":
        size, unit = size / 1024, next(units)
    return f"{size:.0f} {unit}" if unit == "B" else f"{size:.1f} {unit}"
