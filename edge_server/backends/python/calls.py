"""Calls of a model's process to other models (Triton's BLS), loads of models, and its queries."""

from __future__ import annotations

import logging
import math
from collections.abc import Callable  # noqa: TC003 - read by NamedTuple
from concurrent.futures import Future
from typing import TYPE_CHECKING, Any, NamedTuple

from edge_server.backends.python import messages as m
from edge_server.backends.python.in_flight import latest_deadline
from edge_server.backends.python.shared_memory import ArenaFull, check_places, pack_all, unpack_all
from edge_server.errors import EdgeServerError, InternalError, forget_frames
from edge_server.process.child import ChannelClosed
from edge_server.process.threads import ThreadPool
from edge_server.requests import InferRequest, SequencePlace
from edge_server.tensors import Tensor

if TYPE_CHECKING:
    from collections.abc import Sequence

    from numpy.typing import NDArray

    from edge_server.backends.contract import ExecuteRequest, ModelResolver, Tensors
    from edge_server.backends.python.context import ModelContext
    from edge_server.backends.python.session import ChildProcess
    from edge_server.requests import InferResponse, ResponseCallback, Trace

log = logging.getLogger(__name__)

_TOO_MANY = "the model has too many calls under way; let it wait for responses"
# Further concurrent calls of a model wait for its own earlier calls.
MOST_THREADS = 16
MOST_CALLS = 1024


class ModelCalls:
    """Runs the calls and queries of one model process.

    A call resolves its model in the pinned models of a request for which it is made, or else among
    the current ones: where it is not ready there, where requests of a decoupled model have pinned
    different models, and once this process has loaded or unloaded a model. It ends early only where
    none of the clients that it may be made for waits any more. A called model may run on the
    calling thread, so every unfinished call needs a thread; so does a load, which continues to its
    end."""

    def __init__(
        self,
        name: str,
        context: ModelContext,
        process: ChildProcess,
        callers: Callable[[], Sequence[ExecuteRequest]],
    ) -> None:
        self._context = context
        self._model = context.config.name
        self._process = process
        self._callers = callers
        self._has_changed_models = False
        self._loading: list[str] = []
        self._threads = NestedCallThreads(name)
        self._calls: dict[int, NestedCallCancellation] = {}

    def call(self, message: m.CallModel) -> None:
        request, callers = message.request, self._callers()
        # Unpack even for a call that is refused, so that the memory becomes free.
        arrays = unpack_all(request.inputs, self._process.inbox)
        inputs = {name: Tensor(array) for name, array in arrays.items()}
        if not callers:
            self._refuse(request.number, "BLS is only supported during the 'execute' function.")
            return
        if len(inputs) < len(request.inputs):
            names = [place.name for place in request.inputs]
            twice = next(name for name in names if names.count(name) > 1)
            self._refuse(
                request.number,
                f"[request id: {request.id or '<id_unknown>'}] input '{twice}' already exists in "
                "request",
            )
            return
        cancellation = NestedCallCancellation(callers)
        self._calls[request.number] = cancellation
        if not self._threads.run(lambda: self._submit(message, inputs, callers, cancellation)):
            self._refuse(request.number, _TOO_MANY)

    def query(self, message: m.Query) -> None:
        """Run a query; the process gets the result when it is there."""
        what, callers = message.what, self._callers()
        files: dict[str, NDArray[Any]] = {}
        if isinstance(what, m.LoadModel):
            # Read here, so that an invalid place ends the session as a malformed message.
            inbox = self._process.inbox
            check_places(what.files, inbox)
            files = {file.name: inbox.view(file.offset, file.size_bytes) for file in what.files}

        def run() -> None:
            value, failure = 0.0, ""
            try:
                value = float(self._result(what, files, callers))
            except (EdgeServerError, IndexError) as error:
                failure = str(error)
            except Exception as error:
                log.exception("model %s: a query failed", self._model)
                failure = f"unexpected {type(error).__name__}: {error}"
            self._send(m.QueryResult(message.number, value, failure))

        if isinstance(what, (m.MakeFamily, m.MakeMetric, m.ReadMetric)):
            run()
        elif not self._threads.run(run):
            self._send(m.QueryResult(message.number, failure=_TOO_MANY))

    @property
    def under_way(self) -> bool:
        """Whether the process waits for another model, or for a load."""
        return bool(self._calls or self._loading)

    def loading(self) -> str:
        """Return the progress of this process's loads, as a suffix of the reason why it ended;
        empty without loads."""
        names = ", ".join(f"'{name}'" for name in self._loading)
        return names and f"; it was waiting for the load of {names}"

    def cancel(self, message: m.Cancel) -> None:
        if (cancellation := self._calls.get(message.number)) is not None:
            cancellation.cancel()

    def close(self) -> None:
        """Cancel every call; a thread that still runs a model ends when that model is done."""
        self._threads.close()
        for cancellation in list(self._calls.values()):
            cancellation.cancel()

    def _resolver(
        self, name: str, version: str, callers: Sequence[ExecuteRequest]
    ) -> ModelResolver | None:
        """Return the resolver in which that model is ready for a call; None if in none."""
        resolvers = [self._context.server_context.models]
        pinned = {id(caller.models) for caller in callers}
        # A decoupled model's requests end one by one, and each lets its models go.
        stays = len(pinned) == 1 or not self._context.config.decoupled
        if callers and stays and not self._has_changed_models:
            resolvers.insert(0, callers[0].models)
        return next((each for each in resolvers if each.model_ready(name, version)), None)

    def _result(
        self, what: m.Question, files: dict[str, NDArray[Any]], callers: Sequence[ExecuteRequest]
    ) -> float:
        if isinstance(what, m.MakeFamily):
            self._context.metrics.make_family(what)
            return 0
        if isinstance(what, m.MakeMetric):
            return self._context.metrics.make(what)
        if isinstance(what, m.ReadMetric):
            return self._context.metrics.value(what.metric)
        if isinstance(what, m.IsModelReady):
            return self._resolver(what.model_name, what.model_version, callers) is not None
        if isinstance(what, m.UnloadModel):
            self._context.server_context.unload(
                what.model_name, unload_dependents=what.unload_dependents
            )
        else:
            self._loading.append(what.model_name)
            try:
                contents = {name: files.pop(name).tobytes() for name in list(files)}
                self._context.server_context.load(
                    what.model_name, config=what.config or None, files=contents, within=self._model
                )
            finally:
                self._loading.remove(what.model_name)
        self._has_changed_models = True
        return 0.0

    def _submit(
        self,
        message: m.CallModel,
        inputs: Tensors,
        callers: Sequence[ExecuteRequest],
        cancellation: NestedCallCancellation,
    ) -> None:
        call = message.request
        number, name = call.number, call.model_name

        def respond(response: ResponseCallback, final: bool) -> None:
            if number not in self._calls:
                # Its last response has been sent.
                return
            if isinstance(response, EdgeServerError):
                self._fail(number, response)
            elif final or message.decoupled:
                self._respond(number, response, final=final)
            else:
                self._refuse(
                    number,
                    f"Model {name} is using the decoupled. The current BLS request call doesn't "
                    "support models using the decoupled transaction policy. Please use "
                    "'decoupled=True' argument to the 'exec' or 'async_exec' calls for decoupled "
                    "models.'",
                )

        try:
            resolver = self._resolver(name, call.model_version, callers)
            if resolver is None:
                self._refuse(
                    number,
                    f"Failed for execute the inference request. Model '{name}' is not ready.",
                )
                return
            deadline = latest_deadline(callers)
            sequence = SequencePlace(
                call.correlation_id,
                bool(call.flags & m.SEQUENCE_START),
                bool(call.flags & m.SEQUENCE_END),
            )
            request = InferRequest(
                name,
                inputs,
                call.model_version,
                tuple(call.outputs),
                call.id,
                deadline=None if deadline == math.inf else deadline,
                timeout_us=call.timeout_us,
                sequence=sequence if call.correlation_id else None,
                parameters=call.parameters,
                cancellation=cancellation,
                trace=_trace(callers, name, call.id),
            )
            resolver.submit(request, respond)
        except EdgeServerError as error:
            self._fail(number, error)
        except Exception as error:  # noqa: BLE001 - the model waits for a response in any case
            self._refuse(number, f"model '{name}' failed: {error!r}")

    def _respond(self, number: int, response: InferResponse | None, *, final: bool) -> None:
        message = None
        if response is not None:
            contents = [(name, t.datatype, t.array) for name, t in response.outputs.items()]
            try:
                places = pack_all(contents, self._process.outbox)
            except ArenaFull as error:
                self._refuse(number, f"the outputs of model '{response.model_name}': {error}")
                return
            message = m.ChildResponse(places, parameters=dict(response.parameters))
        self._send_response(number, message, final=final)

    def _refuse(self, number: int, text: str) -> None:
        self._fail(number, InternalError(text))

    def _fail(self, number: int, error: EdgeServerError) -> None:
        failure = m.ChildError(m.code_of(error), str(error))
        forget_frames(error)
        self._send_response(number, m.ChildResponse(failure=failure), final=True)

    def _send_response(self, number: int, message: m.ChildResponse | None, *, final: bool) -> None:
        if final:
            self._calls.pop(number, None)
        self._send(m.Responded(number, message, final))

    def _send(self, message: m.Responded | m.QueryResult) -> None:
        try:
            self._process.channel.send(message)
        except ChannelClosed:
            # The process is already gone, or hangs and no longer reads.
            self._process.kill()


class NestedCallCancellation:
    """Cancelled by the calling model, or when all clients that it may be made for are gone."""

    def __init__(self, callers: Sequence[ExecuteRequest]) -> None:
        self._callers = [caller.request for caller in callers]
        self._own: Future[None] = Future()

    @property
    def cancelled(self) -> bool:
        return self._own.cancelled() or all(caller.cancelled for caller in self._callers)

    def when_cancelled(self, callback: Callable[[], None]) -> None:
        def look() -> None:
            if self.cancelled:
                callback()

        for caller in self._callers:
            if caller.cancellation is not None:
                caller.cancellation.when_cancelled(look)
        self._own.add_done_callback(lambda _own: callback())

    def cancel(self) -> None:
        self._own.cancel()


class _Work(NamedTuple):
    run: Callable[[], None]


class NestedCallThreads(ThreadPool[_Work]):
    """One thread per unfinished call, made on demand, at most 16."""

    def __init__(self, name: str) -> None:
        super().__init__(MOST_THREADS, f"calls of {name}")

    def run(self, work: Callable[[], None]) -> bool:
        """Run `work` on a thread; return False where too many wait. Raises RuntimeError where no
        thread is running, and the system refuses a new one."""
        with self.lock:
            if self._offer(task := _Work(work)):
                return True
            if self._closed or len(self.waiting) == MOST_CALLS - MOST_THREADS:
                return False
            if not self._threads:
                raise RuntimeError("can't start new thread")
            self.waiting.append(task)
            return True

    def close(self, timeout_s: float = 0.0) -> None:
        with self.lock:
            self.waiting.clear()
        super().close(timeout_s)


def _trace(callers: Sequence[ExecuteRequest], model_name: str, request_id: str) -> Trace | None:
    """Return the trace of the request for which the call is made, where that request is certain."""
    caller = callers[0].request.trace if len(callers) == 1 else None
    return None if caller is None else caller.child(model_name, request_id)
