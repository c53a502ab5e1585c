"""A vehicle program in Python: lanes as they come, events without a gap, the vehicle's speed.

    python lanes.py 127.0.0.1:8001 lanes [COUNT]             # of all cameras
    python lanes.py 127.0.0.1:8001 events LAST_ID [COUNT]    # a file that keeps the last id
    python lanes.py 127.0.0.1:8001 vehicle SPEED_MPS [off|left|right|hazard [SECONDS]]

COUNT ends the program after so many; SECONDS has it send the state for so long, ten times a second.
README.md says how the stubs are made.
"""

from __future__ import annotations

import queue
import sys
import time
from pathlib import Path

import grpc
from edge.lanes.v1 import events_pb2, lane_service_pb2, lane_service_pb2_grpc, lanes_pb2

WINDOW = 2
# The daemon restarts, or a TCP connection has reached its age: connect again.
AGAIN = (grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.RESOURCE_EXHAUSTED)


def show_lanes(service: lane_service_pb2_grpc.LaneServiceStub, most: int) -> int:
    """Print the lanes of every frame; return how many were printed before the stream ended."""
    # What is put here is sent; None would end the requests.
    requests: queue.SimpleQueue[lane_service_pb2.StreamLanesRequest] = queue.SimpleQueue()
    requests.put(lane_service_pb2.StreamLanesRequest(window=WINDOW))
    stream = service.StreamLanes(iter(requests.get, None))
    shown = 0
    try:
        for response in stream:
            frame = response.frame
            status = lanes_pb2.FrameStatus.Name(frame.status).removeprefix("FRAME_STATUS_")
            offset = "-"
            if frame.ego.HasField("lateral_offset_m"):
                offset = f"{frame.ego.lateral_offset_m:+.2f}"
            codes = [lanes_pb2.ReasonCode.Name(each.code) for each in frame.reason_details]
            reasons = "".join(f", {code.removeprefix('REASON_CODE_')}" for code in codes)
            print(
                f"{frame.camera} {frame.frame_id} {status} {frame.time.age_us // 1000} ms, "
                f"{len(frame.lanes)} lanes, offset {offset} m, lost {response.lost}{reasons}",
                flush=True,
            )
            shown += 1
            if shown == most:
                return shown
            # Acknowledged once it is used: at most WINDOW are on their way, so none grows old.
            acknowledged = lane_service_pb2.StreamLanesRequest(acknowledged=response.sequence)
            requests.put(acknowledged)
    except grpc.RpcError as error:
        if error.code() not in AGAIN:
            raise
        print(f"the stream ended: {error.details()}", file=sys.stderr)
    finally:
        stream.cancel()
    return shown


def show_events(service: lane_service_pb2_grpc.LaneServiceStub, last_id: Path, most: int) -> int:
    """Print every event once, across restarts of the daemon and of this program."""
    after_id, _, log = last_id.read_text().partition(" ") if last_id.exists() else ("0", "", "")
    request = lane_service_pb2.StreamEventsRequest(after_id=int(after_id), log=log)
    stream = service.StreamEvents(request)
    shown = 0
    try:
        for response in stream:
            event = response.event
            kind = events_pb2.EventKind.Name(event.kind).removeprefix("EVENT_KIND_")
            phase = events_pb2.EventPhase.Name(event.phase).removeprefix("EVENT_PHASE_")
            print(event.id, kind, phase, event.cause, event.camera or "-", flush=True)
            # After it is dealt with: a program that dies in between sees it again. The file is
            # replaced as a whole, so that it is never an empty one where the power fails.
            new = last_id.with_name(f"{last_id.name}.new")
            new.write_text(f"{event.id} {event.log}")
            new.replace(last_id)
            shown += 1
            if shown == most:
                return shown
    except grpc.RpcError as error:
        if error.code() not in AGAIN:
            raise
        print(f"the stream ended: {error.details()}", file=sys.stderr)
    finally:
        stream.cancel()
    return shown


def send_vehicle_state(
    service: lane_service_pb2_grpc.LaneServiceStub, speed_mps: float, indicator: str, seconds: float
) -> None:
    """Give the vehicle's state, as a vehicle does: the daemon uses a state for half a second."""
    state = lane_service_pb2.SetVehicleStateRequest(
        speed_mps=speed_mps,
        indicator=lane_service_pb2.Indicator.Value(f"INDICATOR_{indicator.upper()}"),
    )
    until = time.monotonic() + seconds
    service.SetVehicleState(state, timeout=1.0)
    print("taken", flush=True)
    while time.monotonic() < until:
        time.sleep(0.1)
        service.SetVehicleState(state, timeout=1.0)


def main(address: str, verb: str, *words: str) -> None:
    with grpc.insecure_channel(address) as channel:
        service = lane_service_pb2_grpc.LaneServiceStub(channel)
        if verb == "vehicle":
            speed, indicator, seconds, *_ = *words, *("off", "0")[len(words) - 1 :]
            send_vehicle_state(service, float(speed), indicator, float(seconds))
            return
        counts = words if verb == "lanes" else words[1:]
        most = int(counts[0]) if counts else 0
        shown = 0
        while not most or shown < most:
            if verb == "lanes":
                shown += show_lanes(service, most - shown)
            else:
                shown += show_events(service, Path(words[0]), most - shown)
            if not most or shown < most:
                time.sleep(0.5)


if __name__ == "__main__":
    main(*sys.argv[1:])
