"""Reads a camera that is lost after each first frame: `python reconnects.py READER URI COUNT`.

It prints `frame` when frames have come again, at which its parent cuts the connection, and in the
end what it used after 50 losses and after all, as JSON: memory in KiB, descriptors, threads.
"""

from __future__ import annotations

import gc
import json
import logging
import sys
from pathlib import Path

from edge_server.cameras.camera import Camera
from edge_server.cameras.source_uri import SourceOptions


def used() -> tuple[int, int, int]:
    gc.collect()
    status = Path("/proc/self/status").read_text()
    fields = dict(line.split(":\t", 1) for line in status.splitlines())
    kib = int(fields["VmRSS"].split()[0])
    return kib, len(list(Path("/proc/self/fd").iterdir())), int(fields["Threads"])


def main(reader: str, uri: str, count: int) -> None:
    logging.disable(logging.CRITICAL)
    options = SourceOptions(reader=reader)
    camera = Camera("front", uri, options=options, retry_first_s=0.02, retry_longest_s=0.02)
    camera.start()
    found = []
    for lost in range(count + 1):
        while camera.reconnects < lost or camera.next_frame(0.1) is None:
            pass
        if lost in (50, count):
            found.append(used())
        if lost < count:
            print("frame", flush=True)
        while lost < count and camera.reconnects == lost:
            camera.next_frame(0.1)
    camera.stop()
    print(json.dumps(found), flush=True)


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2], int(sys.argv[3]))
