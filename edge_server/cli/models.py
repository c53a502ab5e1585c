"""What each verb of `edge-server models` does; every function returns the exit code."""

from __future__ import annotations

import hashlib
import json
import re
import shutil
import sys
from contextlib import closing
from dataclasses import dataclass, replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Any

import msgspec

from edge_server.cli.model_push import (
    await_verdict,
    copy_progress,
    model_tree,
    pack,
    print_delivery,
    pull,
    sent_entries,
    write_manifest,
)
from edge_server.cli.tables import size_text
from edge_server.cli.tables import table as aligned
from edge_server.cli.verbs import FAILED, OK
from edge_server.errors import InternalError, ModelConfigError, SettingsError
from edge_server.process.disk import cache_directory
from edge_server.repository.content import Inventory, model_names, take_inventory
from edge_server.repository.manifest import (
    ABOUT_CONTENT,
    NAME,
    SignaturePolicy,
    SigningKey,
    make_keys,
    unfit,
)
from edge_server.repository.remote import fetch, open_origin, repository_at
from edge_server.repository.scan import NAME_RULE, is_model_name
from edge_server.repository.store_state import installed_store
from edge_server.repository.transfer import (
    read_archive,
    receive,
    roll_back,
    to_last_good,
    write_archive,
    writing,
)
from edge_server.repository.verdicts import (
    GOOD,
    Held,
    Verdict,
    quarantined_in,
    release,
    verdicts_on,
)

if TYPE_CHECKING:
    import argparse
    from collections.abc import Callable, Iterator, Mapping, Sequence

    from edge_server.repository.content import Inventory
    from edge_server.repository.remote import RemoteRepository
    from edge_server.repository.transfer import Delivery, Entry

_HEAD = ("MODEL", "VERSIONS", "SIZE", "DIGEST", "MANIFEST", "SIGNATURE", "PREVIOUS", "DAEMON")


@dataclass(frozen=True)
class Listing:
    """The models of a repository, with their state in its daemon's store; `verdicts` by model is
    None if no reachable daemon follows the repository."""

    inventories: list[Inventory]
    verdicts: dict[str, Verdict] | None
    quarantined: list[Held]


def local_listing(repository: Path, store: Path | None = None, name: str = "") -> Listing:
    """Return the listing of a repository on this machine.

    Without `store`, that of the usual places is taken; one that cannot be read is only noted on
    standard error. `name` is the only model; empty for all.
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
    """Return the listing of a repository on another machine; see `local_listing`."""
    at = ["--store", str(store)] if store else []
    output = repository.output("list", repository.directory, f"--inventory={name}", *at)
    try:
        return msgspec.json.decode(output, type=Listing)
    except ValueError as error:
        raise InternalError(f"{repository}: did not reply with a list: {error}") from error


def faults_of(inventory: Inventory, keys: Sequence[Path] = ()) -> list[str]:
    """Return the faults of a model's manifest and, if there are keys, of its signature."""
    if inventory.fault:
        raise ModelConfigError(inventory.fault)
    found = _manifest_fault(inventory), _signature_fault(inventory, _policy(keys))
    return [fault for fault in found if fault]


def rows(listing: Listing, keys: Sequence[Path] = ()) -> list[dict[str, Any]]:
    """Return all facts about each model, as JSON has them.

    `manifest` is "none", "fits" or the mismatch; `signature` is "none", "unchecked", "good" or its
    fault; `quarantine` is the reason why no daemon with that store loads the model, or empty;
    `daemon` is the daemon's verdict, left out without verdicts.
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


def pull_url(
    url: str,
    directory: Path,
    progress: Callable[[int], None],
    *,
    name: str,
    sha256: str,
) -> Delivery:
    """Place the model at `url` in the repository `directory`, under its name.

    What is fetched lies below the user's cache directory until the model is in place, so that
    another pull goes on where this one ends. The repository never holds half of a model.

    Args:
        url: see `open_origin`.
        name: the model's name here; by default the origin's.
        sha256: of the archive or the manifest.
    """
    cache = _cache(url, sha256)
    with closing(open_origin(url, sha256)) as origin:
        model = name or origin.name
        if not is_model_name(model):
            raise ModelConfigError(
                f"{url}: '{model[:200]}' is no model's name: {NAME_RULE}; --name N"
            )
        with writing(directory):
            directory.mkdir(parents=True, exist_ok=True)
        # A manifest names its model; under another name a new one is made.
        place, _ = fetch(origin, cache, progress, model)
        package = pack(place)
        done = receive(directory, package.entries())
    shutil.rmtree(cache, ignore_errors=True)
    return replace(done, note=package.note) if package.note else done


def _cache(url: str, sha256: str) -> Path:
    """Return the directory of this pull, below the user's cache directory."""
    digest = hashlib.sha256(f"{url}\n{sha256}".encode()).hexdigest()[:16]
    return cache_directory() / "pull" / digest


def push(arguments: argparse.Namespace) -> int:
    repository = repository_at(arguments.to, arguments.ssh)
    directory, allowed = arguments.dir, arguments.allow_interface_change
    key = None if arguments.sign is None else SigningKey(arguments.sign)
    if arguments.in_place:
        write_manifest(directory, key, allow_interface_change=allowed)

    def there(name: str) -> Inventory:
        if isinstance(repository, Path):
            return take_inventory(repository, name)
        return remote_listing(repository, name=name).inventories[0]

    version = arguments.version
    package = pack(directory, version=version, there=there, key=key, allow_interface_change=allowed)

    def entries() -> Iterator[Entry]:
        with copy_progress(package.tree.size_bytes) as progress:
            yield from package.entries(progress)

    if isinstance(repository, Path):
        done = receive(repository, entries())
        code = _placed(repository, done, arguments)
    else:
        repository.run("accept", *_there(repository, arguments), entries=entries())
        code = OK
    if package.note:
        print(f"note: {package.note}")
    return code


def accept(arguments: argparse.Namespace) -> int:
    return _placed(arguments.to, receive(arguments.to, read_archive(sys.stdin.buffer)), arguments)


def _placed(repository: Path, done: Delivery, arguments: argparse.Namespace) -> int:
    print_delivery(done, repository)
    return await_verdict(repository, done.name, done.content.digest, done.placed_ns, arguments)


def _there(repository: RemoteRepository, arguments: argparse.Namespace) -> list[str]:
    """Return the repository and the flags of `@waiting`, for the same verb on its machine."""
    flags = {"--wait": arguments.wait, "--no-wait": arguments.no_wait}
    flags["--until-passed"] = arguments.until_passed
    given = [flag for flag, is_given in flags.items() if is_given]
    store = [f"--store={arguments.store}"] if arguments.store else []
    to = ["--to", repository.directory]
    return [*to, *given, f"--wait-secs={arguments.wait_secs:g}", *store]


def pull_model(arguments: argparse.Namespace) -> int:
    name, source, to = arguments.model, vars(arguments)["from"], arguments.to
    if "://" in name:
        if source is not None or str(to) == "-":
            raise SettingsError(f"{name}: a URL, which takes --to DIR and no --from")
        with copy_progress() as progress:
            named, sha256 = arguments.name or "", arguments.sha256 or ""
            done = pull_url(name, to, progress, name=named, sha256=sha256)
    elif source is None or arguments.name or arguments.sha256:
        raise SettingsError(
            f"{name}: a model's name, which needs --from REPO and takes neither --name nor --sha256"
        )
    else:
        repository = repository_at(source, arguments.ssh)
        if str(to) == "-":
            write_archive(sys.stdout.buffer, sent_entries(name, repository))
            return OK
        with copy_progress() as progress:
            done = pull(name, repository, to, progress)
    print_delivery(done, to)
    return OK


def show(arguments: argparse.Namespace) -> int:
    where = arguments.repo or "models"
    repository = repository_at(where, arguments.ssh)
    name = arguments.inventory or ""
    if isinstance(repository, Path):
        listing = local_listing(repository, arguments.store, name)
    else:
        listing = remote_listing(repository, arguments.store, name)
    if arguments.inventory is not None:
        sys.stdout.buffer.write(msgspec.json.encode(listing))
        return OK
    found = rows(listing, arguments.key)
    if arguments.json:
        print(json.dumps(found, indent=2))
        return OK
    if found:
        print("\n".join(table(found)))
    else:
        print(f"{where}: no models", file=sys.stderr)
    for held in listing.quarantined:
        print(f"{held.name or 'quarantine'}: {held.digest[:12]} is in quarantine: {held.reason}")
    return OK


def release_model(arguments: argparse.Namespace) -> int:
    store = arguments.store or installed_store()
    for digest, done in release(store, arguments.name, arguments.digest or "").items():
        how = (
            "released; the daemon looks at it again"
            if done
            else "noted; the next daemon that opens the store releases it, none has by now"
        )
        print(f"{arguments.name}: {digest[:12]} in {store}: {how}")
    return OK


def verify(arguments: argparse.Namespace) -> int:
    tree = model_tree(arguments.dir)
    faults = faults_of(take_inventory(tree.repository, tree.name), arguments.key)
    for fault in faults:
        print(f"edge-server: {tree.directory}: {fault}", file=sys.stderr)
    if faults:
        return FAILED
    signed = " and is signed by that key" if arguments.key else ""
    print(f"{tree.name}: is what its manifest says{signed}")
    return OK


def undo_push(arguments: argparse.Namespace) -> int:
    repository, name = repository_at(arguments.to, arguments.ssh), arguments.name
    if not isinstance(repository, Path):
        last_good = ["--to-last-good"] if arguments.to_last_good else []
        repository.run("rollback", name, *last_good, *_there(repository, arguments))
        return OK
    if arguments.to_last_good:
        placed_ns = to_last_good(repository, name, arguments.store)
        print(f"{name}: is what was last found good in {repository}")
    else:
        placed_ns = roll_back(repository, name)
        print(f"{name}: is what it was before in {repository}")
    digest = take_inventory(repository, name).content.digest
    return await_verdict(repository, name, digest, placed_ns, arguments)


def promote(arguments: argparse.Namespace) -> int:
    repository, name = repository_at(arguments.to, arguments.ssh), arguments.name
    served = vars(arguments)["as"] or ""
    if not isinstance(repository, Path):
        given = [*(["--force"] if arguments.force else []), *([f"--as={served}"] if served else [])]
        repository.run("promote", name, *given, *_there(repository, arguments))
        return OK
    inventory = take_inventory(repository, name)
    if inventory.fault:
        raise ModelConfigError(inventory.fault)
    verdict = (verdicts_on(repository, arguments.store) or {}).get(name, Verdict())
    is_judged = verdict.serves == inventory.content.digest
    found = verdict.candidate if is_judged else ""
    if not (arguments.force or found.startswith("good: ")):
        why = found or "the daemon has compared nothing of it; give a network of a camera shadow_of"
        print(f"edge-server: {name}: no good verdict: {why}", file=sys.stderr)
        return FAILED
    served = served or verdict.candidate_of
    if not is_model_name(served):
        raise SettingsError(f"{name}: whose place it takes is not known: give --as MODEL")
    with TemporaryDirectory() as folder:
        copy = Path(folder) / served
        shutil.copytree(repository / name, copy, ignore=shutil.ignore_patterns(*ABOUT_CONTENT))
        config = copy / "config.pbtxt"
        if config.exists():
            named = re.compile(rf'^(\s*name\s*:\s*)"{re.escape(name)}"', re.MULTILINE)
            config.write_text(named.sub(rf'\1"{served}"', config.read_text(), count=1))
        done = receive(repository, pack(copy).entries())
    return _placed(repository, done, arguments)


def sign(arguments: argparse.Namespace) -> int:
    done = write_manifest(arguments.dir, SigningKey(arguments.key))
    print(f"{done.tree.name}: signed, {done.content.digest[:12]}")
    return OK


def keygen(arguments: argparse.Namespace) -> int:
    public = make_keys(arguments.out)
    print(f"{arguments.out}: sign with it, and keep it secret")
    print(f"{public}: check with it; this is what a vehicle gets")
    return OK
