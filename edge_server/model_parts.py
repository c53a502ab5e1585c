"""What loads and schedules models, as the settings choose it; `check` makes the same."""

from __future__ import annotations

from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING

from edge_server.appliance.state_directory import state_directory
from edge_server.model_config.config import Completion
from edge_server.pipeline import LANE_TENSORS
from edge_server.repository.budget import MemoryBudget
from edge_server.repository.control import RepositoryControl
from edge_server.repository.interface_rule import InterfaceRule
from edge_server.repository.ledger import Ledger
from edge_server.repository.loader import RepositoryLoader
from edge_server.repository.poll_control import PollControl
from edge_server.repository.signature import SignaturePolicy
from edge_server.repository.source import AcceptedModels, Repositories
from edge_server.repository.store import ModelStore
from edge_server.serving.bounded_control import BoundedControl
from edge_server.serving.live_models import LiveModels
from edge_server.serving.probation import ProbationTerms
from edge_server.serving.rate_limiter import RateLimiter, ResourceLimit
from edge_server.serving.scheduling import Scheduling

if TYPE_CHECKING:
    from collections.abc import Mapping

    from edge_server.cuda.devices import Devices
    from edge_server.serving.registry import ModelRegistry
    from edge_server.settings import Camera, Repository, Serving

# Models that load others wait in threads of theirs; what they load may load others again.
_LOADS_BY_MODELS = 16


def chosen_scheduling(settings: Serving) -> Scheduling:
    """What the schedulers of all models share.

    Raises:
        SettingsError: see `RateLimiter`.
    """
    limiter = None
    if settings.rate_limit != "off":
        limiter = RateLimiter(
            [
                ResourceLimit(each.name, each.count, each.device if each.device >= 0 else None)
                for each in settings.rate_limit_resources
            ]
        )
    return Scheduling(limiter, settings.cache_bytes)


def chosen_completion(settings: Repository, devices: Devices) -> Completion:
    """What configurations may leave out, on this machine."""
    return Completion(
        settings.auto_complete, settings.default_max_batch_size, devices.count, devices.reason
    )


def chosen_control(
    registry: ModelRegistry,
    scheduling: Scheduling,
    devices: Devices,
    settings: Repository,
    cameras: Mapping[str, Camera] = MappingProxyType({}),
) -> RepositoryControl:
    """What loads models into `registry`, at the start and on request.

    Where the repositories are followed, it loads what is there to begin with.
    """
    surroundings = LiveModels(registry)
    control = RepositoryControl(
        RepositoryLoader(
            registry,
            Repositories([Path(path) for path in settings.paths]),
            scheduling=scheduling,
            completion=chosen_completion(settings, devices),
            load_threads=settings.load_threads,
            devices=devices,
            surroundings=surroundings,
            take_down=settings.incompatible_member == "take_down",
            interface=InterfaceRule(_of_cameras(cameras)),
        ),
        registry,
        explicit=settings.mode == "explicit",
        load=settings.load,
        exit_on_error=settings.exit_on_error,
    )
    surroundings.control = BoundedControl(control, _LOADS_BY_MODELS)
    return control


def _of_cameras(cameras: Mapping[str, Camera]) -> dict[str, frozenset[str]]:
    return {camera.model: LANE_TENSORS for camera in cameras.values()}


def chosen_signatures(settings: Repository) -> SignaturePolicy:
    """Raises: SettingsError: see `SignaturePolicy`."""
    return SignaturePolicy(settings.signatures, [Path(path) for path in settings.signature_keys])


def following_control(
    registry: ModelRegistry,
    scheduling: Scheduling,
    devices: Devices,
    settings: Repository,
    cameras: Mapping[str, Camera] = MappingProxyType({}),
) -> PollControl:
    """What keeps `registry` as the repositories are."""
    accepted = AcceptedModels()
    store = ModelStore(
        Path(settings.store) if settings.store else state_directory() / "store",
        most_bytes=settings.store_max_bytes,
        signatures=chosen_signatures(settings),
    )
    ledger = Ledger(accepted, store)
    budget = MemoryBudget(settings.memory_reserve_bytes)
    terms = ProbationTerms(settings.probation_requests, settings.probation_s)
    loader = RepositoryLoader(
        registry,
        accepted,
        scheduling=scheduling,
        completion=chosen_completion(settings, devices),
        load_threads=settings.load_threads,
        devices=devices,
        # Nothing is loaded on request, whoever asks.
        surroundings=LiveModels(registry),
        budget=budget,
        probation=terms if settings.probation_requests else None,
        on_rolled_back=ledger.rolled_back,
        on_passed=ledger.passed,
        take_down=settings.incompatible_member == "take_down",
        interface=InterfaceRule(_of_cameras(cameras), ledger.has_served),
    )
    return PollControl(
        loader,
        ledger,
        store,
        registry,
        [Path(path) for path in settings.paths],
        poll_s=settings.poll_s,
        settle_s=settings.settle_s,
        exit_on_error=settings.exit_on_error,
        budget=budget,
    )
