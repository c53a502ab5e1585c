"""Lanes and events of an edge-server device, over gRPC and MQTT.

for reading in LaneStream("127.0.0.1:8001"):
    if reading.usable:
        print(reading.frame.camera, len(reading.frame.lanes), "lanes")
"""

from edge_lanes.reading import Reading, State
from edge_lanes.streams import EventStream, LaneStream
from edge_lanes.subscription import LaneSubscription

__all__ = ["EventStream", "LaneStream", "LaneSubscription", "Reading", "State"]
