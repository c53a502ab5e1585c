"""`edge-server models …`: the arguments of each verb. Each verb imports its code when it runs."""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from typing import TYPE_CHECKING

from edge_server.cli.verbs import FAILED, OK, Verb, Verbs

if TYPE_CHECKING:
    from edge_server.cli.models.listing import Listing

_ABOUT = """\
Brings models into repositories so that a daemon which follows one never sees half of one: a copy
under a dot name, with a manifest of every file's size and sha256, then one rename. What was there
before is kept for `rollback`. What editors and Python leave behind (.*, *~, *.tmp, __pycache__) is
no part of a model and stays behind.

A repository is a directory, or [USER@]HOST:DIRECTORY, reached with ssh; that host needs edge-server
in the PATH of that user.
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

    accept = verbs.add(
        "accept", "put the model into a repository that comes as an archive on stdin", _accept
    )
    accept.takes("--to", type=_directory, required=True, metavar="DIR", help="where to")
    _takes_waiting(accept)

    pull = verbs.add("pull", "fetch a model, held against its manifest", _pull)
    pull.takes("name", metavar="NAME")
    pull.takes("--from", dest="source", required=True, metavar="REPO", help="where from")
    pull.takes(
        "--to",
        type=_directory,
        required=True,
        metavar="DIR",
        help="it becomes DIR/NAME; '-' writes an archive to stdout, as `accept` reads it",
    )
    _takes_ssh(pull)

    listing = verbs.add("list", "what is in a repository, and whether it is as it was made", _list)
    listing.takes("repository", nargs="?", default="models", metavar="REPO", help="default: models")
    _takes_keys(listing, "check signatures with it; repeatable")
    # All that this verb and `push --version` need of a repository on another machine.
    listing.takes("--inventory", metavar="NAME", help=argparse.SUPPRESS)
    listing.takes("--json", action="store_true", help="a list of objects, with whole digests")
    _takes_store(listing, "its verdict on each model and its quarantine are")
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
        type=_directory,
        metavar="DIR",
        help=f"where the daemon keeps its copies of models, in which {text}; default: the "
        "installed daemon's, else yours",
    )


def _takes_waiting(verb: Verb) -> None:
    verb.takes(
        "--wait",
        action="store_true",
        help="fail where no daemon decides on it; by default only one that follows REPO is waited "
        "for, until it serves the model, refuses it or rolls it back",
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
    _takes_store(verb, "its verdict on each model is")


def _takes_keys(verb: Verb, text: str) -> None:
    verb.takes(
        "--key", type=Path, action="append", default=[], metavar="PUB", help=f"public key: {text}"
    )


def _push(arguments: argparse.Namespace) -> int:
    from edge_server.cli.models.listing import remote_listing  # noqa: PLC0415
    from edge_server.cli.models.outcome import Progress, await_verdict, print_delivery  # noqa: PLC0415
    from edge_server.cli.models.push import model_tree, pack, push, write_manifest  # noqa: PLC0415
    from edge_server.repository.signature import SigningKey  # noqa: PLC0415
    from edge_server.repository.transfer.ssh import repository_at  # noqa: PLC0415

    repository = repository_at(arguments.to, arguments.ssh)
    directory, version = arguments.directory, arguments.version
    allowed = arguments.allow_interface_change
    key = None if arguments.sign is None else SigningKey(arguments.sign)
    if arguments.in_place:
        write_manifest(directory, key, allow_interface_change=allowed)
    with Progress(model_tree(directory).size_bytes) as progress:
        if isinstance(repository, Path):
            done = push(
                directory,
                repository,
                version=version,
                key=key,
                progress=progress,
                allow_interface_change=allowed,
            )
        else:
            package = pack(
                directory,
                version=version,
                there=lambda name: remote_listing(repository, name=name).inventories[0],
                key=key,
                allow_interface_change=allowed,
            )
            waiting = _waiting(arguments)
            entries = package.entries(progress)
            repository.run("accept", "--to", repository.directory, *waiting, entries=entries)
            if package.note:
                print(f"note: {package.note}")
            return OK
    print_delivery(done, repository)
    return await_verdict(repository, done.name, done.content.digest, done.placed_ns, arguments)


def _accept(arguments: argparse.Namespace) -> int:
    from edge_server.cli.models.outcome import await_verdict, print_delivery  # noqa: PLC0415
    from edge_server.repository.transfer.entries import read_archive  # noqa: PLC0415
    from edge_server.repository.transfer.incoming import receive  # noqa: PLC0415

    done = receive(arguments.to, read_archive(sys.stdin.buffer))
    print_delivery(done, arguments.to)
    return await_verdict(arguments.to, done.name, done.content.digest, done.placed_ns, arguments)


def _waiting(arguments: argparse.Namespace) -> list[str]:
    """Return the arguments of `_takes_waiting` again, for the same verb on another machine."""
    flags = {"--wait": arguments.wait, "--no-wait": arguments.no_wait}
    flags["--until-passed"] = arguments.until_passed
    given = [flag for flag, is_given in flags.items() if is_given]
    store = [f"--store={arguments.store}"] if arguments.store else []
    return [*given, f"--wait-secs={arguments.wait_secs:g}", *store]


def _pull(arguments: argparse.Namespace) -> int:
    from edge_server.cli.models.outcome import Progress, print_delivery  # noqa: PLC0415
    from edge_server.cli.models.push import pull, sent_entries  # noqa: PLC0415
    from edge_server.repository.transfer.entries import write_archive  # noqa: PLC0415
    from edge_server.repository.transfer.ssh import repository_at  # noqa: PLC0415

    repository = repository_at(arguments.source, arguments.ssh)
    name = arguments.name
    if str(arguments.to) == "-":
        write_archive(sys.stdout.buffer, sent_entries(name, repository))
        return OK
    with Progress() as progress:
        done = pull(name, repository, arguments.to, progress)
    print_delivery(done, arguments.to)
    return OK


def _list(arguments: argparse.Namespace) -> int:
    from edge_server.cli.models.listing import (  # noqa: PLC0415
        local_listing,
        remote_listing,
        rows,
        table,
    )
    from edge_server.repository.transfer.ssh import repository_at  # noqa: PLC0415

    repository = repository_at(arguments.repository, arguments.ssh)
    name = arguments.inventory or ""
    listing: Listing
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
    from edge_server.repository.state_file import installed_store  # noqa: PLC0415
    from edge_server.repository.transfer.reports import release  # noqa: PLC0415

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
    from edge_server.cli.models.listing import Inspection  # noqa: PLC0415
    from edge_server.cli.models.push import model_tree  # noqa: PLC0415
    from edge_server.repository.transfer.inventory import take_inventory  # noqa: PLC0415

    inspection = Inspection(arguments.key)
    tree = model_tree(arguments.directory)
    faults = inspection.faults(take_inventory(tree.repository, tree.name))
    for fault in faults:
        print(f"edge-server: {tree.directory}: {fault}", file=sys.stderr)
    if faults:
        return FAILED
    signed = " and is signed by that key" if arguments.key else ""
    print(f"{tree.name}: is what its manifest says{signed}")
    return OK


def _back(arguments: argparse.Namespace) -> int:
    from edge_server.cli.models.outcome import await_verdict  # noqa: PLC0415
    from edge_server.repository.transfer.incoming import roll_back, to_last_good  # noqa: PLC0415
    from edge_server.repository.transfer.inventory import take_inventory  # noqa: PLC0415
    from edge_server.repository.transfer.ssh import repository_at  # noqa: PLC0415

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
    from edge_server.cli.models.push import write_manifest  # noqa: PLC0415
    from edge_server.repository.signature import SigningKey  # noqa: PLC0415

    done = write_manifest(arguments.directory, SigningKey(arguments.key))
    print(f"{done.tree.name}: signed, {done.content.digest[:12]}")
    return OK


def _keygen(arguments: argparse.Namespace) -> int:
    from edge_server.repository.signature import make_keys  # noqa: PLC0415

    public = make_keys(arguments.out)
    print(f"{arguments.out}: sign with it, and show it to nobody")
    print(f"{public}: check with it; this is what a vehicle gets")
    return OK


def _directory(text: str) -> Path:
    return Path(text).expanduser()


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
