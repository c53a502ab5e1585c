"""A model that loads and unloads others, in a real daemon, asked by the stock client."""

from __future__ import annotations

import json
import threading
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
import tritonclient.grpc as triton
from support.waiting import TIMEOUT_S, wait_until
from tritonclient.utils import InferenceServerException

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

NOT_ALLOWED = "explicit model load / unload is not allowed if polling is enabled"
DOUBLE = "def execute(self, requests):\n    return [y(x(r) * 2) for r in requests]"
TRIPLE = "def execute(self, requests):\n    return [y(x(r) * 3) for r in requests]"
ASK = """
def ask(self, model, values):
    made = pb_utils.InferenceRequest(
        model_name=model, requested_output_names=["y"],
        inputs=[pb_utils.Tensor("x", np.array(values, np.int32))]).exec()
    if made.has_error():
        return [-1]
    return made.output_tensors()[0].as_numpy()

def refusal(self, call):
    try:
        call()
    except pb_utils.TritonModelException as error:
        return pb_utils.InferenceResponse(error=pb_utils.TritonError(str(error)))
    return y([0])
"""
IO = {
    "input": [{"name": "x", "data_type": "TYPE_INT32", "dims": [-1]}],
    "output": [{"name": "y", "data_type": "TYPE_INT32", "dims": [-1]}],
}
OVERRIDE = json.dumps({"backend": "python", **IO})
# An execution that lasts until its model may go on, as the test says.
WAITS = """
def wait(self, name):
    while not os.path.exists(name):
        time.sleep(0.01)
"""


class Server:
    """A daemon, and short ways to ask it."""

    def __init__(self, process: Any, client: triton.InferenceServerClient) -> None:
        self.process = process
        self.client = client

    def values(self, model: str, *values: int) -> list[int]:
        """`y` for `x`."""
        tensor = triton.InferInput("x", [len(values)], "INT32")
        tensor.set_data_from_numpy(np.array(values, np.int32))
        made: list[int] = self.client.infer(model, [tensor]).as_numpy("y").tolist()
        return made

    def refusal(self, model: str, *values: int) -> str:
        with pytest.raises(InferenceServerException) as caught:
            self.values(model, *values)
        return str(caught.value.message())

    def wait_until(self, condition: Callable[[], object]) -> None:
        wait_until(condition, TIMEOUT_S, otherwise=self.process.log.read_text)

    def state(self, model: str) -> tuple[str, str]:
        models = self.client.get_model_repository_index().models
        return next((each.state, each.reason) for each in models if each.name == model)


@pytest.fixture
def launch(
    start: Callable[..., Any], client: Callable[..., Any], tmp_path: Path
) -> Callable[..., Server]:
    """A daemon on what has been written, with more arguments."""

    def run(*flags: str) -> Server:
        # Models tell the tests by files how far they are.
        config = tmp_path / "config.toml"
        config.write_text(f'[python]\nwritable = ["{tmp_path}"]\n')
        repository = f"--model-repository={tmp_path / 'models'}"
        process = start(f"--config={config}", repository, *flags)
        return Server(process, client(process))

    return run


@pytest.fixture
def explicit(write: Callable[..., Path], launch: Callable[..., Server]) -> Callable[..., Server]:
    """A daemon with these models, of which `m` is loaded; `flags` are more of its arguments."""

    def run(*flags: str, **models: str | tuple[str, str]) -> Server:
        write(**models)
        return launch("--model-control-mode=explicit", "--load-model=m", *flags)

    return run


def test_a_model_is_there_as_soon_as_it_is_loaded_and_gone_as_soon_as_it_is_unloaded(
    explicit: Callable[..., Server],
) -> None:
    server = explicit(
        b=DOUBLE,
        m=ASK
        + """
def execute(self, requests):
    before = pb_utils.is_model_ready("b")
    pb_utils.load_model(model_name="b")
    loaded = pb_utils.is_model_ready("b"), *self.ask("b", x(requests[0]))
    pb_utils.unload_model("b")
    return [y([before, *loaded, pb_utils.is_model_ready("b"), *self.ask("b", [1])])]
""",
    )
    for _ in range(2):
        assert server.values("m", 4) == [0, 1, 8, 0, -1]
    assert not server.client.is_model_ready("b")


def test_what_is_loaded_stays_for_the_next_caller(explicit: Callable[..., Server]) -> None:
    """As models do it that load what they need when they first need it."""
    server = explicit(
        b=DOUBLE,
        m=ASK
        + """
def execute(self, requests):
    if not pb_utils.is_model_ready("b"):
        pb_utils.load_model("b")
    return [y(self.ask("b", x(r))) for r in requests]
""",
    )
    assert [server.values("m", n) for n in range(3)] == [[0], [2], [4]]
    assert server.values("b", 4) == [8]


def test_members_go_with_their_ensemble_where_that_is_requested(
    explicit: Callable[..., Server], tmp_path: Path
) -> None:
    (tmp_path / "models" / "e" / "1").mkdir(parents=True)
    (tmp_path / "models" / "e" / "config.pbtxt").write_text(
        'platform: "ensemble" input { name: "x" data_type: TYPE_INT32 dims: -1 } '
        'output { name: "y" data_type: TYPE_INT32 dims: -1 } ensemble_scheduling { step { '
        'model_name: "b" model_version: -1 input_map { key: "x" value: "x" } '
        'output_map { key: "y" value: "y" } } }'
    )
    server = explicit(
        b=DOUBLE,
        m=ASK
        + """
def execute(self, requests):
    pb_utils.load_model("e")
    ready = [*self.ask("e", [2]), pb_utils.is_model_ready("b")]
    pb_utils.unload_model("e", unload_dependents=bool(x(requests[0])[0]))
    return [y([*ready, pb_utils.is_model_ready("e"), pb_utils.is_model_ready("b")])]
""",
    )
    assert server.values("m", 0) == [4, 1, 0, 1]
    assert server.values("m", 1) == [4, 1, 0, 0]


def test_a_model_comes_with_another_configuration_and_with_files(
    explicit: Callable[..., Server], source: Callable[[str], bytes]
) -> None:
    server = explicit(
        b=DOUBLE,
        m=ASK
        + f"""
def execute(self, requests):
    override, files = {OVERRIDE!r}, {{"file:1/model.py": {source(TRIPLE)!r}, "file:1/e": b""}}
    made = []
    pb_utils.load_model("b", config=override, files=files)
    made += self.ask("b", [1]).tolist()
    pb_utils.unload_model("b")
    pb_utils.load_model("b")
    made += self.ask("b", [1]).tolist()
    pb_utils.load_model("new", override, files)
    made += self.ask("new", [1]).tolist()
    return [y(made)]
""",
    )
    assert server.values("m", 1) == [3, 2, 3]
    assert server.values("new", 2) == [6]


REFUSED = {
    "load_model('nobody')": "failed to load 'nobody', failed to poll from model repository",
    "load_model('../b')": "must not contain path traversal characters",
    "load_model('b', '{')": "Invalid config override",
    "load_model('b', files={'file:1/model.py': b''})": "Load parameter 'config' must be specified "
    "for model file override",
    "load_model('b', '{}', {'1/model.py': b''})": "unrecognized load parameter '1/model.py'.",
    "load_model('b', '{}', {'file:../x': b''})": "Invalid file parameter 'file:../x' with "
    "normalized path '../x' must stay within model directory.",
    "load_model('b', '{}', [])": "failed to load model 'b', files should be a dictionary of file "
    "paths and file contents",
    "load_model('b', '{}', {'file:1/x': bytes(1 << 23)})": "the files for model 'b': 8388672 bytes "
    "do not fit: 0 of 4194304 bytes of shared memory are in use; parameter "
    "'shared_memory_limit_mib' allows more",
    "load_model('bad')": "load failed for model 'bad'",
}


def test_what_cannot_be_loaded_is_an_exception_with_the_reason(
    explicit: Callable[..., Server],
) -> None:
    limit = 'parameters { key: "shared_memory_limit_mib" value { string_value: "4" } }'
    calls = ", ".join(f"lambda: pb_utils.{call}" for call in REFUSED)
    server = explicit(
        b=DOUBLE,
        bad="def initialize(self, args):\n    raise ValueError('no')",
        m=(
            limit,
            ASK
            + f"""
def execute(self, requests):
    return [self.refusal([{calls}][x(r)[0]]) for r in requests]
""",
        ),
    )
    for number, says in enumerate(REFUSED.values()):
        assert says in server.refusal("m", number)


@pytest.mark.parametrize("mode", ["none", "poll"])
def test_other_modes_let_nobody_load(
    write: Callable[..., Path], launch: Callable[..., Server], tmp_path: Path, mode: str
) -> None:
    write(
        b=DOUBLE,
        m=ASK
        + """
def execute(self, requests):
    call = (pb_utils.load_model, pb_utils.unload_model)[x(requests[0])[0]]
    return [self.refusal(lambda: call("b"))]
""",
    )
    server = launch(f"--model-control-mode={mode}", f"--repository-copies={tmp_path / 'store'}")
    assert server.refusal("m", 0) == NOT_ALLOWED
    assert server.refusal("m", 1) == NOT_ALLOWED
    assert server.values("b", 1) == [2]


def test_initialize_loads_what_the_model_needs(explicit: Callable[..., Server]) -> None:
    server = explicit(
        b=DOUBLE,
        m=(
            "instance_group { count: 2 kind: KIND_CPU }",
            ASK
            + """
def initialize(self, args):
    if not pb_utils.is_model_ready(model_name="b", model_version="1"):
        pb_utils.load_model(model_name="b")
def execute(self, requests):
    return [y(self.ask("b", x(r))) for r in requests]
""",
        ),
    )
    assert server.values("m", 4) == [8]


def test_where_all_models_load_together_none_waits_for_the_others_in_its_initialize(
    write: Callable[..., Path], launch: Callable[..., Server]
) -> None:
    write(
        b=DOUBLE,
        m=ASK
        + """
def initialize(self, args):
    self.said = self.refusal(lambda: pb_utils.load_model("b"))
def execute(self, requests):
    return [self.said]
""",
    )
    server = launch("--model-control-mode=explicit", "--load-model=*")
    assert server.refusal("m", 1) == (
        "model 'm' requests b, which would wait for the load of 'm' that is under way: request it "
        "again when that is done"
    )


def test_models_that_load_each_other_are_refused_and_not_waited_for(
    explicit: Callable[..., Server],
) -> None:
    load = "def initialize(self, args):\n    pb_utils.load_model('{}')\n" + DOUBLE
    server = explicit(m=DOUBLE, a=load.format("b"), b=load.format("a"), me=load.format("me"))
    for name, last, other in (("a", "b", "a"), ("me", "me", "me")):
        with pytest.raises(InferenceServerException) as caught:
            server.client.load_model(name)
        assert (
            f"model '{last}' requests {other}, which would wait for the load of '{last}'"
            in caught.value.message()
        )
    assert server.values("m", 1) == [2]


def test_warm_up_may_load_but_not_what_waits_for_it(explicit: Callable[..., Server]) -> None:
    warm_up = (
        'model_warmup { name: "w" batch_size: 1 inputs { key: "x" value { data_type: TYPE_INT32 '
        "dims: 1 zero_data: true } } }"
    )
    server = explicit(
        b=DOUBLE,
        m=(
            warm_up,
            ASK
            + """
def execute(self, requests):
    pb_utils.load_model("b")
    made = self.ask("b", x(requests[0]))
    try:
        pb_utils.load_model("m")
    except pb_utils.TritonModelException:
        made = [-1]
    return [y(made)]
""",
        ),
    )
    assert server.values("m", 3) == [6]


def test_a_model_that_unloads_itself_responds_and_is_gone(explicit: Callable[..., Server]) -> None:
    server = explicit(
        m=ASK
        + """
def execute(self, requests):
    pb_utils.unload_model("m")
    return [y([pb_utils.is_model_ready("m"), *self.ask("m", [1])])]
""",
    )
    assert server.values("m", 1) == [0, -1]
    server.wait_until(lambda: server.state("m") == ("UNAVAILABLE", "unloaded"))


def test_a_model_that_loads_itself_anew_responds_and_gives_way(
    explicit: Callable[..., Server], source: Callable[[str], bytes]
) -> None:
    server = explicit(
        m=f"""
def execute(self, requests):
    pb_utils.load_model("m")
    pb_utils.load_model("m", {OVERRIDE!r}, {{"file:1/model.py": {source(TRIPLE)!r}}})
    return [y(x(r)) for r in requests]
""",
    )
    assert server.values("m", 5) == [5]
    assert server.values("m", 5) == [15]


def test_an_ensemble_in_which_a_member_is_loaded_anew_goes_on_with_the_old_one(
    explicit: Callable[..., Server], source: Callable[[str], bytes], tmp_path: Path
) -> None:
    (tmp_path / "models" / "e" / "1").mkdir(parents=True)
    step = (
        'step {{ model_name: "{}" model_version: -1 input_map {{ key: "x" value: "{}" }} '
        'output_map {{ key: "y" value: "{}" }} }} '
    )
    (tmp_path / "models" / "e" / "config.pbtxt").write_text(
        'platform: "ensemble" input { name: "x" data_type: TYPE_INT32 dims: -1 } '
        'output { name: "y" data_type: TYPE_INT32 dims: -1 } ensemble_scheduling { '
        + step.format("m", "x", "between")
        + step.format("b", "between", "y")
        + "}"
    )
    server = explicit(
        b=DOUBLE,
        m=ASK
        + f"""
def execute(self, requests):
    pb_utils.load_model("b", {OVERRIDE!r}, {{"file:1/model.py": {source(TRIPLE)!r}}})
    return [y(self.ask("b", x(r))) for r in requests]
""",
    )
    server.client.load_model("b")
    server.client.load_model("e")
    assert server.values("e", 1) == [3 * 2]
    assert server.values("e", 1) == [3 * 3]


def test_an_execution_that_waits_too_long_for_a_load_is_killed_and_the_load_goes_on(
    explicit: Callable[..., Server], tmp_path: Path
) -> None:
    gate = tmp_path / "gate"
    server = explicit(
        slow=WAITS + f"def initialize(self, args):\n    self.wait({str(gate)!r})\n" + DOUBLE,
        m=(
            'parameters { key: "execution_timeout_s" value { string_value: "4" } }',
            """
def execute(self, requests):
    if x(requests[0])[0]:
        pb_utils.load_model("slow")
    return [y(x(r)) for r in requests]
""",
        ),
    )
    said = server.refusal("m", 1)
    assert "'execute' did not return within" in said
    assert "it was waiting for the load of 'slow'" in said
    server.wait_until(lambda: server.client.is_model_ready("m"))
    assert server.values("m", 0) == [0]
    gate.touch()
    server.wait_until(lambda: server.client.is_model_ready("slow"))
    assert server.values("m", 1) == [1]


def test_a_process_that_dies_while_it_waits_leaves_the_server_well(
    explicit: Callable[..., Server], tmp_path: Path
) -> None:
    gate, begun = tmp_path / "gate", tmp_path / "begun"
    server = explicit(
        slow=WAITS
        + f"def initialize(self, args):\n    open({str(begun)!r}, 'w').close()\n"
        + f"    self.wait({str(gate)!r})\n"
        + DOUBLE,
        m=WAITS
        + f"""
def execute(self, requests):
    if x(requests[0])[0]:
        threading.Thread(target=self.die, daemon=True).start()
        pb_utils.load_model("slow")
    return [y(x(r)) for r in requests]
def die(self):
    self.wait({str(begun)!r})
    os.kill(os.getpid(), signal.SIGKILL)
""",
    )
    assert "is not healthy" in server.refusal("m", 1)
    server.wait_until(lambda: server.client.is_model_ready("m"))
    gate.touch()
    server.wait_until(lambda: server.client.is_model_ready("slow"))
    assert server.values("m", 0) == [0]
    assert server.values("slow", 1) == [2]
    assert server.process.terminate() == 0


def test_a_request_that_is_taken_back_does_not_take_its_load_back(
    explicit: Callable[..., Server], tmp_path: Path
) -> None:
    gate, begun = tmp_path / "gate", tmp_path / "begun"
    server = explicit(
        slow=WAITS
        + f"def initialize(self, args):\n    open({str(begun)!r}, 'w').close()\n"
        + f"    self.wait({str(gate)!r})\n"
        + DOUBLE,
        m="""
def execute(self, requests):
    if x(requests[0])[0]:
        pb_utils.load_model("slow")
    return [y([r.is_cancelled()]) for r in requests]
""",
    )
    tensor = triton.InferInput("x", [1], "INT32")
    tensor.set_data_from_numpy(np.ones(1, np.int32))
    heard = threading.Event()
    call = server.client.async_infer("m", [tensor], lambda **_: heard.set())
    server.wait_until(begun.exists)
    call.cancel()
    assert heard.wait(TIMEOUT_S)
    gate.touch()
    server.wait_until(lambda: server.client.is_model_ready("slow"))
    assert server.values("m", 0) == [0]


def test_neither_finalize_nor_auto_complete_loads(explicit: Callable[..., Server]) -> None:
    server = explicit(
        b=DOUBLE,
        m=DOUBLE
        + """
def finalize(self):
    pb_utils.load_model("b")
""",
        completed="""
@staticmethod
def auto_complete_config(config):
    pb_utils.load_model("b")
    return config
"""
        + DOUBLE,
    )
    text = "load_model works in 'initialize' and 'execute', not in 'auto_complete_config'"
    with pytest.raises(InferenceServerException) as caught:
        server.client.load_model("completed")
    assert text in caught.value.message()
    server.client.unload_model("m")
    server.wait_until(lambda: server.state("m") == ("UNAVAILABLE", "unloaded"))
    server.process.wait_for_log(f"finalize: TritonModelException: {text}")
    assert not server.client.is_model_ready("b")


def test_what_clients_may_is_not_what_models_may(explicit: Callable[..., Server]) -> None:
    server = explicit(
        "--grpc-control=off",
        b=DOUBLE,
        m=ASK
        + """
def execute(self, requests):
    pb_utils.load_model("b")
    return [y(self.ask("b", x(r))) for r in requests]
""",
    )
    with pytest.raises(InferenceServerException):
        server.client.load_model("b")
    assert server.values("m", 4) == [8]


def test_the_server_ends_although_a_model_waits_for_a_load(
    explicit: Callable[..., Server], tmp_path: Path
) -> None:
    begun = tmp_path / "begun"
    server = explicit(
        "--exit-timeout-secs=1",
        slow=WAITS
        + f"def initialize(self, args):\n    open({str(begun)!r}, 'w').close()\n"
        + "    self.wait('/nowhere')\n"
        + DOUBLE,
        m="""
def execute(self, requests):
    pb_utils.load_model("slow")
    return [y(x(r)) for r in requests]
""",
    )
    tensor = triton.InferInput("x", [1], "INT32")
    tensor.set_data_from_numpy(np.ones(1, np.int32))
    server.client.async_infer("m", [tensor], lambda **_: None)
    server.wait_until(begun.exists)
    assert server.process.terminate() == 0
