"""A process that opens a model store and changes all that can be changed: to be killed at it.

store_writer.py STORE REPOSITORY; its exit status is 3 where the store refuses to go on.
"""

from __future__ import annotations

import sys
from pathlib import Path

from edge_server.errors import InternalError, SettingsError
from edge_server.repository.store import ModelStore
from edge_server.repository.tree import look


def main() -> int:
    try:
        store = ModelStore(Path(sys.argv[1]), boot="1")
        staged = store.stage(look(Path(sys.argv[2]), "m"))
        with store.loading(staged):
            pass
        store.commit(staged)
        store.quarantine("0" * 64, "it answers nonsense")
        store.release("1" * 64)
        store.forget("other")
        store.stage(look(Path(sys.argv[2]), "m"))
    except (InternalError, SettingsError):
        return 3
    return 0


if __name__ == "__main__":
    sys.exit(main())
