"""Which scheduler a configuration asks for, and what the schedulers share."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from edge_server.serving.direct import DirectScheduler
from edge_server.serving.dynamic_batch import DynamicBatchScheduler
from edge_server.serving.ensemble import EnsembleScheduler
from edge_server.serving.execution import Executor
from edge_server.serving.instance_pool import InstancePool
from edge_server.serving.sequence import SequenceScheduler
from edge_server.serving.snapshot import LoadedModel
from edge_server.serving.statistics import ModelStatistics

if TYPE_CHECKING:
    from edge_server.backends.contract import Model
    from edge_server.model_config.config import ModelConfig
    from edge_server.serving.rate_limiter import RateLimiter
    from edge_server.serving.snapshot import Scheduler


class Scheduling:
    """Makes loaded models: instances, statistics and the scheduler, together.

    Args:
        limiter: decides which instances of all models run at once; None lets all run.
    """

    def __init__(self, limiter: RateLimiter | None = None) -> None:
        self._limiter = limiter

    def ensemble(self, config: ModelConfig, version: int) -> LoadedModel:
        """An ensemble whose graph has been validated."""
        statistics = ModelStatistics()
        scheduler = EnsembleScheduler(config, version, statistics)
        return LoadedModel(config, version, scheduler, statistics)

    def model(
        self, config: ModelConfig, version: int, model: Model, directory: Path = Path()
    ) -> LoadedModel:
        """A model of a backend; it is closed with the loaded model.

        Args:
            directory: the model's, for the files of initial states.

        Raises:
            EdgeServerError: an instance cannot be made, or would never run; nothing is left open.
        """
        statistics = ModelStatistics()
        executor = Executor(config, version, statistics)
        scheduler = self._scheduler(executor, model, directory)
        return LoadedModel(config, version, scheduler, statistics, model)

    def _scheduler(self, executor: Executor, model: Model, directory: Path) -> Scheduler:
        config = executor.config
        if config.sequence_batching is not None:
            return SequenceScheduler(
                executor, config.sequence_batching, model, directory, self._limiter
            )
        pool = InstancePool.of(config, model, self._limiter)
        if config.dynamic_batching is not None:
            return DynamicBatchScheduler(executor, pool, config.dynamic_batching)
        return DirectScheduler(executor, pool)
