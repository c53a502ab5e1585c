"""A model's calls to other models (Triton's BLS), and its loads of other models."""

from __future__ import annotations

import logging
import threading
from collections import Counter
from typing import TYPE_CHECKING

from edge_server.backends.python.arena import ArenaFull
from edge_server.backends.python.call_cancellation import NestedCallCancellation
from edge_server.backends.python.call_threads import NestedCallThreads
from edge_server.backends.python.channel import ChannelClosed
from edge_server.backends.python.codes import Code, code_of
from edge_server.backends.python.messages import (
    AskModelReady,
    CallAnswered,
    CallModel,
    CallReturned,
    ChildError,
    ChildResponse,
    LoadModel,
    UnloadModel,
)
from edge_server.backends.python.packing import check_places, pack_all, unpack_all
from edge_server.errors import EdgeServerError, InternalError
from edge_server.requests import InferRequest, SequencePlace
from edge_server.tensors import Tensor

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from edge_server.backends.contract import ExecuteRequest, Tensors
    from edge_server.backends.python.process import ChildProcess
    from edge_server.backends.server_context import ModelResolver, ServerContext
    from edge_server.requests import InferResponse, Trace

log = logging.getLogger(__name__)

_TOO_MUCH = "the model asks for more at once than the server takes; let it wait for answers"

SEQUENCE_START = 1
SEQUENCE_END = 2


class ModelCalls:
    """Runs the calls of one model process.

    A call resolves its model in the pinned models of a request for which the call is made; a model
    that is not ready there is resolved among the current models, as another process may have loaded
    it since. Once this process has loaded or unloaded a model, every call resolves among the
    current models, so that the process sees its own change.

    A called model may run on the calling thread, so every unfinished call needs a thread; so does a
    load, which continues to its end once it has begun.

    Args:
        name: of the instance.
        model: the model's name.
        process: the calling process.
        server_context: resolves models beyond those pinned by the requests.
    """

    def __init__(
        self, name: str, model: str, process: ChildProcess, server_context: ServerContext
    ) -> None:
        self._name = name
        self._model = model
        self._process = process
        self._server_context = server_context
        self._has_changed_models = False
        self._loading: list[str] = []
        self._lock = threading.Lock()
        self._threads = NestedCallThreads(name)
        self._calls: dict[int, NestedCallCancellation] = {}

    def call(self, message: CallModel, callers: Sequence[ExecuteRequest]) -> None:
        """Start a call, made while `callers` execute."""
        number = message.request.number
        # Unpack even for a call that is refused, so that the memory becomes free.
        arrays = unpack_all(message.request.inputs, self._process.inbox)
        inputs = {name: Tensor(array) for name, array in arrays.items()}
        if not callers:
            self.refuse(number, "BLS is only supported during the 'execute' function.")
            return
        if len(inputs) < len(message.request.inputs):
            given = Counter(place.name for place in message.request.inputs)
            twice = next(name for name, count in given.items() if count > 1)
            self.refuse(
                number,
                f"[request id: {message.request.id or '<id_unknown>'}] input '{twice}' already "
                "exists in request",
            )
            return
        cancellation = NestedCallCancellation(callers[0])
        with self._lock:
            self._calls[number] = cancellation
        if not self._threads.run(lambda: self._submit(message, inputs, callers, cancellation)):
            self.refuse(number, _TOO_MUCH)

    def ask_ready(self, message: AskModelReady, callers: Sequence[ExecuteRequest]) -> None:
        """Report to the model whether another model is ready."""

        def ask() -> float:
            name, version = message.model_name, message.model_version
            return float(self._world_with(name, version, callers) is not None)

        self._run(message.call, ask)

    def load(self, message: LoadModel) -> None:
        """Start to load a model; the process gets the result when the load is done."""
        name = message.model_name
        # Read here, so that an invalid place ends the session as a malformed message.
        inbox = self._process.inbox
        check_places(message.files, inbox)
        stored = {file.name: inbox.view(file.offset, file.size_bytes) for file in message.files}

        def load() -> None:
            self._loading.append(name)
            try:
                files = {key: stored.pop(key).tobytes() for key in list(stored)}
                self._server_context.load(
                    name, config=message.config or None, files=files, within=self._model
                )
            finally:
                self._loading.remove(name)
            self._has_changed_models = True

        self._run(message.call, load)

    def unload(self, message: UnloadModel) -> None:
        """Unload a model."""

        def unload() -> None:
            self._server_context.unload(
                message.model_name, unload_dependents=message.unload_dependents
            )
            self._has_changed_models = True

        self._run(message.call, unload)

    def waits_for(self) -> str:
        """Return the progress of this process's loads, as a suffix of the reason why it ended;
        empty without loads."""
        names = ", ".join(f"'{name}'" for name in self._loading)
        return names and f"; it was waiting for the load of {names}"

    def cancel(self, number: int) -> None:
        """Cancel a call whose response the model no longer needs."""
        with self._lock:
            cancellation = self._calls.get(number)
        if cancellation is not None:
            cancellation.cancel()

    def refuse(self, number: int, text: str) -> None:
        """Send a failure for a call that cannot be made."""
        self._answer(number, ChildResponse(failure=ChildError(Code.INTERNAL, text)), final=True)

    def close(self) -> None:
        """Cancel every call; a thread that still runs a model ends when that model is done."""
        self._threads.close()
        with self._lock:
            cancellations = list(self._calls.values())
        for cancellation in cancellations:
            cancellation.cancel()

    def _world_with(
        self, name: str, version: str, callers: Sequence[ExecuteRequest]
    ) -> ModelResolver | None:
        """Return the resolver in which that model is ready for a call; None if it is ready in none.

        Raises:
            InvalidRequest: `version` is not a version number.
        """
        worlds = [self._server_context.models]
        if callers and not self._has_changed_models:
            worlds.insert(0, callers[0].models)
        return next((world for world in worlds if world.model_ready(name, version)), None)

    def _run(self, call: int, work: Callable[[], float | None]) -> None:
        """Run `work` on another thread, which sends the result to the process."""
        if not self._threads.run(lambda: self._return(call, work)):
            self._send(CallReturned(call, failure=_TOO_MUCH))

    def _return(self, call: int, work: Callable[[], float | None]) -> None:
        """Run `work`, and send the result to the process."""
        try:
            value = work()
        except EdgeServerError as error:
            self._send(CallReturned(call, failure=str(error)))
        except Exception as error:
            log.exception("model %s: a call failed", self._model)
            self._send(CallReturned(call, failure=f"unexpected {type(error).__name__}: {error}"))
        else:
            self._send(CallReturned(call, value or 0.0))

    def _submit(
        self,
        message: CallModel,
        inputs: Tensors,
        callers: Sequence[ExecuteRequest],
        cancellation: NestedCallCancellation,
    ) -> None:
        asked = message.request
        name, version = asked.model_name, asked.model_version
        try:
            world = self._world_with(name, version, callers)
            if world is None:
                self.refuse(
                    asked.number,
                    f"Failed for execute the inference request. Model '{name}' is not ready.",
                )
                return
            deadlines = [c.request.deadline for c in callers if c.request.deadline is not None]
            sequence = SequencePlace(
                asked.correlation_id,
                bool(asked.flags & SEQUENCE_START),
                bool(asked.flags & SEQUENCE_END),
            )
            world.submit(
                InferRequest(
                    name,
                    inputs,
                    version,
                    tuple(asked.outputs),
                    asked.id,
                    deadline=min(deadlines, default=None),
                    timeout_us=asked.timeout_us,
                    sequence=sequence if asked.correlation_id else None,
                    parameters=asked.parameters,
                    cancellation=cancellation,
                    trace=_trace(callers, name, asked.id),
                ),
                _Listener(self, asked.number, name, decoupled=message.decoupled),
            )
        except EdgeServerError as error:
            self.fail(asked.number, error)
        except Exception as error:  # noqa: BLE001 - the model waits for a response in any case
            self.fail(asked.number, InternalError(f"model '{name}' failed: {error!r}"))

    def give(self, number: int, response: InferResponse | None, *, final: bool) -> bool:
        """Send one response to the model; return whether the model accepts more."""
        if response is None:
            self._answer(number, None, final=final)
            return not final
        contents = [(name, t.datatype, t.array) for name, t in response.outputs.items()]
        try:
            places = pack_all(contents, self._process.outbox)
        except ArenaFull as error:
            text = f"the outputs of model '{response.model_name}': {error}"
            self.refuse(number, text)
            return False
        answer = ChildResponse(places, parameters=dict(response.parameters))
        self._answer(number, answer, final=final)
        return not final

    def fail(self, number: int, error: EdgeServerError) -> None:
        self._answer(
            number, ChildResponse(failure=ChildError(code_of(error), str(error))), final=True
        )

    def _answer(self, number: int, answer: ChildResponse | None, *, final: bool) -> None:
        if final:
            with self._lock:
                self._calls.pop(number, None)
        self._send(CallAnswered(number, answer, final))

    def _send(self, message: CallAnswered | CallReturned) -> None:
        try:
            self._process.channel.send(message)
        except ChannelClosed:
            # The process is already gone, or hangs and no longer reads.
            self._process.kill()


class _Listener:
    """Receives the responses of one call."""

    def __init__(self, calls: ModelCalls, number: int, model: str, *, decoupled: bool) -> None:
        self._calls = calls
        self._number = number
        self._model = model
        self._decoupled = decoupled
        self._over = False

    def __call__(self, answer: InferResponse | EdgeServerError | None, final: bool) -> None:
        if self._over:
            return
        if final or self._decoupled or isinstance(answer, EdgeServerError):
            self._over = not self._pass_on(answer, final=final)
        else:
            self._over = True
            self._calls.refuse(
                self._number,
                f"Model {self._model} is using the decoupled. The current BLS request call "
                "doesn't support models using the decoupled transaction policy. Please use "
                "'decoupled=True' argument to the 'exec' or 'async_exec' calls for decoupled "
                "models.'",
            )

    def _pass_on(self, answer: InferResponse | EdgeServerError | None, *, final: bool) -> bool:
        """Forward a response; return whether more may follow."""
        if isinstance(answer, EdgeServerError):
            self._calls.fail(self._number, answer)
            return False
        return self._calls.give(self._number, answer, final=final)


def _trace(callers: Sequence[ExecuteRequest], model_name: str, request_id: str) -> Trace | None:
    """Return the trace of the request for which the call is made, where that request is certain."""
    caller = callers[0].request.trace if len(callers) == 1 else None
    return None if caller is None else caller.child(model_name, request_id)
