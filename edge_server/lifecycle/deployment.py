"""The record of one model, all that the daemon knows of it, and the states of its newest delivery.

Index, metrics, MQTT state, the report for `models push` and the registry's snapshot are read from
the record. The states are those of mode POLL, without clock, lock or file;
docs/deployment_states.md shows which event leads from one to another, and `ModelRecord` has a
method for each event.
"""

from __future__ import annotations

import logging
import time
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, NamedTuple

from edge_server.errors import may_pass
from edge_server.inference.registry import UNLOADED, ModelEntry, ModelState, ServedConfiguration
from edge_server.lifecycle.model_spec import LONGEST_REASON
from edge_server.model_config.completion import devices_of
from edge_server.model_config.parse import without_effect
from edge_server.process.threads import Backoff
from edge_server.repository.store import StagedModel
from edge_server.repository.verdicts import (
    GOOD,
    LOADING,
    ON_TRIAL,
    REFUSED,
    ROLLED_BACK,
    WAITS,
    Verdict,
)

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from edge_server.errors import ModelConfigError
    from edge_server.lifecycle.model_spec import CanaryRun, LoadedVersions, LoadFailure, ModelSpec

log = logging.getLogger(__name__)

# Between two loads of one model, so that fluctuating memory does not cause a busy loop.
_FIRST_PAUSE_S = 5.0
_LONGEST_PAUSE_S = 300.0


class Outcome(NamedTuple):
    """What a delivery has come to, for its `digest`; one of the outcomes of `verdicts`."""

    outcome: str = ""
    digest: str = ""
    reason: str = ""


class Retry:
    """When a load or a copy is tried again; the pauses grow.
    Attributes: has_room: see `LoadFailure`."""

    def __init__(self, now: float) -> None:
        self.has_room: Callable[[], bool] = lambda: True
        self._pauses = Backoff(_FIRST_PAUSE_S, _LONGEST_PAUSE_S)
        self.pause(now)

    def pause(self, now: float) -> None:
        self.not_before = now + self._pauses.next_s()

    def is_due(self, now: float) -> bool:
        return now >= self.not_before and self.has_room()


@dataclass(frozen=True, eq=False)
class Settled:
    """It has been loaded, or there is none."""

    copy: StagedModel | None = None


@dataclass(frozen=True, eq=False)
class Uncopied:
    """The store could not copy it, as on a full disk; copied again after a pause."""

    reason: str
    retry: Retry

    @property
    def outcome(self) -> Outcome:
        return Outcome(WAITS, "", self.reason)


@dataclass(frozen=True, eq=False)
class Waiting:
    """It could not be loaded, and may be later.

    Attributes:
        retry: when to load it again; None if only a change of another model can help.
        misfit: it does not fit the ensembles, and is read with a change of another model.
        served: it served last, and nothing else serves."""

    copy: StagedModel
    reason: str
    retry: Retry | None
    misfit: bool
    served: bool

    @property
    def outcome(self) -> Outcome:
        return Outcome(WAITS, self.copy.digest, self.reason)


@dataclass(frozen=True, eq=False)
class Loading:
    """It is to be loaded next, or loads. `was`: the failure that this load is a retry of."""

    copy: StagedModel
    was: Waiting | None = None

    @property
    def outcome(self) -> Outcome:
        return Outcome(LOADING, self.copy.digest)


@dataclass(frozen=True, eq=False)
class Refused:
    """Not tried again until the files change or the content leaves quarantine.
    Attributes: outcome: REFUSED or ROLLED_BACK; without a digest if the content could not be read.
    """

    outcome: Outcome


@dataclass(frozen=True, eq=False)
class Leaving:
    """The model has gone from the repository and is to be unloaded."""

    outcome = Outcome()


Delivery = Settled | Uncopied | Waiting | Loading | Refused | Leaving


@dataclass(eq=False)
class ModelRecord:
    """All that is known of one model. The lock of the table guards every field and method.

    Attributes:
        explicit: the model was requested by name, not only as a member of an ensemble.
        coming: the spec that is loading or, for an ensemble, waits for members that fit.
        serving: the READY versions; open as long as they serve, with their `canary`.
        state: LOADING or UNAVAILABLE if no version serves; UNKNOWN before the first load.
        versions: the versions in that state; 0 stands for a model without a known version.
        reason: why the model is in its state, or the progress of its load.
        may_pass: the files are not known to be at fault, so the next load may succeed.
        shortfall: why not the configuration serves that this machine should serve, and how far it
            is.
        stays: why the serving versions, whose canary failed, could not be rolled back.
        shown: mode POLL, as all below: the model's directory in the repository, for texts.
        again: the copy that served last and failed at the start, loaded again beside a newer
            delivery until a version serves.
        last_good: the copy that a restart serves.
        candidate: the digest of what served as a candidate for lanes, what was found, for which
            model.
        late: why the store could not commit the serving copy; empty if it could.
        job: what the thread of the model does next; `updating` while there is a thread."""

    name: str
    explicit: bool = False
    coming: ModelSpec | None = None
    serving: LoadedVersions | None = None
    canary: CanaryRun | None = None
    state: ModelState = ModelState.UNKNOWN
    versions: tuple[int, ...] = ()
    reason: str = ""
    may_pass: bool = False
    shortfall: str = ""
    stays: str = ""
    shown: Path | None = None
    delivery: Delivery = field(default_factory=Settled)
    again: Waiting | None = None
    last_good: StagedModel | None = None
    candidate: tuple[str, str, str] = ("", "", "")
    late: str = ""
    job: Callable[[str], None] | None = None
    updating: bool = False
    _told: Outcome = field(default_factory=Outcome)
    _told_ns: int = 0

    # What is read.

    @property
    def spec(self) -> ModelSpec | None:
        return None if self.serving is None else self.serving.model_spec

    @property
    def specs(self) -> list[ModelSpec]:
        return [spec for spec in (self.spec, self.coming) if spec is not None]

    @property
    def is_loading(self) -> bool:
        return self.serving is None and self.state is ModelState.LOADING

    def changed_canary(self, model_spec: ModelSpec) -> CanaryRun | None:
        """Return the canary of `model_spec` if the predecessor has another spec, or None."""
        run = self.canary
        if run is None or run.model_spec is not model_spec or run.before is None:
            return None
        return None if run.before.built.model_spec is model_spec else run

    @property
    def serving_copy(self) -> StagedModel | None:
        """The private copy that the serving versions were loaded from, in mode POLL."""
        return None if self.spec is None else copy_of(self.spec)

    def entries(self) -> list[ModelEntry]:
        reason = self.reason
        if not reason and isinstance(self.delivery, Refused | Uncopied):
            reason = self.delivery.outcome.reason
        if self.serving is None:
            return [
                ModelEntry(self.name, version, self.state, reason, may_pass=self.may_pass)
                for version in self.versions
            ]
        degraded = self.shortfall and f"degraded: {self.shortfall}"
        reason = "; ".join(filter(None, (reason, degraded)))
        spec = self.serving.model_spec
        configuration = None
        if idle := self.serving.idle:
            idle = "; ".join(filter(None, (idle, reason)))[:LONGEST_REASON]
            return [
                ModelEntry(self.name, model.version, ModelState.UNAVAILABLE, idle, model)
                for model in self.serving.models
            ]
        if not spec.is_ensemble:
            file, devices = spec.files.config_name, devices_of(spec.config)
            configuration = ServedConfiguration(file, devices, spec.why, self.shortfall)
        return [
            ModelEntry(
                *(self.name, model.version, ModelState.READY),
                reason=(reason or model.degraded_reason())[:LONGEST_REASON],
                loaded=model,
                configuration=configuration,
            )
            for model in self.serving.models
        ]

    # Loading and serving.

    def begin_load(self, model_spec: ModelSpec, *, explicit: bool) -> bool:
        """Begin the load of `model_spec`; return False if the same files serve already."""
        self.explicit = self.explicit or explicit
        if self.spec is not None and model_spec.is_same_as(self.spec):
            self.coming = None
            # The load of an ensemble does not end what is known of its member.
            self.reason = "" if explicit else self.reason
            return False
        self.coming = model_spec
        if self.serving is None:
            self._stop_serving(ModelState.LOADING, model_spec.versions)
        return True

    def report_progress(self, text: str) -> bool:
        """Show the progress of a load; return False if the model does not load."""
        if self.coming is None or (self.serving is None and not self.is_loading):
            return False
        self.reason = text
        return True

    def serve(self, built: LoadedVersions, reason: str = "") -> None:
        """Serve `built`, which the caller publishes; the predecessor's versions are replaced."""
        spec = built.model_spec
        if spec is not self.spec and spec is self.coming:
            self.coming = None
        copy = copy_of(spec)
        if copy is not self.serving_copy:
            self.late = ""
        if isinstance(self.delivery, Loading | Waiting) and self.delivery.copy is copy:
            self.delivery = Settled(copy)
        self.again = None
        self.serving, self.reason, self.stays = built, reason, ""
        self.shortfall = ""
        if spec.is_degraded:
            self.shortfall = "the preferred configuration was rolled back" if reason else spec.why
        for name, effect in without_effect(spec.message).items():
            log.warning("model %s: field '%s' has no effect here: %s", self.name, name, effect)
        versions = ", ".join(str(model.version) for model in built.models)
        took_ms = 1e3 * built.took_s
        # As it stands in Triton's log, for who searches for it.
        loaded = f"successfully loaded '{self.name}'"
        log.info("model %s: READY, version %s, %.0f ms: %s", self.name, versions, took_ms, loaded)
        if spec.why:
            level = logging.WARNING if spec.is_degraded else logging.INFO
            log.log(level, "model %s: %s", self.name, self.entries()[0].configuration)

    def fail(self, failure: LoadFailure) -> None:
        """Note a failed load. Versions that serve continue to; an ensemble waits for members."""
        spec, error = failure.model_spec, failure.error
        if spec is not None:
            may_fit = self.serving is None or (failure.misfit and not spec.is_overridden)
            self.coming = spec if spec.is_ensemble and may_fit else None
        if self.serving is not None:
            log.error(
                "model %s: serves on as it was, reloading it failed: %s",
                self.name,
                failure.reason,
            )
            self.reason = failure.reason
            return
        log.error("model %s: UNAVAILABLE: %s", self.name, failure.reason)
        versions = (0,) if spec is None else spec.versions
        self._stop_serving(ModelState.UNAVAILABLE, versions, failure.reason)
        self.may_pass = may_pass(error)

    def take_down(self, error: ModelConfigError) -> None:
        """End the service of an ensemble that no longer fits; it waits for members that fit."""
        spec = self.spec
        if spec is None:
            return
        self.coming = self.coming or spec
        reason = spec.files.as_shown(str(error))[:LONGEST_REASON]
        log.error("model %s: taken down: %s", self.name, reason)
        self._stop_serving(ModelState.UNAVAILABLE, spec.versions, reason)

    def unload(self, *, waits: bool) -> bool:
        """End the service of the model; return whether its entries in the registry change.
        Args: waits: True for an ensemble that lost a member and waits for the member."""
        self.coming = (self.coming or self.spec) if waits else None
        self.explicit = self.explicit and waits
        changes = bool(self.serving or self.versions)
        # The registry reports the loaded versions until they have closed, and afterwards.
        versions = self.versions if self.serving is None else ()
        if changes:
            self._stop_serving(ModelState.UNAVAILABLE, versions, UNLOADED)
        return changes

    def stay(self, failure: str, error: ModelConfigError) -> None:
        """Report that the canary of what serves failed, and that nothing can take its place."""
        text = f"failed its canary: {failure}; cannot be rolled back: {error}"
        if self.spec is not None:
            text = self.spec.files.as_shown(text)
        self.reason = self.stays = text[:LONGEST_REASON]

    def _stop_serving(self, state: ModelState, versions: tuple[int, ...], reason: str = "") -> None:
        self.serving, self.stays, self.shortfall = None, "", ""
        self.state, self.versions, self.reason = state, versions, reason
        self.may_pass = False

    # Deliveries, in mode POLL.

    @property
    def accepted(self) -> StagedModel | None:
        """The private copy that the next load reads."""
        match self.delivery:
            case Leaving():
                return None
            case Loading(copy):
                return copy
            case _ if self.again is not None:
                return self.again.copy
            case Settled(copy):
                return copy
            case Waiting(copy, misfit=misfit) if misfit or self.serving is None:
                return copy
        return self.serving_copy or self.last_good

    @property
    def outcome(self) -> Outcome:
        if not isinstance(self.delivery, Settled):
            return self.delivery.outcome
        copy = self.delivery.copy
        if copy is None:
            return Outcome()
        if copy is self.last_good:
            return Outcome(GOOD, copy.digest)
        reason = f"a restart would not serve it: {self.late}" if self.late else self.stays
        if reason:
            return Outcome(WAITS, copy.digest, reason)
        return Outcome(LOADING if self.canary is None else ON_TRIAL, copy.digest)

    def verdict(self, store: Path) -> Verdict:
        """Return the verdict on the model for `models push`; `store` is the store's directory."""
        if self.outcome != self._told:
            self._told, self._told_ns = self.outcome, time.monotonic_ns()
        serves, good = self.serving_copy, self.last_good
        return Verdict(
            *self.outcome,
            self._told_ns,
            "" if serves is None else serves.digest,
            "" if good is None else good.digest,
            "" if good is None else str(good.directory.relative_to(store)),
            *(self.candidate[1:] if serves and self.candidate[0] == serves.digest else ()),
        )

    @property
    def uncommitted(self) -> StagedModel | None:
        """The serving copy, if it is to be committed as last known good."""
        copy = None if self.stays else self.serving_copy
        may = self.canary is None or self.canary.has_passed or self.late
        return copy if copy is not self.last_good and may else None

    def deliver(self, copy: StagedModel, directory: Path) -> None:
        """Accept a new copy of the model in `directory`."""
        self._supersede(Loading(copy))
        self.shown = directory

    def withdraw(self) -> None:
        self._supersede(Leaving())

    def refuse(self, digest: str, reason: str) -> None:
        """Note a delivery that cannot be loaded until its files change."""
        self._supersede(Refused(Outcome(REFUSED, digest, reason)))

    def cannot_copy(self, reason: str, now: float) -> None:
        before = self.delivery
        retry = before.retry if isinstance(before, Uncopied) else Retry(now)
        self._supersede(Uncopied(reason, retry))

    def load_again(self, waiting: Waiting) -> None:
        if waiting is self.delivery:
            self.delivery = Loading(waiting.copy, waiting)

    def outdates(self, model_spec: ModelSpec) -> bool:
        """Return whether a later delivery, or the removal, replaces what `model_spec` loads."""
        copy = copy_of(model_spec)
        if isinstance(self.delivery, Loading):
            return copy is not None and self.delivery.copy.digest != copy.digest
        return isinstance(self.delivery, Leaving)

    def not_loaded(
        self, copy: StagedModel, failure: LoadFailure, now: float, *, passes: bool, served: bool
    ) -> None:
        """Note the failed load of `copy`, which may be loaded later without a change of its files
        if it `passes`; if it `served`, it served last and nothing serves now."""
        again, delivery = self.again, self.delivery
        if again is not None and again.copy is copy and again.retry is not None:
            again.retry.has_room = failure.has_room
            self.again = again if passes else None
        if not (isinstance(delivery, Loading) and delivery.copy is copy):
            return  # a newer delivery came
        if not (passes or failure.misfit):
            self.delivery = Refused(Outcome(REFUSED, copy.digest, failure.reason))
            return
        retry = None
        if passes:
            retry = (delivery.was and delivery.was.retry) or Retry(now)
            retry.has_room = failure.has_room
        self.delivery = Waiting(copy, failure.reason, retry, failure.misfit, served)

    def does_not_fit(self, copy: StagedModel, reason: str) -> None:
        """Note that `copy`, which served, waits for a change of another model."""
        if isinstance(self.delivery, Settled):
            self.delivery = Waiting(copy, reason, None, misfit=True, served=False)

    def unchanged(self, copy: StagedModel, serving: StagedModel) -> None:
        """Note that `copy` has the content of `serving`."""
        if isinstance(self.delivery, Loading) and self.delivery.copy is copy:
            self.delivery = Settled(serving)

    def is_good(self, copy: StagedModel) -> None:
        self.last_good, self.late = copy, ""

    def rolled_back(self, copy: StagedModel, reason: str) -> None:
        """Note that the canary of `copy` failed; the verdict on a newer delivery stays."""
        if isinstance(self.delivery, Settled) and self.delivery.copy is copy:
            self.delivery = Refused(Outcome(ROLLED_BACK, copy.digest, reason))

    def removed(self) -> None:
        self.last_good = self.again = None
        self.late = ""
        if isinstance(self.delivery, Leaving):
            self.delivery = Settled()

    def _supersede(self, delivery: Delivery) -> None:
        before = self.delivery.was if isinstance(self.delivery, Loading) else self.delivery
        if isinstance(before, Waiting) and before.served and before.retry:
            self.again = before
        self.delivery, self._told = delivery, Outcome()


def copy_of(model_spec: ModelSpec) -> StagedModel | None:
    copy = model_spec.files.holder
    return copy if isinstance(copy, StagedModel) else None
