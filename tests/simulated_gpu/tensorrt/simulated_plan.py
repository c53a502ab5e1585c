"""What a plan file of the simulation holds: a head in JSON, then the ONNX file."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass, field

MAGIC = b"simulated TensorRT plan\n"

# Input → least, best and largest shape; of an input that holds a shape, of its values.
Profile = dict[str, tuple[tuple[int, ...], tuple[int, ...], tuple[int, ...]]]


@dataclass
class SimulatedPlan:
    """What the builder would have decided.

    Attributes:
        version: of the TensorRT that built it.
        dla: it has parts for an NVDLA core.
        data_dependent: outputs whose shape only a run tells.
        formats: tensor → a format that is not linear.
        types: tensor → a type of TensorRT that ONNX Runtime does not calculate in.
        context_bytes: device memory of each execution context.
        crashes: who reads it dies.
    """

    version: str = "10.3.0.30"
    dla: bool = False
    profiles: list[Profile] = field(default_factory=list)
    holding_shapes: list[str] = field(default_factory=list)
    data_dependent: list[str] = field(default_factory=list)
    formats: dict[str, str] = field(default_factory=dict)
    types: dict[str, str] = field(default_factory=dict)
    context_bytes: int = 4096
    crashes: bool = False

    def file(self, onnx: bytes) -> bytes:
        head = json.dumps(asdict(self)).encode()
        return MAGIC + len(head).to_bytes(8, "little") + head + onnx

    @staticmethod
    def read(data: bytes) -> tuple[SimulatedPlan, bytes] | None:
        """None for what is no plan, or a part of one."""
        at = len(MAGIC) + 8
        if data[: len(MAGIC)] != MAGIC or len(data) < at:
            return None
        end = at + int.from_bytes(data[len(MAGIC) : at], "little")
        try:
            plan = SimulatedPlan(**json.loads(data[at:end]))
        except (ValueError, TypeError):
            return None
        return plan, data[end:]
