"""`python`: a user's `model.py`, unchanged, in its own process.

A process that crashes, hangs or never returns costs only the requests that it executes; the daemon
kills the process once no client waits for these requests any more, and restarts it with growing
delays. Meanwhile the model is not ready.

In control mode EXPLICIT the model may load and unload other models: in `initialize`, and from then
on until `finalize`. A load counts towards the time limit of the `initialize` or `execute` that
waits for the load, and continues after that limit; a load that takes minutes belongs in
`initialize`. From its first load or unload on, a process sees the models in their current state,
and no longer in the state pinned when its request arrived.

`settings.Python` sets the sandbox of the process; see docs/python_models.md.

Parameters in config.pbtxt that belong to this backend; all others belong to the model:
`execution_timeout_s` (at most 3600): the daemon kills a process whose `execute` takes longer.
Without it, the daemon kills a process whose `execute` has used no processor time for 30 s, as one
that hangs, and one whose `execute` takes longer than 600 s. Work that only waits, e.g. for another
machine, needs the parameter.
`initialize_timeout_s` (default 120): likewise for `initialize` and `auto_complete_config`.
`shared_memory_limit_mib` (default 256): limits the memory that the tensors of one instance, and the
files with which it loads models, may take in each direction. The memory grows from zero as needed,
and stays allocated until the process ends.
`FORCE_CPU_ONLY_INPUT_TENSORS` is accepted without effect: tensors are always in host memory.
"""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING

import msgspec

from edge_server.backends.python import messages as m
from edge_server.backends.python.child import sandbox
from edge_server.backends.python.messages import ChannelClosed
from edge_server.backends.python.model import (
    USERS_PROGRAM,
    ModelContext,
    ModelProgram,
    PythonModel,
    PythonParameters,
    start_message,
)
from edge_server.backends.python.process import ChildProcess, ModelLog
from edge_server.errors import InvalidRequest, ModelConfigError, ModelLoadError
from edge_server.model_config.completion import complete_scheduling
from edge_server.model_config.config import Completion, ModelConfig
from edge_server.model_config.files import require_path
from edge_server.model_config.parse import parse_model_config_json
from edge_server.model_config.validation import validate
from edge_server.settings.mistakes import value_mistake

if TYPE_CHECKING:
    from pathlib import Path

    from edge_server.backends.contract import LoadContext
    from edge_server.model_config.files import ModelFiles

log = logging.getLogger(__name__)

_LONGEST_EXECUTION_S = 3600.0


def complete(files: ModelFiles, version: int, config: ModelConfig) -> ModelConfig:
    """Complete the configuration with the model's `auto_complete_config`, and validate the result.

    The function runs in its own process, within `initialize_timeout_s`.
    """
    directory = files.versions[version]
    filename = config.default_model_filename
    if "/" in filename or not filename.endswith(".py") or not filename[:-3].isidentifier():
        raise ModelConfigError(
            f"{files.config_path}: default_model_filename '{filename}': a Python model is a file "
            "of the version directory that can be imported, such as model.py"
        )
    require_path(directory / filename, config.name)
    parameters = checked_parameters(files, config)
    if config.completion.auto and (completed := run_for_completion(directory, config, parameters)):
        config = _merged(files, config, completed)
    if config.max_batch_size > 0 and not config.inputs:
        raise ModelConfigError(
            f"{files.config_path}: model '{config.name}' has no inputs, and batches: name them in "
            "config.pbtxt, or in its auto_complete_config"
        )
    validate(config.message, files, frozenset({config.backend}), Completion(auto=False))
    return config


def load(context: LoadContext) -> PythonModel:
    """Return the model; no process starts before its first instance is made."""
    directory, config = context.directory, context.config
    warn_of_sandbox(directory / config.default_model_filename, config)
    parameters = PythonParameters.of(config)
    return PythonModel(ModelContext(directory, config, parameters, context.server))


def warn_of_sandbox(path: Path, config: ModelConfig) -> None:
    """Log what the kernel cannot enforce.

    Raises:
        ModelConfigError: the settings require it.
    """
    for line in _lacking_sandbox(path, config):
        log.warning("model %s: its sandbox is not whole: this kernel has %s", config.name, line)


def _lacking_sandbox(path: Path, config: ModelConfig) -> list[str]:
    """Return the restrictions that the kernel cannot enforce, a line for each.

    Raises:
        ModelConfigError: the settings require them.
    """
    settings = config.completion.python
    lacking = sandbox.lacking(sandbox.rules_of(settings))
    if lacking and settings.sandbox == "require":
        raise ModelConfigError(
            f"{path}: a whole sandbox is required, and this kernel has {'; '.join(lacking)}; "
            '[python] sandbox = "auto" runs models with what there is'
        )
    return lacking


def checked_parameters(files: ModelFiles, config: ModelConfig) -> PythonParameters:
    """Return the backend's parameters.

    Raises:
        ModelConfigError: a parameter's value is invalid; the text names the file.
    """
    where = f"{files.config_path}: parameters"
    if "EXECUTION_ENV_PATH" in config.parameters:
        raise ModelConfigError(
            f"{where}: EXECUTION_ENV_PATH: this server runs every Python model on its own "
            "interpreter; install what the model needs there, and remove the parameter"
        )
    try:
        parameters = PythonParameters.of(config)
    except msgspec.ValidationError as error:
        mistake = value_mistake(str(error), config.parameters)
        raise ModelConfigError(f"{where}: {mistake}") from error
    for name, most in (
        ("execution_timeout_s", _LONGEST_EXECUTION_S),
        ("initialize_timeout_s", 3600.0),
        ("shared_memory_limit_mib", 1 << 16),
    ):
        value = getattr(parameters, name)
        if value is not None and not 0 < value <= most:
            raise ModelConfigError(
                f"{where}: {name} is {value:g}; it must be above 0 and at most {most:g}"
            )
    return parameters


def run_for_completion(
    directory: Path,
    config: ModelConfig,
    parameters: PythonParameters,
    program: ModelProgram = USERS_PROGRAM,
) -> str:
    """Return as JSON what the model makes of its configuration, in a process of its own: a user's
    model the completed one, empty where it has no function for that; a framework's its signature.

    Raises:
        ModelLoadError: the process failed; the text gives the reason.
    """
    path = directory / config.default_model_filename
    _lacking_sandbox(path, config)
    within_s = parameters.initialize_timeout_s
    try:
        model_log = ModelLog(config.name)
        process = ChildProcess(config.name, parameters.arena_bytes, model_log, program.interpreter)
    except OSError as error:
        raise ModelLoadError(f"{path}: no process can be started: {error}") from error

    def refuse(message: m.FromChild) -> None:
        if isinstance(message, m.Query):
            # A module makes its families where it is imported.
            known = isinstance(message.what, m.MakeFamily)
            failure = "" if known else "the server keeps no metrics of 'auto_complete_config'"
            process.channel.send(m.QueryResult(message.number, failure=failure))

    try:
        start = start_message(directory, config, complete=True, program=program)
        started = process.start(start, within_s, take=refuse)
    except ChannelClosed:
        raise ModelLoadError(f"{path}: auto_complete_config: {process.close()}") from None
    finally:
        process.kill()
        process.close()
    if started is None:
        raise ModelLoadError(
            f"{path}: auto_complete_config did not return within {within_s:g} s; parameter "
            "'initialize_timeout_s' allows more"
        )
    if started.failure:
        raise ModelLoadError(f"{path}: {m.shortened(started.failure)}")
    return started.completed


def _merged(files: ModelFiles, config: ModelConfig, completed: str) -> ModelConfig:
    """Return the configuration merged with only those fields that a model may complete."""
    try:
        theirs = parse_model_config_json(completed, config.name)
    except InvalidRequest as error:
        reason = str(error).removeprefix("Invalid config override: ")
        raise ModelConfigError(
            f"{files.config_path}: what auto_complete_config returned is no configuration: {reason}"
        ) from error
    message = type(theirs)()
    message.CopyFrom(config.message)
    message.max_batch_size = theirs.max_batch_size
    for field in ("input", "output"):
        message.ClearField(field)
        getattr(message, field).extend(getattr(theirs, field))
    for field in ("dynamic_batching", "model_transaction_policy"):
        if theirs.HasField(field):
            getattr(message, field).CopyFrom(getattr(theirs, field))
            getattr(message, field).SetInParent()
    complete_scheduling(message)
    return ModelConfig.of(message, config.completion)
