"""A recorder that gets pictures as fast as it takes them, in a process that a test kills.

recorder_process.py DIRECTORY
"""

from __future__ import annotations

import itertools
import sys
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))

from support.mcap_drive import Drive

drive = Drive(Path(sys.argv[1]), file_s=3)
began_ns = drive.now_ns
drive.recorder.start()
for number in itertools.count():
    if number % 30 == 0:
        while drive.recorder._writer._written < number:  # a busy machine has none on the disk yet
            time.sleep(0.001)
        print(number, flush=True)
    drive.give(jpeg=True)  # moves the clock by the time of a frame
    while drive.recorder._waiting:  # it would leave out what it has no time for
        time.sleep(0.001)
