"""Lists the models of a repository, checked against their manifests, signatures and the daemon."""

from __future__ import annotations

import sys
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import msgspec

from edge_server.cli.tables import size_text
from edge_server.cli.tables import table as aligned
from edge_server.errors import InternalError, ModelConfigError, SettingsError
from edge_server.repository.content import Inventory, model_names, take_inventory
from edge_server.repository.manifest import ABOUT_CONTENT, NAME, SignaturePolicy, unfit
from edge_server.repository.store_state import installed_store
from edge_server.repository.verdicts import GOOD, Held, Verdict, quarantined_in, verdicts_on

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from pathlib import Path

    from edge_server.repository.ssh import RemoteRepository

_HEAD = ("MODEL", "VERSIONS", "SIZE", "DIGEST", "MANIFEST", "SIGNATURE", "PREVIOUS", "DAEMON")


@dataclass(frozen=True)
class Listing:
    """The models of a repository, with their state in its daemon's store.

    Attributes:
        inventories: of each model.
        verdicts: the daemon's verdicts, by model; None if no reachable daemon follows the
            repository.
        quarantined: the content in quarantine.
    """

    inventories: list[Inventory]
    verdicts: dict[str, Verdict] | None
    quarantined: list[Held]

    def encode(self) -> bytes:
        return msgspec.json.encode(self)


def local_listing(repository: Path, store: Path | None = None, name: str = "") -> Listing:
    """Return the listing of a repository on this machine.

    Without `store`, a store that cannot be read is only noted on standard error.

    Args:
        repository: the directory of the repository.
        store: the daemon's store; None for the usual places.
        name: the only model; empty for all.

    Raises:
        ModelConfigError: the repository cannot be read.
        SettingsError: `store` cannot be read.
    """
    names = [name] if name else model_names(repository)
    inventories = [take_inventory(repository, each) for each in names]
    held: list[Held] = []
    try:
        held = quarantined_in(store or installed_store())
    except SettingsError as error:
        if store is not None:
            raise
        print(f"note: what is in quarantine is not known: {error}", file=sys.stderr)
    verdicts = None
    try:
        verdicts = verdicts_on(repository, store)
    except SettingsError as error:
        print(f"note: what the daemon reports is not known: {error}", file=sys.stderr)
    return Listing(inventories, verdicts, held)


def remote_listing(
    repository: RemoteRepository, store: Path | None = None, name: str = ""
) -> Listing:
    """Return the listing of a repository on another machine; see `local_listing`.

    Raises:
        EdgeServerError: the repository cannot be read, or reached.
    """
    at = ["--store", str(store)] if store else []
    output = repository.output("list", repository.directory, f"--inventory={name}", *at)
    try:
        return msgspec.json.decode(output, type=Listing)
    except ValueError as error:
        raise InternalError(f"{repository}: replied with what is no list: {error}") from error


def faults_of(inventory: Inventory, keys: Sequence[Path] = ()) -> list[str]:
    """Return the faults of a model's manifest and, if there are keys, of its signature.

    Raises:
        ModelConfigError: the model itself cannot be read.
        SettingsError: a key is invalid.
    """
    if inventory.fault:
        raise ModelConfigError(inventory.fault)
    found = _manifest_fault(inventory), _signature_fault(inventory, _policy(keys))
    return [fault for fault in found if fault]


def rows(listing: Listing, keys: Sequence[Path] = ()) -> list[dict[str, Any]]:
    """Return all facts about each model, as JSON has them.

    `manifest` is "none", "fits" or the mismatch; `signature` is "none", "unchecked", "good" or its
    fault; `quarantine` is the reason why no daemon with that store loads the model, or empty;
    `daemon` is the daemon's verdict, left out without verdicts.

    Raises:
        SettingsError: a key is invalid.
    """
    policy = _policy(keys)
    quarantine = {held.digest: held.reason for held in listing.quarantined}
    found = [_row(inventory, policy, quarantine) for inventory in listing.inventories]
    for row in found if listing.verdicts is not None else []:
        verdict = (listing.verdicts or {}).get(row["name"], Verdict())
        seen = verdict.digest in ("", row.get("digest", ""))
        row["daemon"] = {
            "outcome": (verdict.outcome if seen else "") or "not seen yet",
            "reason": verdict.reason if seen else "",
            "serves": verdict.serves,
            "last_good": verdict.last_good,
        }
    return found


def _policy(keys: Sequence[Path]) -> SignaturePolicy | None:
    return SignaturePolicy("require", keys) if keys else None


def _row(
    inventory: Inventory, policy: SignaturePolicy | None, quarantine: Mapping[str, str]
) -> dict[str, Any]:
    name, previous = inventory.name, inventory.has_previous
    if inventory.fault:
        return {"name": name, "fault": inventory.fault, "previous": previous}
    manifest, signature = "none", "none"
    if inventory.manifest is not None:
        manifest = _manifest_fault(inventory) or "fits"
    if inventory.signature is not None:
        good = "unchecked" if policy is None else "good"
        signature = _signature_fault(inventory, policy) or good
    digest, files = inventory.content.digest, inventory.content.files
    return {
        "name": name,
        "versions": inventory.versions,
        "bytes": sum(files[path].size for path in files.keys() - ABOUT_CONTENT),
        "digest": digest,
        "manifest": manifest,
        "signature": signature,
        "quarantine": quarantine.get(digest, ""),
        "previous": previous,
    }


def _manifest_fault(inventory: Inventory) -> str:
    if inventory.manifest is None:
        return f"it has no {NAME}; push it with `edge-server models push`"
    content = inventory.content
    return unfit(inventory.manifest, inventory.name, content.files, content.empty)


def _signature_fault(inventory: Inventory, policy: SignaturePolicy | None) -> str:
    if policy is None:
        return ""
    try:
        policy.check(inventory.name, (inventory.manifest, inventory.signature))
    except ModelConfigError as error:
        return str(error).removeprefix(f"model '{inventory.name}': ")
    return ""


def table(found: Sequence[dict[str, Any]]) -> list[str]:
    """Return the rows as text, a line for each model, with the faults in full below."""
    cells = [_HEAD, *(_cells(row) for row in found)]
    if not any("daemon" in row for row in found):
        cells = [line[:-1] for line in cells]
    lines = aligned(cells, left=range(len(cells[0])))
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
