"""What each verb of `edge-server models` does; every function returns the exit code."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import TYPE_CHECKING

from edge_server.cli.exit_codes import FAILED, OK
from edge_server.cli.models.listing import (
    faults_of,
    local_listing,
    remote_listing,
    rows,
    table,
)
from edge_server.cli.models.outcome import Progress, await_verdict, print_delivery
from edge_server.errors import SettingsError
from edge_server.repository.content import take_inventory
from edge_server.repository.manifest import SigningKey, make_keys
from edge_server.repository.ssh import repository_at
from edge_server.repository.store_state import installed_store
from edge_server.repository.transfer import (
    read_archive,
    receive,
    roll_back,
    to_last_good,
    write_archive,
)
from edge_server.repository.verdicts import release

if TYPE_CHECKING:
    import argparse
    from collections.abc import Iterator

    from edge_server.repository.content import Inventory
    from edge_server.repository.transfer import Delivery, Entry


def _push(arguments: argparse.Namespace) -> int:
    from edge_server.cli.models.push import pack, write_manifest

    repository = repository_at(arguments.to, arguments.ssh)
    directory, allowed = arguments.directory, arguments.allow_interface_change
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
        with Progress(package.tree.size_bytes) as progress:
            yield from package.entries(progress)

    if isinstance(repository, Path):
        done = receive(repository, entries())
        code = _placed(repository, done, arguments)
    else:
        to = ["--to", repository.directory]
        repository.run("accept", *to, *_waiting(arguments), entries=entries())
        code = OK
    if package.note:
        print(f"note: {package.note}")
    return code


def _accept(arguments: argparse.Namespace) -> int:
    return _placed(arguments.to, receive(arguments.to, read_archive(sys.stdin.buffer)), arguments)


def _placed(repository: Path, done: Delivery, arguments: argparse.Namespace) -> int:
    print_delivery(done, repository)
    return await_verdict(repository, done.name, done.content.digest, done.placed_ns, arguments)


def _waiting(arguments: argparse.Namespace) -> list[str]:
    """Return the arguments of `_takes_waiting` again, for the same verb on another machine."""
    flags = {"--wait": arguments.wait, "--no-wait": arguments.no_wait}
    flags["--until-passed"] = arguments.until_passed
    given = [flag for flag, is_given in flags.items() if is_given]
    store = [f"--store={arguments.store}"] if arguments.store else []
    return [*given, f"--wait-secs={arguments.wait_secs:g}", *store]


def _pull(arguments: argparse.Namespace) -> int:
    from edge_server.cli.models.push import pull, sent_entries

    name = arguments.name
    if "://" in name:
        return _pull_url(arguments)
    if arguments.source is None or arguments.rename or arguments.sha256:
        raise SettingsError(
            f"{name}: a model's name, which needs --from REPO and takes neither --name nor --sha256"
        )
    repository = repository_at(arguments.source, arguments.ssh)
    if str(arguments.to) == "-":
        write_archive(sys.stdout.buffer, sent_entries(name, repository))
        return OK
    with Progress() as progress:
        done = pull(name, repository, arguments.to, progress)
    print_delivery(done, arguments.to)
    return OK


def _pull_url(arguments: argparse.Namespace) -> int:
    from edge_server.cli.models.remote import pull_url

    if arguments.source is not None or str(arguments.to) == "-":
        raise SettingsError(f"{arguments.name}: a URL, which takes --to DIR and no --from")
    with Progress() as progress:
        done = pull_url(
            arguments.name,
            arguments.to,
            progress,
            name=arguments.rename,
            sha256=arguments.sha256 or "",
        )
    print_delivery(done, arguments.to)
    return OK


def _list(arguments: argparse.Namespace) -> int:
    repository = repository_at(arguments.repository, arguments.ssh)
    name = arguments.inventory or ""
    if isinstance(repository, Path):
        listing = local_listing(repository, arguments.store, name)
    else:
        listing = remote_listing(repository, arguments.store, name)
    if arguments.inventory is not None:
        sys.stdout.buffer.write(listing.encode())
        return OK
    found = rows(listing, arguments.key)
    if arguments.json:
        print(json.dumps(found, indent=2))
        return OK
    if found:
        print("\n".join(table(found)))
    else:
        print(f"{arguments.repository}: no models", file=sys.stderr)
    for held in listing.quarantined:
        print(f"{held.name or 'quarantine'}: {held.digest[:12]} is in quarantine: {held.reason}")
    return OK


def _release(arguments: argparse.Namespace) -> int:
    store = arguments.store or installed_store()
    for digest, done in release(store, arguments.name, arguments.digest or "").items():
        how = (
            "released; the daemon looks at it again"
            if done
            else "noted; the next daemon that opens the store releases it, none has by now"
        )
        print(f"{arguments.name}: {digest[:12]} in {store}: {how}")
    return OK


def _verify(arguments: argparse.Namespace) -> int:
    from edge_server.cli.models.push import model_tree

    tree = model_tree(arguments.directory)
    faults = faults_of(take_inventory(tree.repository, tree.name), arguments.key)
    for fault in faults:
        print(f"edge-server: {tree.directory}: {fault}", file=sys.stderr)
    if faults:
        return FAILED
    signed = " and is signed by that key" if arguments.key else ""
    print(f"{tree.name}: is what its manifest says{signed}")
    return OK


def _roll_back(arguments: argparse.Namespace) -> int:
    repository, name = repository_at(arguments.to, arguments.ssh), arguments.name
    if not isinstance(repository, Path):
        last_good = ["--to-last-good"] if arguments.to_last_good else []
        to = ["--to", repository.directory]
        repository.run("rollback", name, *to, *last_good, *_waiting(arguments))
        return OK
    if arguments.to_last_good:
        placed_ns = to_last_good(repository, name, arguments.store)
        print(f"{name}: is what was last found good in {repository}")
    else:
        placed_ns = roll_back(repository, name)
        print(f"{name}: is what it was before in {repository}")
    digest = take_inventory(repository, name).content.digest
    return await_verdict(repository, name, digest, placed_ns, arguments)


def _sign(arguments: argparse.Namespace) -> int:
    from edge_server.cli.models.push import write_manifest

    done = write_manifest(arguments.directory, SigningKey(arguments.key))
    print(f"{done.tree.name}: signed, {done.content.digest[:12]}")
    return OK


def _keygen(arguments: argparse.Namespace) -> int:
    public = make_keys(arguments.out)
    print(f"{arguments.out}: sign with it, and show it to nobody")
    print(f"{public}: check with it; this is what a vehicle gets")
    return OK


ACTIONS = {
    "push": _push,
    "accept": _accept,
    "pull": _pull,
    "list": _list,
    "verify": _verify,
    "rollback": _roll_back,
    "release": _release,
    "sign": _sign,
    "keygen": _keygen,
}
