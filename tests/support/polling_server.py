"""A daemon that follows its repository, and what it answers."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import tritonclient.grpc as triton

from support.daemon_process import TIMEOUT_S, Process
from support.waiting import wait_until

if TYPE_CHECKING:
    from pathlib import Path

POLL = ("--model-control-mode=poll", "--repository-poll-secs=0.2", "--repository-settle-secs=0.3")


class Server:
    """A daemon that polls, and what it answers."""

    def __init__(
        self, process: Process, client: triton.InferenceServerClient, repository: Path
    ) -> None:
        self.process = process
        self.client = client
        self.repository = repository

    def answer(self, model: str = "m") -> float:
        values = triton.InferInput("x", [1], "FP32")
        values.set_data_from_numpy(np.zeros(1, np.float32))
        return float(self.client.infer(model, [values]).as_numpy("y")[0])

    def wait_for(self, number: float, model: str = "m") -> set[float]:
        """Ask until the answer is `number`; what was answered before. No request may fail."""
        answers: set[float] = set()

        def answered() -> bool:
            answers.add(answer := self.answer(model))
            return answer == number

        wait_until(answered, TIMEOUT_S, otherwise=lambda: (answers, self.index(), self.log))
        return answers - {number}

    def wait_for_reason(self, said: str, model: str = "m", ask: str = "m") -> str:
        """Ask `ask` until the index says so of `model`; its state."""

        def states() -> list[str]:
            self.answer(ask)
            return [state for state, reason in self.index().get(model, []) if said in reason]

        return wait_until(states, TIMEOUT_S, otherwise=lambda: (self.index(), self.log))[0]

    def index(self) -> dict[str, list[tuple[str, str]]]:
        found: dict[str, list[tuple[str, str]]] = {}
        for entry in self.client.get_model_repository_index().models:
            found.setdefault(entry.name, []).append((entry.state, entry.reason))
        return found

    def metric(self, name: str) -> float:
        return self.process.metric(f"{name} ")

    @property
    def log(self) -> str:
        return self.process.log.read_text()
