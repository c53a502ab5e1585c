"""Which scheduler a configuration asks for, and what the schedulers share."""

from __future__ import annotations

from typing import TYPE_CHECKING

from edge_server.serving.direct import DirectScheduler
from edge_server.serving.ensemble import EnsembleScheduler
from edge_server.serving.execution import Executor
from edge_server.serving.instance_pool import InstancePool
from edge_server.serving.snapshot import LoadedModel
from edge_server.serving.statistics import ModelStatistics

if TYPE_CHECKING:
    from edge_server.backends.contract import Model
    from edge_server.model_config.config import ModelConfig


class Scheduling:
    """Makes loaded models: instances, statistics and the scheduler, together."""

    def ensemble(self, config: ModelConfig, version: int) -> LoadedModel:
        """An ensemble whose graph has been validated."""
        statistics = ModelStatistics()
        scheduler = EnsembleScheduler(config, version, statistics)
        return LoadedModel(config, version, scheduler, statistics)

    def model(self, config: ModelConfig, version: int, model: Model) -> LoadedModel:
        """A model of a backend; it is closed with the loaded model.

        Raises:
            EdgeServerError: an instance cannot be made; nothing is left open.
        """
        statistics = ModelStatistics()
        executor = Executor(config, version, statistics)
        pool = InstancePool.of(config, model)
        scheduler = DirectScheduler(executor, pool)
        return LoadedModel(config, version, scheduler, statistics, model)
