"""The sequence batcher: runs the requests of a sequence on one instance, one after the other."""

from __future__ import annotations

import itertools
import logging
import threading
import time
from functools import partial
from math import inf
from typing import TYPE_CHECKING

from msgspec.structs import replace

from edge_server.errors import Cancelled, InternalError, InvalidRequest, Unavailable
from edge_server.inference.direct import InstancePool
from edge_server.inference.execution import Job, stopping
from edge_server.inference.line import MOST_WAITING
from edge_server.inference.registry import Submits
from edge_server.inference.sequence_book import (
    DirectStrategy,
    Head,
    OldestStrategy,
    SequenceBook,
    SequenceControls,
    SequenceStates,
)
from edge_server.process.threads import Worker, side_by_side
from edge_server.requests import InferRequest, SequencePlace
from edge_server.tensors import Tensor, zeros

if TYPE_CHECKING:
    from collections.abc import Hashable, Iterable, Sequence
    from pathlib import Path

    from edge_server.backends.contract import Model, Tensors
    from edge_server.errors import EdgeServerError
    from edge_server.inference.execution import Executor
    from edge_server.inference.line import LineWatch, RateLimiter
    from edge_server.inference.registry import Snapshot
    from edge_server.inference.sequence_book import BookedSequence, WaitingRequest
    from edge_server.model_config.config import ModelConfig
    from edge_server.model_config.scheduling import SequenceBatching
    from edge_server.requests import Respond

    _Begun = tuple[BookedSequence[Job], WaitingRequest[Job]]
    _Refused = list[tuple[Job, EdgeServerError]]

log = logging.getLogger(__name__)

# Pause after an unforeseen error, so that a repeating one does not fill the log.
_REST_S = 0.1
# An idle thread wakes now and then, so that its heartbeat shows waiting, not hanging.
_LONGEST_WAIT_S = 5.0


class SequenceScheduler(Submits):
    """Runs each sequence in order on one instance, several sequences as one batch.

    A cancelled or overdue request does not run, at whatever position, and ends its sequence: the
    requests behind it would build on a state that lacks a step, and are refused with Cancelled. The
    slot is free once the requests before it are over, with END or without. A request that fails
    leaves its sequence unchanged: the next one gets the state as before. Where sequences are
    iterative, a request is a sequence of its own: its model has it run again until it is over.

    Raises: ModelConfigError: an initial state is wrong. EdgeServerError: an instance cannot be
        made, or gets no thread; nothing is left open."""

    def __init__(
        self,
        executor: Executor,
        batching: SequenceBatching,
        model: Model,
        directory: Path,
        *,
        watch: LineWatch,
        limiter: RateLimiter | None = None,
    ) -> None:
        config = executor.config
        slots, self._strategy = _strategy(config, batching)
        self._executor = executor
        self._iterative = batching.iterative
        self._states = SequenceStates(config, batching.states, directory)
        self._controls = SequenceControls(config, batching.controls)
        self._generated = itertools.count()
        self._pools = InstancePool.each_of(config, model, limiter)
        self._book: SequenceBook[Job] = SequenceBook(
            len(self._pools), slots, batching.max_sequence_idle_us / 1e6
        )
        self._lock = threading.Lock()
        self._stopping = False
        # Each wakes the thread of one instance.
        self._wakes = [threading.Condition(self._lock) for _ in self._pools]
        self._workers = [
            Worker(f"{config.name}_{i}", partial(self._serve, i)) for i in range(len(self._pools))
        ]
        self._watch = watch
        try:
            for worker in self._workers:
                worker.start()
            watch.add(self)
        except RuntimeError as error:
            self.close()
            raise InternalError(f"model '{config.name}' gets no thread: {error}") from error

    def submit(self, request: InferRequest, snapshot: Snapshot, respond: Respond) -> None:
        job = self._executor.job(request, snapshot, respond)
        job.outputs |= self._states.output_names
        job.iterative = self._iterative
        place = self._place(job)
        now = time.monotonic()
        refused: _Refused = []
        try:
            with self._lock:
                refused = self._expire(now)
                restarts = place.start and self._book.is_live(place.id)
                self._check_room(request, place)
                sequence = self._book.add(job, place, now, request.timeout_us / 1e6 or inf)
                if sequence.slot is not None:
                    self._wakes[sequence.slot.instance].notify()
                # The watch enforces the time limit of a sequence without a slot.
                self._watch.note_waiting(self._book.next_expiry)
        finally:
            self._refuse(refused)
        if restarts:
            log.warning(
                "model %s: sequence %s starts again before its END: its earlier requests run "
                "first, then its state is forgotten",
                self._executor.config.name,
                place.id,
            )

    def drop_dead(self) -> bool:
        """See `WatchedLine.drop_dead`; drops sequences that waited too long for a slot, too."""
        with self._lock:
            refused = self._expire(time.monotonic())
            dead = [
                each for sequence in self._book.waiting_in() for each in self._drop_of(sequence)
            ]
            if dead:
                # Any slot may have passed to another sequence.
                for wake in self._wakes:
                    wake.notify()
            others_wait = self._book.waiting > 0
            if others_wait:
                self._watch.note_waiting(self._book.next_expiry)
        self._refuse(refused + dead)
        return others_wait

    def pending(self) -> int:
        return self._book.waiting

    def running_since(self) -> float:
        return min((pool.running_since() for pool in self._pools), default=inf)

    def close(self) -> None:
        self._watch.remove(self)
        with self._lock:
            self._stopping = True
            waiting = self._book.clear()
            for wake in self._wakes:
                wake.notify()
        for job in waiting:
            self._executor.refuse(job, stopping(job.request))
        for worker in self._workers:
            worker.ask_to_stop()
        for worker in self._workers:
            worker.stop()
        side_by_side([pool.close for pool in self._pools], "close-instance")

    def _place(self, job: Job) -> SequencePlace:
        """Raises: InvalidRequest: the request fits no sequence."""
        model, place = self._executor.config.name, job.request.sequence
        if job.batch_size > 1:
            raise InvalidRequest(
                f"inference request to model '{model}' must specify batch-size 1 due to "
                "requirements of sequence batcher"
            )
        if self._iterative and (place is None or not place.id):
            # In the upper half: clients count from 1.
            half = (self._controls.largest_id + 1) // 2
            place = SequencePlace(half + next(self._generated) % half, start=True, generated=True)
            job.request = replace(job.request, sequence=place)
        if place is None or not place.id:
            raise InvalidRequest(
                f"inference request to model '{model}' must specify a non-zero or non-empty "
                "correlation ID"
            )
        self._controls.check(place.id)
        return place

    def _check_room(self, request: InferRequest, place: SequencePlace) -> None:
        """Raises: Unavailable, InvalidRequest: the book cannot take the request."""
        if self._stopping:
            raise stopping(request)
        if self._book.waiting >= MOST_WAITING:
            raise Unavailable(f"{request.log_prefix}Exceeds maximum queue size")
        if self._book.is_taken(place):
            raise InvalidRequest(
                f"sequence id {place.id} is that of a request to model "
                f"'{self._executor.config.name}' that came without one; choose another"
            )
        if not place.start and not self._book.is_live(place.id):
            raise InvalidRequest(
                f"inference request for sequence {place.id} to model "
                f"'{self._executor.config.name}' must specify the START flag on the first request "
                "of the sequence"
            )

    def _serve(self, index: int, now: float) -> None:
        try:
            self._tick(index, now)
        except Exception:
            # An instance without its thread would never run again.
            log.exception("instance %s: a run went wrong", self._workers[index].name)
            self._workers[index].wait(_REST_S)

    def _tick(self, index: int, now: float) -> None:
        with self._lock:
            refused = self._expire(now) + self._drop_dead_heads(index)
            batch, wait_s = self._choose(index, now)
            begun = [None if each is None else (each, self._book.begin(each)) for each in batch]
            if not (refused or begun or self._stopping):
                self._wakes[index].wait(wait_s)
        try:
            self._refuse(refused)
            if begun:
                self._run(self._pools[index], begun)
        finally:
            now = time.monotonic()
            with self._lock:
                late = [job for each in filter(None, begun) for job in self._end(*each, now)]
            for job in late:
                self._executor.refuse(job, stopping(job.request))

    def _end(
        self, sequence: BookedSequence[Job], waiting: WaitingRequest[Job], now: float
    ) -> Iterable[Job]:
        """End a run; yield the job where it should run again and the scheduler is closed."""
        job = waiting.item
        if job.runs_again:
            if self._stopping:
                yield job
            else:
                place = SequencePlace(waiting.place.id)
                job.queue_again(replace(job.request, sequence=place))
                self._book.again(sequence, job, place)
        self._book.end(sequence, now)
        if self._iterative and not sequence.waiting:
            self._book.close(sequence)

    def _run(self, pool: InstancePool, begun: Sequence[_Begun | None]) -> None:
        try:
            jobs = self._jobs(begun)
        except Exception as error:
            name = self._executor.config.name
            log.exception("model %s: a batch cannot be made", name)
            for _, waiting in filter(None, begun):
                failure = InternalError(f"model '{name}' failed: {error!r}")
                self._executor.refuse(waiting.item, failure)
            return
        instance = pool.take(urgent=False, deadline=None)
        try:
            self._executor.run(instance, jobs)
        finally:
            pool.give_back(instance)

    def _expire(self, now: float) -> _Refused:
        late, instances = self._book.expire(now)
        for index in instances:
            self._wakes[index].notify()
        text = "timeout of the corresponding sequence has been expired"
        return [(job, Unavailable(text)) for job in late]

    def _drop_dead_heads(self, index: int) -> _Refused:
        """Drop the dead requests that are next on the instance, with those behind them."""
        refused: _Refused = []
        # The request behind a dead one may be dead too.
        while dead := [
            sequence
            for sequence in self._book.ready(index).values()
            if sequence.waiting[0].item.death() is not None
        ]:
            for sequence in dead:
                refused += self._drop_of(sequence)
        return refused

    def _drop_of(self, sequence: BookedSequence[Job]) -> _Refused:
        """Drop the dead requests of `sequence`, each with those behind it. A sequence that waits
        for a slot goes as a whole, from its START, where one of its requests was cancelled, as in
        Triton."""
        refused: _Refused = []
        text = (
            f"sequence {sequence.id} has ended: another request of it was cancelled or came too "
            "late; start it again"
        )
        index = 0
        while index < len(sequence.waiting):
            death = sequence.waiting[index].item.death()
            if death is None:
                index += 1
                continue
            dead = sequence.waiting[index].item
            if sequence.slot is None and isinstance(death, Cancelled):
                while index and not sequence.waiting[index].place.start:
                    index -= 1
            refused += [
                (job, death if job is dead else Cancelled(text))
                for job in self._book.drop(sequence, index)
            ]
        return refused

    def _choose(self, index: int, now: float) -> tuple[Sequence[BookedSequence[Job] | None], float]:
        ready = self._book.ready(index)
        if not ready:
            return (), _LONGEST_WAIT_S
        heads = [
            Head(slot, sequence.waiting[0].item.turn_ns / 1e9, self._form(sequence))
            for slot, sequence in ready.items()
        ]
        choice = self._strategy.choose(heads, now)
        rows = [None if head is None else ready[head.slot] for head in choice.batch]
        # A delay may exceed the longest timeout of a thread's wait.
        return rows, min(_LONGEST_WAIT_S, choice.wait_s)

    def _form(self, sequence: BookedSequence[Job]) -> Hashable:
        waiting = sequence.waiting[0]
        states = self._states.initial if waiting.place.start else sequence.states
        tensors = [*waiting.item.inputs.items(), *states.items()]
        ragged = self._executor.config.ragged_inputs
        return frozenset((name, name in ragged or tensor.shape) for name, tensor in tensors)

    def _jobs(self, begun: Sequence[_Begun | None]) -> list[Job]:
        jobs = [None if each is None else self._job(*each) for each in begun]
        real = next(filter(None, jobs))
        return [self._padding_like(real) if job is None else job for job in jobs]

    def _job(self, sequence: BookedSequence[Job], waiting: WaitingRequest[Job]) -> Job:
        if waiting.place.start:
            sequence.states = self._states.initial
        job = waiting.item
        job.inputs = {**job.request.inputs, **sequence.states, **self._controls.of(waiting.place)}
        if self._states.output_names:
            job.on_outputs = partial(self._keep, sequence)
        return job

    def _padding_like(self, job: Job) -> Job:
        inputs = {name: Tensor(zeros(t.datatype, t.shape)) for name, t in job.inputs.items()}
        request = InferRequest(self._executor.config.name, inputs | self._controls.of(None))
        padding = self._executor.job(request, job.snapshot)
        padding.outputs = job.outputs
        padding.padding = True
        return padding

    def _keep(self, sequence: BookedSequence[Job], made: Tensors) -> None:
        sequence.states = self._states.after(made)

    def _refuse(self, refused: Iterable[tuple[Job, EdgeServerError]]) -> None:
        for job, error in refused:
            self._executor.refuse(job, error)


def _strategy(
    config: ModelConfig, batching: SequenceBatching
) -> tuple[int, DirectStrategy | OldestStrategy]:
    max_batch, delay_s = max(1, config.max_batch_size), batching.max_queue_delay_us / 1e6
    candidates = batching.max_candidate_sequences
    if candidates:
        return candidates, OldestStrategy(max_batch, batching.preferred_batch_sizes, delay_s)
    return max_batch, DirectStrategy(max_batch, batching.minimum_slot_utilization, delay_s)
