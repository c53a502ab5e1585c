import datetime

from edge_server.proto.edge.lanes.v1 import lanes_pb2 as _lanes_pb2
from google.protobuf import timestamp_pb2 as _timestamp_pb2
from google.protobuf.internal import containers as _containers
from google.protobuf.internal import enum_type_wrapper as _enum_type_wrapper
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class HealthStatus(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    HEALTH_STATUS_UNSPECIFIED: _ClassVar[HealthStatus]
    HEALTH_STATUS_OK: _ClassVar[HealthStatus]
    HEALTH_STATUS_DEGRADED: _ClassVar[HealthStatus]
    HEALTH_STATUS_UNKNOWN: _ClassVar[HealthStatus]

class HealthClock(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    HEALTH_CLOCK_UNSPECIFIED: _ClassVar[HealthClock]
    HEALTH_CLOCK_SYNCHRONIZED: _ClassVar[HealthClock]
    HEALTH_CLOCK_UNSYNCHRONIZED: _ClassVar[HealthClock]
    HEALTH_CLOCK_WRONG: _ClassVar[HealthClock]
    HEALTH_CLOCK_UNKNOWN: _ClassVar[HealthClock]
HEALTH_STATUS_UNSPECIFIED: HealthStatus
HEALTH_STATUS_OK: HealthStatus
HEALTH_STATUS_DEGRADED: HealthStatus
HEALTH_STATUS_UNKNOWN: HealthStatus
HEALTH_CLOCK_UNSPECIFIED: HealthClock
HEALTH_CLOCK_SYNCHRONIZED: HealthClock
HEALTH_CLOCK_UNSYNCHRONIZED: HealthClock
HEALTH_CLOCK_WRONG: HealthClock
HEALTH_CLOCK_UNKNOWN: HealthClock

class DeviceHealth(_message.Message):
    __slots__ = ("schema", "device", "boot_id", "status", "reasons", "time", "power_mode", "boot_reason", "engines", "temperatures", "rails", "memory", "storage", "supply_events", "disks", "reason_details")
    SCHEMA_FIELD_NUMBER: _ClassVar[int]
    DEVICE_FIELD_NUMBER: _ClassVar[int]
    BOOT_ID_FIELD_NUMBER: _ClassVar[int]
    STATUS_FIELD_NUMBER: _ClassVar[int]
    REASONS_FIELD_NUMBER: _ClassVar[int]
    TIME_FIELD_NUMBER: _ClassVar[int]
    POWER_MODE_FIELD_NUMBER: _ClassVar[int]
    BOOT_REASON_FIELD_NUMBER: _ClassVar[int]
    ENGINES_FIELD_NUMBER: _ClassVar[int]
    TEMPERATURES_FIELD_NUMBER: _ClassVar[int]
    RAILS_FIELD_NUMBER: _ClassVar[int]
    MEMORY_FIELD_NUMBER: _ClassVar[int]
    STORAGE_FIELD_NUMBER: _ClassVar[int]
    SUPPLY_EVENTS_FIELD_NUMBER: _ClassVar[int]
    DISKS_FIELD_NUMBER: _ClassVar[int]
    REASON_DETAILS_FIELD_NUMBER: _ClassVar[int]
    schema: str
    device: str
    boot_id: str
    status: HealthStatus
    reasons: _containers.RepeatedScalarFieldContainer[str]
    time: HealthTime
    power_mode: str
    boot_reason: str
    engines: _containers.RepeatedCompositeFieldContainer[HealthEngine]
    temperatures: _containers.RepeatedCompositeFieldContainer[HealthTemperature]
    rails: _containers.RepeatedCompositeFieldContainer[HealthRail]
    memory: HealthMemory
    storage: _containers.RepeatedCompositeFieldContainer[HealthStorage]
    supply_events: _containers.RepeatedCompositeFieldContainer[HealthCounter]
    disks: _containers.RepeatedCompositeFieldContainer[HealthDisk]
    reason_details: _containers.RepeatedCompositeFieldContainer[_lanes_pb2.Reason]
    def __init__(self, schema: _Optional[str] = ..., device: _Optional[str] = ..., boot_id: _Optional[str] = ..., status: _Optional[_Union[HealthStatus, str]] = ..., reasons: _Optional[_Iterable[str]] = ..., time: _Optional[_Union[HealthTime, _Mapping]] = ..., power_mode: _Optional[str] = ..., boot_reason: _Optional[str] = ..., engines: _Optional[_Iterable[_Union[HealthEngine, _Mapping]]] = ..., temperatures: _Optional[_Iterable[_Union[HealthTemperature, _Mapping]]] = ..., rails: _Optional[_Iterable[_Union[HealthRail, _Mapping]]] = ..., memory: _Optional[_Union[HealthMemory, _Mapping]] = ..., storage: _Optional[_Iterable[_Union[HealthStorage, _Mapping]]] = ..., supply_events: _Optional[_Iterable[_Union[HealthCounter, _Mapping]]] = ..., disks: _Optional[_Iterable[_Union[HealthDisk, _Mapping]]] = ..., reason_details: _Optional[_Iterable[_Union[_lanes_pb2.Reason, _Mapping]]] = ...) -> None: ...

class HealthTime(_message.Message):
    __slots__ = ("mono_ns", "time", "clock", "clock_steps", "uptime_s")
    MONO_NS_FIELD_NUMBER: _ClassVar[int]
    TIME_FIELD_NUMBER: _ClassVar[int]
    CLOCK_FIELD_NUMBER: _ClassVar[int]
    CLOCK_STEPS_FIELD_NUMBER: _ClassVar[int]
    UPTIME_S_FIELD_NUMBER: _ClassVar[int]
    mono_ns: int
    time: _timestamp_pb2.Timestamp
    clock: HealthClock
    clock_steps: int
    uptime_s: int
    def __init__(self, mono_ns: _Optional[int] = ..., time: _Optional[_Union[datetime.datetime, _timestamp_pb2.Timestamp, _Mapping]] = ..., clock: _Optional[_Union[HealthClock, str]] = ..., clock_steps: _Optional[int] = ..., uptime_s: _Optional[int] = ...) -> None: ...

class HealthEngine(_message.Message):
    __slots__ = ("name", "load", "clock_mhz", "highest_clock_mhz")
    NAME_FIELD_NUMBER: _ClassVar[int]
    LOAD_FIELD_NUMBER: _ClassVar[int]
    CLOCK_MHZ_FIELD_NUMBER: _ClassVar[int]
    HIGHEST_CLOCK_MHZ_FIELD_NUMBER: _ClassVar[int]
    name: str
    load: float
    clock_mhz: int
    highest_clock_mhz: int
    def __init__(self, name: _Optional[str] = ..., load: _Optional[float] = ..., clock_mhz: _Optional[int] = ..., highest_clock_mhz: _Optional[int] = ...) -> None: ...

class HealthTemperature(_message.Message):
    __slots__ = ("zone", "celsius", "throttle_celsius")
    ZONE_FIELD_NUMBER: _ClassVar[int]
    CELSIUS_FIELD_NUMBER: _ClassVar[int]
    THROTTLE_CELSIUS_FIELD_NUMBER: _ClassVar[int]
    zone: str
    celsius: float
    throttle_celsius: float
    def __init__(self, zone: _Optional[str] = ..., celsius: _Optional[float] = ..., throttle_celsius: _Optional[float] = ...) -> None: ...

class HealthRail(_message.Message):
    __slots__ = ("name", "watts")
    NAME_FIELD_NUMBER: _ClassVar[int]
    WATTS_FIELD_NUMBER: _ClassVar[int]
    name: str
    watts: float
    def __init__(self, name: _Optional[str] = ..., watts: _Optional[float] = ...) -> None: ...

class HealthMemory(_message.Message):
    __slots__ = ("total_mib", "available_mib", "swap_used_mib")
    TOTAL_MIB_FIELD_NUMBER: _ClassVar[int]
    AVAILABLE_MIB_FIELD_NUMBER: _ClassVar[int]
    SWAP_USED_MIB_FIELD_NUMBER: _ClassVar[int]
    total_mib: int
    available_mib: int
    swap_used_mib: int
    def __init__(self, total_mib: _Optional[int] = ..., available_mib: _Optional[int] = ..., swap_used_mib: _Optional[int] = ...) -> None: ...

class HealthStorage(_message.Message):
    __slots__ = ("name", "worn", "celsius")
    NAME_FIELD_NUMBER: _ClassVar[int]
    WORN_FIELD_NUMBER: _ClassVar[int]
    CELSIUS_FIELD_NUMBER: _ClassVar[int]
    name: str
    worn: float
    celsius: float
    def __init__(self, name: _Optional[str] = ..., worn: _Optional[float] = ..., celsius: _Optional[float] = ...) -> None: ...

class HealthCounter(_message.Message):
    __slots__ = ("name", "count")
    NAME_FIELD_NUMBER: _ClassVar[int]
    COUNT_FIELD_NUMBER: _ClassVar[int]
    name: str
    count: int
    def __init__(self, name: _Optional[str] = ..., count: _Optional[int] = ...) -> None: ...

class HealthDisk(_message.Message):
    __slots__ = ("directory", "free_mib")
    DIRECTORY_FIELD_NUMBER: _ClassVar[int]
    FREE_MIB_FIELD_NUMBER: _ClassVar[int]
    directory: str
    free_mib: int
    def __init__(self, directory: _Optional[str] = ..., free_mib: _Optional[int] = ...) -> None: ...
