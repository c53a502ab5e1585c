"""Where a frame's time goes, from capture to the MQTT message, split by stage.

    python benchmarks/frame_to_publish.py [--source URI] [--frames N]

Runs the whole appliance (`edge-server demo`) and reads the messages that a broker would get: every
figure is what the message itself says, so it ends where the message is handed to the connection.
The last line is everything but the model's own run. `publish` has what puts the lines on the road.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys

import numpy as np
from record import add_option, record

WARM_UP = 20
STAGES = ("queue", "preprocess", "infer", "postprocess")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--source", default="synthetic://road?seed=7&fps=25")
    parser.add_argument("--frames", type=int, default=300)
    add_option(parser)
    arguments = parser.parse_args()

    command = [sys.executable, "-m", "edge_server", "demo", "--json"]
    command += ["--source", arguments.source, "--frames", str(arguments.frames + WARM_UP)]
    done = subprocess.run(command, stdout=subprocess.PIPE, check=True)
    messages = [json.loads(line) for line in done.stdout.splitlines()][WARM_UP:]

    spent_us = {stage: [m["latency_us"][stage] for m in messages] for stage in STAGES}
    total_us = np.array([m["time"]["age_us"] for m in messages])
    spent_us["publish"] = list(total_us - np.sum([spent_us[s] for s in STAGES], axis=0))
    rows = {**spent_us, "total": total_us, "all but infer": total_us - np.array(spent_us["infer"])}

    size = messages[0]["image"]
    print(f"{arguments.source}: {len(messages)} frames of {size['width']}x{size['height']}")
    print(f"{'ms':14} {'median':>8} {'p95':>8} {'max':>8}")
    found = {}
    for name, values in rows.items():
        median, p95, most = np.percentile(values, (50, 95, 100)) / 1e3
        print(f"{name:14} {median:8.2f} {p95:8.2f} {most:8.2f}")
        found |= {f"{name} p50 ms": median, f"{name} p95 ms": p95, f"{name} max ms": most}
    record(arguments.record, found)
    return 0


if __name__ == "__main__":
    sys.exit(main())
