"""Which scheduler a configuration asks for, and what the schedulers share."""

from __future__ import annotations

from typing import TYPE_CHECKING

from edge_server.serving.direct import DirectScheduler
from edge_server.serving.dynamic_batch import DynamicBatchScheduler
from edge_server.serving.ensemble import EnsembleScheduler
from edge_server.serving.execution import Executor
from edge_server.serving.instance_pool import InstancePool
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

    def model(self, config: ModelConfig, version: int, model: Model) -> LoadedModel:
        """A model of a backend; it is closed with the loaded model.

        Raises:
            EdgeServerError: an instance cannot be made, or would never run; nothing is left open.
        """
        statistics = ModelStatistics()
        executor = Executor(config, version, statistics)
        pool = InstancePool.of(config, model, self._limiter)
        scheduler = _scheduler(executor, pool)
        return LoadedModel(config, version, scheduler, statistics, model)


def _scheduler(executor: Executor, pool: InstancePool) -> Scheduler:
    batching = executor.config.dynamic_batching
    if batching is not None:
        return DynamicBatchScheduler(executor, pool, batching)
    return DirectScheduler(executor, pool)
