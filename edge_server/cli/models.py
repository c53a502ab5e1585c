"""`edge-server models …`: the arguments of each verb, whose code is imported when it runs."""

from __future__ import annotations

import argparse
from functools import partial
from pathlib import Path

from edge_server.cli.verbs import Verbs, seconds

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

    def add(name: str, text: str) -> argparse.ArgumentParser:
        return verbs.add(name, text, partial(_run, name))

    push = add("push", "put a model into a repository")
    push.add_argument(
        "directory", type=Path, metavar="DIR", help="the model, named as its directory is"
    )
    push.add_argument("--to", required=True, metavar="REPO", help="where to")
    push.add_argument(
        "--version",
        type=_version,
        metavar="N",
        help="only this version; the rest of the model stays as it is there",
    )
    push.add_argument("--sign", type=Path, metavar="KEY", help="sign it with this private key")
    push.add_argument(
        "--allow-interface-change",
        action="store_true",
        help="it may break those who call what it replaces: other names, types or shapes",
    )
    push.add_argument(
        "--in-place",
        action="store_true",
        help="leave the manifest, and the signature, in DIR as well",
    )
    _takes_waiting(push)
    _takes_ssh(push)

    accept = add("accept", "put the model into a repository that comes as an archive on stdin")
    accept.add_argument("--to", type=_directory, required=True, metavar="DIR", help="where to")
    _takes_waiting(accept)

    pull = add("pull", "fetch a model, held against its manifest")
    pull.add_argument(
        "name",
        metavar="NAME|URL",
        help="s3://BUCKET/KEY, https://HOST/PATH or oci://REGISTRY/REPOSITORY:TAG is a URL; one of "
        "the first two that ends with / is a model's directory with its manifest, any other an "
        "archive",
    )
    pull.add_argument("--from", dest="source", metavar="REPO", help="where from, for a NAME")
    pull.add_argument(
        "--to",
        type=_directory,
        required=True,
        metavar="DIR",
        help="it becomes DIR/NAME; '-' writes an archive to stdout, as `accept` reads it",
    )
    pull.add_argument(
        "--name", dest="rename", default="", metavar="N", help="what a URL's model becomes"
    )
    pull.add_argument(
        "--sha256",
        type=_sha256,
        metavar="D",
        help="of a URL's archive, or of its manifest: nothing else is taken",
    )
    _takes_ssh(pull)

    listing = add("list", "what is in a repository, and whether it is as it was made")
    listing.add_argument(
        "repository", nargs="?", default="models", metavar="REPO", help="default: models"
    )
    _takes_keys(listing, "check signatures with it; repeatable")
    # All that this verb and `push --version` need of a repository on another machine.
    listing.add_argument("--inventory", metavar="NAME", help=argparse.SUPPRESS)
    listing.add_argument(
        "--json", action="store_true", help="a list of objects, with whole digests"
    )
    _takes_store(listing, "its verdict on each model and its quarantine are")
    _takes_ssh(listing)

    verify = add("verify", "whether a model is what its manifest says")
    verify.add_argument("directory", type=Path, metavar="DIR", help="the model's, or REPO/NAME")
    _takes_keys(verify, "it must be signed with the private one of it; repeatable")

    rollback = add("rollback", "what a model was before its last push; again undoes it")
    rollback.add_argument("name", metavar="NAME")
    rollback.add_argument("--to", required=True, metavar="REPO", help="where")
    rollback.add_argument(
        "--to-last-good",
        action="store_true",
        help="to what the daemon which follows REPO has last found good, whatever was pushed since",
    )
    _takes_waiting(rollback)
    _takes_ssh(rollback)

    release = add("release", "let a model out of quarantine; the daemon tries it again")
    release.add_argument("name", metavar="NAME")
    release.add_argument(
        "--digest",
        type=_digest,
        metavar="D",
        help="only what has this digest, or one that begins so; default: all of that model",
    )
    _takes_store(release, "it is in quarantine")

    sign = add("sign", "write a model's manifest and signature into its directory")
    sign.add_argument("directory", type=Path, metavar="DIR", help="the model")
    sign.add_argument("--key", type=Path, required=True, metavar="KEY", help="the private key")

    keygen = add("keygen", "make a key to sign models with")
    keygen.add_argument(
        "--out", type=Path, required=True, metavar="KEY", help="the public one becomes KEY.pub"
    )


def _takes_ssh(verb: argparse.ArgumentParser) -> None:
    verb.add_argument(
        "--ssh", default="ssh", metavar="COMMAND", help="like 'ssh -p 2222 -i KEY'; default: ssh"
    )


def _takes_store(verb: argparse.ArgumentParser, text: str) -> None:
    verb.add_argument(
        "--store",
        type=Path,
        metavar="DIR",
        help=f"where the daemon keeps its copies of models, in which {text}; default: the "
        "installed daemon's, else yours",
    )


def _takes_waiting(verb: argparse.ArgumentParser) -> None:
    verb.add_argument(
        "--wait",
        action="store_true",
        help="fail where no daemon decides on it; by default only one that follows REPO is waited "
        "for, until it serves the model, refuses it or rolls it back",
    )
    verb.add_argument("--no-wait", action="store_true", help="do not wait for a daemon")
    verb.add_argument(
        "--until-passed",
        action="store_true",
        help="as --wait, and until its canary has passed too, which takes requests",
    )
    verb.add_argument(
        "--wait-secs",
        type=seconds,
        default=300.0,
        metavar="S",
        help="how long; building a plan takes minutes (default: %(default)g)",
    )
    _takes_store(verb, "its verdict on each model is")


def _takes_keys(verb: argparse.ArgumentParser, text: str) -> None:
    verb.add_argument(
        "--key", type=Path, action="append", default=[], metavar="PUB", help=f"public key: {text}"
    )


def _run(verb: str, arguments: argparse.Namespace) -> int:
    from edge_server.cli.model_actions import ACTIONS

    return ACTIONS[verb](arguments)


def _directory(text: str) -> Path:
    return Path(text).expanduser()


def _version(text: str) -> int:
    if not text.isdecimal() or text.startswith("0"):
        raise argparse.ArgumentTypeError(f"{text}: a version is a whole number from 1")
    return int(text)


def _sha256(text: str) -> str:
    digest = text.removeprefix("sha256:").lower()
    if len(digest) != 64:
        raise argparse.ArgumentTypeError(f"{text}: a sha256 has 64 hexadecimal digits")
    return _digest(digest)


def _digest(text: str) -> str:
    if not text or len(text) > 64 or not set(text) <= set("0123456789abcdef"):
        raise argparse.ArgumentTypeError(f"{text}: a digest is hexadecimal, as `list` shows it")
    return text
