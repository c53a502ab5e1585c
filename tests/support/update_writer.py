"""One step of an update, to be interrupted: switch, or commit with a verdict.

python update_writer.py ROOT STATE BOOT switch|healthy|unhealthy
"""

from __future__ import annotations

import sys
from pathlib import Path

from edge_server.board.update import BootSlots, RecordFile
from edge_server.cli.update import UpdatedDevice
from edge_server.errors import Unavailable

root, state, boot, step = sys.argv[1:]
slots = BootSlots(Path(root))
current = slots.current()
device = UpdatedDevice(slots, RecordFile(Path(state)), boot, {"A": "1.0", "B": "2.0"}[current])
if step == "switch":
    device.switch("B" if current == "A" else "A", "rauc")
else:
    try:
        device.commit(lambda: "" if step == "healthy" else "camera:front: no frames arrive")
    except Unavailable as error:
        print(error)
