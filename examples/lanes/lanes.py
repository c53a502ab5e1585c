"""A vehicle program in Python: lanes as they come, events without a gap, the vehicle's speed.

    python lanes.py 127.0.0.1:8001 lanes [COUNT]             # of all cameras
    python lanes.py 127.0.0.1:8001 events LAST_ID [COUNT]    # a file that keeps the last id
    python lanes.py 127.0.0.1:8001 vehicle SPEED_MPS [off|left|right|hazard [SECONDS]]

COUNT ends the program after so many; SECONDS has it send the state for so long, ten times a second.
It needs the client of this repository: pip install ./clients/python
"""

from __future__ import annotations

import itertools
import sys
import time
from pathlib import Path

import grpc

from edge_lanes import EventStream, LaneStream
from edge_lanes.v1 import events_pb2, lane_service_pb2, lane_service_pb2_grpc


def show_lanes(address: str, most: int | None) -> None:
    """Print the lanes of every frame, and every silence of the device."""
    for reading in itertools.islice(LaneStream(address), most):
        frame = reading.frame
        if frame is None:
            print(f"no lanes: {reading.text}", file=sys.stderr)
            continue
        offset = "-"
        if frame.ego.HasField("lateral_offset_m"):
            offset = f"{frame.ego.lateral_offset_m:+.2f}"
        print(
            f"{frame.camera} {frame.frame_id} {reading.state.name} {frame.time.age_us // 1000} ms, "
            f"{len(frame.lanes)} lanes, offset {offset} m, lost {reading.lost}"
            f"{''.join(f', {reason}' for reason in reading.reasons)}",
            flush=True,
        )


def show_events(address: str, last: Path, most: int | None) -> None:
    """Print every event once, across restarts of the daemon and of this program."""
    stream = EventStream(address, last)
    for number, event in enumerate(stream, 1):
        kind = events_pb2.EventKind.Name(event.kind).removeprefix("EVENT_KIND_")
        phase = events_pb2.EventPhase.Name(event.phase).removeprefix("EVENT_PHASE_")
        print(event.id, kind, phase, event.cause, event.camera or "-", flush=True)
        if number == most:
            stream.keep(event)
            return


def send_vehicle_state(address: str, speed_mps: float, indicator: str, seconds: float) -> None:
    """Give the vehicle's state, as a vehicle does: the daemon uses a state for half a second."""
    state = lane_service_pb2.SetVehicleStateRequest(
        speed_mps=speed_mps,
        indicator=lane_service_pb2.Indicator.Value(f"INDICATOR_{indicator.upper()}"),
    )
    with grpc.insecure_channel(address) as channel:
        service = lane_service_pb2_grpc.LaneServiceStub(channel)
        until = time.monotonic() + seconds
        service.SetVehicleState(state, timeout=1.0)
        print("taken", flush=True)
        while time.monotonic() < until:
            time.sleep(0.1)
            service.SetVehicleState(state, timeout=1.0)


def main(address: str, verb: str, *words: str) -> None:
    if verb == "lanes":
        show_lanes(address, int(words[0]) if words else None)
    elif verb == "events":
        show_events(address, Path(words[0]), int(words[1]) if words[1:] else None)
    else:
        speed, indicator, seconds, *_ = *words, *("off", "0")[len(words) - 1 :]
        send_vehicle_state(address, float(speed), indicator, float(seconds))


if __name__ == "__main__":
    main(*sys.argv[1:])
