"""`edge-server models …`: the arguments of each verb. Each verb imports its code when it runs."""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from typing import TYPE_CHECKING

from edge_server.cli.verbs import FAILED, OK, Verb, Verbs

if TYPE_CHECKING:
    from edge_server.cli.models.push import Delivery, Repository
    from edge_server.repository.transfer.quarantine import Held
    from edge_server.repository.verdicts import Verdict

_ABOUT = """\
Brings models into repositories so that a daemon which follows one never sees half of one: a copy
under a dot name, with a manifest of every file's size and sha256, then one rename. What was there
before is kept for `rollback`. What editors and Python leave behind (.*, *~, *.tmp, __pycache__) is
no part of a model and stays behind.

A repository is a directory, or [USER@]HOST:DIRECTORY, reached with ssh; that host needs python3 and
nothing else.
"""
_CODES = """\
exit codes: 0 done, 1 failed (verify: it is not what its manifest says, or not signed by that key;
push, rollback: the daemon refused it or rolled it back, or other content took its place before the
daemon decided), 2 usage, 69 the host or the daemon cannot be reached, 75 the daemon has not decided
yet, 78 no such model, or it or a key cannot be used; the text says why, 130 interrupted
"""
_INTERRUPTED = "edge-server: interrupted; no half model is left"


def add_verbs(parser: argparse.ArgumentParser) -> None:
    """Add the verbs below `models`."""
    verbs = Verbs(parser, about=_ABOUT, codes=_CODES, interrupted=_INTERRUPTED)

    push = verbs.add("push", "put a model into a repository", _push)
    push.takes("directory", type=Path, metavar="DIR", help="the model, named as its directory is")
    push.takes("--to", required=True, metavar="REPO", help="where to")
    push.takes(
        "--version",
        type=_version,
        metavar="N",
        help="only this version; the rest of the model stays as it is there",
    )
    push.takes("--sign", type=Path, metavar="KEY", help="sign it with this private key")
    push.takes(
        "--allow-interface-change",
        action="store_true",
        help="it may break those who call what it replaces: other names, types or shapes",
    )
    push.takes(
        "--in-place",
        action="store_true",
        help="leave the manifest, and the signature, in DIR as well",
    )
    _takes_waiting(push)
    _takes_ssh(push)

    pull = verbs.add("pull", "fetch a model, held against its manifest", _pull)
    pull.takes("name", metavar="NAME")
    pull.takes("--from", dest="source", required=True, metavar="REPO", help="where from")
    pull.takes("--to", type=Path, required=True, metavar="DIR", help="it becomes DIR/NAME")
    _takes_ssh(pull)

    listing = verbs.add("list", "what is in a repository, and whether it is as it was made", _list)
    listing.takes("repository", nargs="?", default="models", metavar="REPO", help="default: models")
    _takes_keys(listing, "check signatures with it; repeatable")
    listing.takes("--json", action="store_true", help="a list of objects, with whole digests")
    _takes_store(listing, "what it says of each model, and of quarantine, is told of")
    _takes_ssh(listing)

    verify = verbs.add("verify", "whether a model is what its manifest says", _verify)
    verify.takes("directory", type=Path, metavar="DIR", help="the model's, or REPO/NAME")
    _takes_keys(verify, "it must be signed with the private one of it; repeatable")

    rollback = verbs.add(
        "rollback", "what a model was before its last push; again undoes it", _back
    )
    rollback.takes("name", metavar="NAME")
    rollback.takes("--to", required=True, metavar="REPO", help="where")
    rollback.takes(
        "--to-last-good",
        action="store_true",
        help="to what the daemon which follows REPO has last found good, whatever was pushed since",
    )
    _takes_waiting(rollback)
    _takes_ssh(rollback)

    release = verbs.add(
        "release", "let a model out of quarantine; the daemon tries it again", _release
    )
    release.takes("name", metavar="NAME")
    release.takes(
        "--digest",
        type=_digest,
        metavar="D",
        help="only what has this digest, or one that begins so; default: all of that model",
    )
    _takes_store(release, "it is in quarantine")

    sign = verbs.add("sign", "write a model's manifest and signature into its directory", _sign)
    sign.takes("directory", type=Path, metavar="DIR", help="the model")
    sign.takes("--key", type=Path, required=True, metavar="KEY", help="the private key")

    keygen = verbs.add("keygen", "make a key to sign models with", _keygen)
    keygen.takes(
        "--out", type=Path, required=True, metavar="KEY", help="the public one becomes KEY.pub"
    )


def _takes_ssh(verb: Verb) -> None:
    verb.takes(
        "--ssh", default="ssh", metavar="COMMAND", help="like 'ssh -p 2222 -i KEY'; default: ssh"
    )


def _takes_store(verb: Verb, text: str) -> None:
    verb.takes(
        "--store",
        type=Path,
        metavar="DIR",
        help=f"where the daemon keeps its copies of models, in which {text}; default: the "
        "installed daemon's, else yours",
    )


def _takes_waiting(verb: Verb) -> None:
    verb.takes(
        "--wait",
        action="store_true",
        help="fail where no daemon says what becomes of it; by default only one that follows REPO "
        "is waited for, until it serves the model, refuses it or rolls it back",
    )
    verb.takes("--no-wait", action="store_true", help="do not wait for a daemon")
    verb.takes(
        "--until-passed",
        action="store_true",
        help="as --wait, and until its probation is over too, which takes requests",
    )
    verb.takes(
        "--wait-secs",
        type=_seconds,
        default=300.0,
        metavar="S",
        help="how long; building a plan takes minutes (default: %(default)g)",
    )
    _takes_store(verb, "it says what became of each model")


def _takes_keys(verb: Verb, text: str) -> None:
    verb.takes(
        "--key", type=Path, action="append", default=[], metavar="PUB", help=f"public key: {text}"
    )


def _push(arguments: argparse.Namespace) -> int:
    from edge_server.cli.models.hearing import hear  # noqa: PLC0415
    from edge_server.cli.models.progress import Progress  # noqa: PLC0415
    from edge_server.cli.models.push import model_tree, push, write_about  # noqa: PLC0415
    from edge_server.repository.transfer.keys import SigningKey  # noqa: PLC0415
    from edge_server.repository.transfer.remote import repository_at  # noqa: PLC0415

    repository = repository_at(arguments.to, arguments.ssh)
    key = None if arguments.sign is None else SigningKey(arguments.sign)
    if arguments.in_place:
        write_about(
            arguments.directory, key, allow_interface_change=arguments.allow_interface_change
        )
    total_bytes = model_tree(arguments.directory).size_bytes
    with Progress(total_bytes) as progress:
        done = push(
            arguments.directory,
            repository,
            version=arguments.version,
            key=key,
            progress=progress,
            allow_interface_change=arguments.allow_interface_change,
        )
    _tell(done, str(repository))
    return hear(repository, done.name, done.digest, done.placed_ns, arguments)


def _pull(arguments: argparse.Namespace) -> int:
    from edge_server.cli.models.progress import Progress  # noqa: PLC0415
    from edge_server.cli.models.push import pull  # noqa: PLC0415
    from edge_server.repository.transfer.remote import repository_at  # noqa: PLC0415

    repository = repository_at(arguments.source, arguments.ssh)
    with Progress() as progress:
        done = pull(arguments.name, repository, arguments.to, progress)
    _tell(done, str(arguments.to))
    return OK


def _list(arguments: argparse.Namespace) -> int:
    from edge_server.cli.models.inspection import Inspection, rows, table  # noqa: PLC0415
    from edge_server.repository.transfer.local import LocalRepository  # noqa: PLC0415
    from edge_server.repository.transfer.quarantine import held_back  # noqa: PLC0415
    from edge_server.repository.transfer.remote import repository_at  # noqa: PLC0415

    repository = repository_at(arguments.repository, arguments.ssh)
    # A daemon's store is on its own machine.
    is_here = isinstance(repository, LocalRepository)
    held = held_back(arguments.store) if arguments.store else _held_here() if is_here else []
    inspection = Inspection(arguments.key, {each.digest: each.reason for each in held})
    found = rows(repository, inspection, _told(repository, arguments.store))
    if arguments.json:
        print(json.dumps(found, indent=2))
        return OK
    if found:
        print("\n".join(table(found)))
    else:
        print(f"{arguments.repository}: no models", file=sys.stderr)
    for each in held:
        print(f"{each.name or 'quarantine'}: {each.digest[:12]} is in quarantine: {each.reason}")
    return OK


def _held_here() -> list[Held]:
    """Return the models in quarantine on this machine, as far as this user may read the store."""
    from edge_server.errors import SettingsError  # noqa: PLC0415
    from edge_server.repository.store_place import installed_store  # noqa: PLC0415
    from edge_server.repository.transfer.quarantine import held_back  # noqa: PLC0415

    try:
        return held_back(installed_store())
    except SettingsError as error:
        print(f"note: what is in quarantine is not known: {error}", file=sys.stderr)
        return []


def _told(repository: Repository, store: Path | None) -> dict[str, Verdict] | None:
    """Return the verdicts of the daemon that follows `repository`; None if they are unreadable."""
    from edge_server.errors import SettingsError  # noqa: PLC0415

    try:
        return repository.models_told(str(store or ""))
    except SettingsError as error:
        print(f"note: what the daemon says is not known: {error}", file=sys.stderr)
        return None


def _release(arguments: argparse.Namespace) -> int:
    from edge_server.repository.store_place import installed_store  # noqa: PLC0415
    from edge_server.repository.transfer.quarantine import release  # noqa: PLC0415

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
    from edge_server.cli.models.inspection import Inspection  # noqa: PLC0415
    from edge_server.cli.models.push import model_tree  # noqa: PLC0415
    from edge_server.repository.transfer.inventory import take_inventory  # noqa: PLC0415

    inspection = Inspection(arguments.key)
    tree = model_tree(arguments.directory)
    inventory = take_inventory(tree.repository, tree.name)
    faults = inspection.faults(inventory)
    for fault in faults:
        print(f"edge-server: {tree.directory}: {fault}", file=sys.stderr)
    if faults:
        return FAILED
    signed = " and is signed by that key" if arguments.key else ""
    print(f"{tree.name}: is what its manifest says{signed}")
    return OK


def _back(arguments: argparse.Namespace) -> int:
    from edge_server.cli.models.hearing import hear  # noqa: PLC0415
    from edge_server.repository.transfer.inventory import digest_of  # noqa: PLC0415
    from edge_server.repository.transfer.remote import repository_at  # noqa: PLC0415

    repository = repository_at(arguments.to, arguments.ssh)
    name, store = arguments.name, str(arguments.store or "")
    if arguments.to_last_good:
        placed_ns = repository.to_last_good(name, store)
        print(f"{name}: is what was last found good in {repository}")
    else:
        placed_ns = repository.roll_back(name)
        print(f"{name}: is what it was before in {repository}")
    inventory = repository.inventory(name)
    return hear(repository, name, digest_of(inventory.files, inventory.empty), placed_ns, arguments)


def _sign(arguments: argparse.Namespace) -> int:
    from edge_server.cli.models.push import write_about  # noqa: PLC0415
    from edge_server.repository.transfer.keys import SigningKey  # noqa: PLC0415

    done = write_about(arguments.directory, SigningKey(arguments.key))
    print(f"{done.name}: signed, {done.digest[:12]}")
    return OK


def _keygen(arguments: argparse.Namespace) -> int:
    from edge_server.repository.transfer.keys import make_keys  # noqa: PLC0415

    public = make_keys(arguments.out)
    print(f"{arguments.out}: sign with it, and show it to nobody")
    print(f"{public}: check with it; this is what a vehicle gets")
    return OK


def _tell(done: Delivery, where: str) -> None:
    told = {"new": "new", "replaced": "replaced, rollback brings the former one back"}
    how = told.get(done.outcome, "was there already, nothing changed")
    print(f"{done.name}: {done.digest[:12]} in {where}: {how}")
    if done.note:
        print(f"note: {done.note}")


def _version(text: str) -> int:
    if not text.isdecimal() or text.startswith("0"):
        raise argparse.ArgumentTypeError(f"{text}: a version is a whole number from 1")
    return int(text)


def _seconds(text: str) -> float:
    try:
        seconds = float(text)
    except ValueError:
        seconds = -1.0
    if not 0 <= seconds < 1e6:
        raise argparse.ArgumentTypeError(f"{text}: give seconds, 0 or above")
    return seconds


def _digest(text: str) -> str:
    if not text or len(text) > 64 or not set(text) <= set("0123456789abcdef"):
        raise argparse.ArgumentTypeError(f"{text}: a digest is hexadecimal, as `list` tells it")
    return text
