"""Write the generated tables of docs/triton.md: every field, flag and RPC of Triton.

python scripts/triton_table.py            # write them
python scripts/triton_table.py --check    # fail where they are not current
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tritonclient.grpc import model_config_pb2, service_pb2

from edge_server.model_config.fields import ACCEPTED, ACTED_ON, REFUSED

if TYPE_CHECKING:
    from collections.abc import Iterator

ROOT = Path(__file__).parent.parent
PAGE = ROOT / "docs" / "triton.md"
FLAGS = ROOT / "edge_server" / "cli" / "flags" / "flags.txt"
BEGIN = "<!-- from here on written by scripts/triton_table.py -->\n"
_DEEPEST = 8
# CUDA shared memory has no Jetson driver: answered, never registered.
_ABSENT_RPCS = {
    "CudaSharedMemoryRegister": "no CUDA IPC on a Jetson; use system shared memory",
}


def tables() -> str:
    return "\n".join(
        [
            "## config.pbtxt\n",
            *_table("field", _fields(model_config_pb2.ModelConfig.DESCRIPTOR, "", 0)),
            "\n## Flags\n",
            *_table("flag", _flags()),
            "\n## RPCs\n",
            *_table("RPC", _rpcs()),
        ]
    )


def _table(what: str, rows: Iterator[tuple[str, str, str]]) -> list[str]:
    lines = [f"| {what} | here | why |", "|---|---|---|"]
    return lines + [
        f"| `{name}` | {here} | {why.replace('|', chr(92) + '|')} |" for name, here, why in rows
    ]


def _fields(message: Any, prefix: str, depth: int) -> Iterator[tuple[str, str, str]]:
    for field in message.fields:
        path = f"{prefix}{field.name}"
        if path in REFUSED:
            yield path, "absent", REFUSED[path]
        elif path in ACCEPTED:
            yield path, "without effect", ACCEPTED[path]
        elif path in ACTED_ON:
            yield path, "same", ""
        elif field.message_type is not None and depth < _DEEPEST:
            inside = field.message_type
            if inside.GetOptions().map_entry:
                inside = inside.fields_by_name["value"].message_type
            yield from _fields(inside, f"{path}.", depth + 1)
        else:
            raise SystemExit(f"{path}: edge_server/model_config/fields.py does not classify it")


def _flags() -> Iterator[tuple[str, str, str]]:
    for line in FLAGS.read_text().splitlines():
        if "|" not in line or line.startswith("#"):
            continue
        flag, effect, text = (part.strip() for part in line.split("|", 2))
        word = effect.split()[0]
        here = {"ignored": "without effect", "refused": "absent"}.get(word, "same")
        yield f"--{flag}", here, text


def _rpcs() -> Iterator[tuple[str, str, str]]:
    service = service_pb2.DESCRIPTOR.services_by_name["GRPCInferenceService"]
    for method in service.methods:
        why = _ABSENT_RPCS.get(method.name, "")
        yield method.name, "absent" if why else "same", why


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--check", action="store_true")
    before = PAGE.read_text()
    made = before.partition(BEGIN)[0] + BEGIN + "\n" + tables() + "\n"
    if not parser.parse_args().check:
        PAGE.write_text(made)
    elif made != before:
        sys.exit("docs/triton.md is not current: run scripts/triton_table.py")


if __name__ == "__main__":
    main()
