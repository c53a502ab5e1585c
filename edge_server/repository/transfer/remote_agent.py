"""The remote agent: sent over ssh as source text and run by the Python of the remote host.

The host needs nothing else, so all of `MODULES` use only the standard library. Standard input is a
line with these modules, a line with the request and, for a push, a model; standard output is a line
with the reply and, for a fetch, a model.
"""

from __future__ import annotations

import base64
import json
import os
import sys
from pathlib import Path
from typing import Any, BinaryIO

from edge_server.errors import EdgeServerError
from edge_server.repository.transfer.inventory import FileContent, Inventory
from edge_server.repository.transfer.local import LocalRepository
from edge_server.repository.transfer.tar_stream import TarSink, receive
from edge_server.repository.transfer.verdict import Wanted, to_json

# In the order of their imports.
MODULES = (
    "edge_server.errors",
    "edge_server.model_config.files",
    "edge_server.repository.scan",
    "edge_server.repository.tree",
    "edge_server.repository.transfer.inventory",
    "edge_server.repository.transfer.swap",
    "edge_server.repository.transfer.incoming",
    "edge_server.board.state_directory",
    "edge_server.repository.store_place",
    "edge_server.repository.verdicts",
    "edge_server.repository.transfer.verdict",
    "edge_server.repository.transfer.local",
    "edge_server.repository.transfer.tar_stream",
    "edge_server.repository.transfer.remote_agent",
)
# Creates the modules from the first line of standard input, and runs the last one.
BOOT = """\
import json, sys, types
for name, text in json.loads(sys.stdin.buffer.readline()):
    module = sys.modules[name] = types.ModuleType(name)
    exec(compile(text, name, "exec"), module.__dict__)
sys.exit(module.answer(sys.stdin.buffer, sys.stdout.buffer))
"""
# Marks the reply, because a login shell may print a greeting before it.
REPLY = b"edge-server-reply "


def answer(requests: BinaryIO, replies: BinaryIO) -> int:
    """Execute the request in the next line of `requests`; return the exit code."""
    request = json.loads(requests.readline())
    repository = LocalRepository(Path(request["repository"]).expanduser())
    try:
        if request["do"] == "send":
            _send(repository, request["name"], replies)
        else:
            _reply(replies, _do(repository, request, requests))
    except EdgeServerError as error:
        try:
            _reply(replies, {"error": type(error).__name__, "text": str(error)})
        except BrokenPipeError:
            os._exit(1)
        return 1
    except BrokenPipeError:
        # The client is gone; `_exit` avoids the error of the interpreter's last flush.
        os._exit(1)
    return 0


def _do(repository: LocalRepository, request: dict[str, Any], stream: BinaryIO) -> dict[str, Any]:
    reply: dict[str, Any] = {}
    name, store = request.get("name", ""), request.get("store", "")
    what = request["do"]
    if what == "receive":
        with repository.receiving(name, request["all_but"]) as incoming:
            reply["outcome"] = incoming.place(receive(stream, incoming))
            reply["placed_ns"] = incoming.placed_ns
    elif what == "roll back":
        reply["placed_ns"] = repository.roll_back(name)
    elif what == "to last good":
        reply["placed_ns"] = repository.to_last_good(name, store)
    elif what == "wait":
        reply = to_json(*repository.wait_for(Wanted(**request["wanted"])))
    elif what == "told":
        told = repository.models_told(store)
        reply["told"] = told and {name: each._asdict() for name, each in told.items()}
    elif what == "names":
        reply["names"] = repository.names()
    else:
        reply["stock"] = stock_to_json(repository.inventory(name))
    return reply


def _send(repository: LocalRepository, name: str, replies: BinaryIO) -> None:
    repository.tree(name)
    _reply(replies, {})
    sink = TarSink(replies)
    try:
        sink.end(repository.send(name, sink))
    except EdgeServerError as error:
        # Without its end the client discards the stream; the text on stderr is for the user.
        sink.abandon()
        print(f"edge-server: {error}", file=sys.stderr)


def _reply(replies: BinaryIO, reply: dict[str, Any]) -> None:
    replies.write(REPLY + json.dumps(reply).encode() + b"\n")
    replies.flush()


def stock_to_json(inventory: Inventory) -> dict[str, Any]:
    fields = inventory._asdict()
    for name in ("manifest", "signature"):
        data = fields[name]
        fields[name] = None if data is None else base64.b64encode(data).decode()
    return fields


def stock_from_json(fields: dict[str, Any]) -> Inventory:
    """Return the inventory from the fields of `stock_to_json`.

    Raises:
        ValueError, TypeError, KeyError: the fields are invalid.
    """
    for name in ("manifest", "signature"):
        data = fields[name]
        fields[name] = None if data is None else base64.b64decode(data, validate=True)
    fields["files"] = {
        p: FileContent(str(sha), int(size)) for p, (sha, size) in fields["files"].items()
    }
    fields["versions"] = tuple(fields["versions"])
    fields["empty"] = tuple(fields["empty"])
    return Inventory(**fields)
