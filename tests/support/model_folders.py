"""What writes models for a test."""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from pathlib import Path


class WriteModel(Protocol):
    def __call__(self, name: str, config: str, version: int = 1) -> Path: ...
