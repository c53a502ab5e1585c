"""A board that models are delivered to, with what mode POLL loads and keeps them with."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

from edge_server.inference.registry import ModelRegistry
from edge_server.lifecycle.build import Build, MemoryBudget
from edge_server.lifecycle.lifecycle import ModelLifecycle
from edge_server.lifecycle.loader import RepositoryLoader
from edge_server.lifecycle.poll import Updates
from edge_server.lifecycle.records import AcceptedCopies, Deployments
from edge_server.repository.change_detector import Change
from edge_server.repository.scan import scan_model
from edge_server.repository.store import ModelStore

if TYPE_CHECKING:
    import threading
    from pathlib import Path

    from support.model_folders import WriteModel

    from edge_server.inference.canary_monitor import CanaryTerms

TIMEOUT_S = 30.0
CONFIG = (
    'backend: "counted" input { name: "a" data_type: TYPE_FP32 dims: 1 } '
    'output { name: "b" data_type: TYPE_FP32 dims: 1 }'
)
# Of the model `m`.
ENSEMBLE = CONFIG.replace('backend: "counted"', 'platform: "ensemble"') + (
    ' ensemble_scheduling { step { model_name: "m" model_version: -1 '
    'input_map { key: "a" value: "a" } output_map { key: "b" value: "b" } } }'
)
MAY_BREAK = 'parameters { key: "allow_interface_change" value { string_value: "true" } } '
LATER_S = 1e6


class Board:
    """Its memory is what a test says; `folder` stands for its root."""

    store_kind = ModelStore
    terms: CanaryTerms | None = None

    def __init__(self, folder: Path, repository: Path, write_model: WriteModel) -> None:
        self.folder = folder
        self.repository = repository
        self.write_model = write_model
        self.open()

    def open(self, stop: threading.Event | None = None) -> None:
        self.registry = ModelRegistry()
        self.store = self.store_kind(self.folder / "store")
        self.table = Deployments(self.registry, self.store, [])
        self.budget = MemoryBudget(0, self.folder)
        self.loader = RepositoryLoader(
            ModelLifecycle(self.table, Build(budget=self.budget), self.terms),
            AcceptedCopies(self.table),
        )
        self.updates = Updates(self.loader, self.table)
        with self.loader.until(stop):
            self.updates.load_last_good()

    def close(self) -> None:
        self.updates.close()
        self.loader.close(TIMEOUT_S)
        self.store.close()

    def start_again(self) -> None:
        self.close()
        self.open()

    def memory(self, kib: int) -> None:
        (self.folder / "proc").mkdir(exist_ok=True)
        (self.folder / "proc/meminfo").write_text(f"MemAvailable: {kib} kB\n")

    def deliver(self, number: int, config: str = CONFIG, name: str = "m") -> None:
        directory = self.write_model(name, config)
        (directory / "1" / "add").write_text(f"{number}")
        self.carry_out(Change(name, scan_model(self.repository, name)))

    def carry_out(self, change: Change) -> None:
        assert self.updates.carry_out([change]) == []
        assert self.updates.wait_idle(TIMEOUT_S)

    def retry(self, after_s: float = LATER_S) -> None:
        self.updates.retry(time.monotonic() + after_s)
        assert self.updates.wait_idle(TIMEOUT_S)

    def serving(self) -> float | None:
        """The number of the model that serves."""
        if not self.registry.snapshot.ready_versions("m"):
            return None
        number: float = self.registry.snapshot.find("m").model.number
        return number

    def reasons(self) -> list[str]:
        return [entry.reason for entry in self.registry.snapshot.entries.values()]
