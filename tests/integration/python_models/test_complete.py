"""What a model says of itself before it is loaded, and what is refused."""

from __future__ import annotations

import re
from typing import Any

import pytest

Serve = Any
EXECUTE = "\ndef execute(self, requests):\n    return [y(x(r)) for r in requests]\n"
COMPLETE = "@staticmethod\ndef auto_complete_config(config):\n    "


def reason(served: Any) -> str:
    (entry,) = served.failed
    text: str = entry.reason
    return text


def parameter(key: str, value: str) -> str:
    return f'parameters {{ key: "{key}" value {{ string_value: "{value}" }} }}'


def test_the_result_of_auto_complete_config_is_merged(serve: Serve) -> None:
    served = serve(
        m=COMPLETE
        + "config.set_max_batch_size(4)\n"
        + "    config.set_dynamic_batching()\n"
        + "    config.add_output({'name': 'z', 'data_type': 'TYPE_BOOL', 'dims': [2]})\n"
        + "    return config\n"
        + EXECUTE
    )
    config = served.entry("m").loaded.config
    assert config.max_batch_size == 4
    assert config.dynamic_batching is not None
    assert [(spec.name, spec.shape) for spec in config.outputs] == [("y", (-1,)), ("z", (2,))]
    assert [spec.name for spec in config.inputs] == ["x"]


def test_a_contradiction_fails_the_load_in_tritons_words(serve: Serve) -> None:
    served = serve(
        m=COMPLETE
        + "config.add_input({'name': 'x', 'data_type': 'TYPE_FP32', 'dims': [-1]})\n"
        + "    return config"
        + EXECUTE
    )
    assert (
        "1/model.py: ValueError: unable to load model 'm', configuration expects datatype "
        "TYPE_INT32 for input 'x', model provides TYPE_FP32\n\nAt:\n"
    ) in reason(served)


@pytest.mark.parametrize(
    ("body", "text"),
    [
        (
            "return None",
            "auto_complete_config function in model 'm' must return a valid pb.ModelConfig object.",
        ),
        ("config._model_config['odd'] = 1; return config", "is no configuration: .*odd"),
        (
            "config.add_input({'name': 'a', 'data_type': 'TYPE_BOOL', 'dims': [0]}); return config",
            "model input 'a' dimension must be integer >= 1",
        ),
        ("os._exit(4)", "auto_complete_config: it exited with code 4"),
        ("this is no Python", "SyntaxError: "),
    ],
)
def test_a_completion_that_goes_wrong_fails_the_load(serve: Serve, body: str, text: str) -> None:
    assert re.search(text, reason(serve(m=COMPLETE + body + EXECUTE)))


def test_a_completion_that_hangs_fails_the_load(serve: Serve) -> None:
    served = serve(
        m=(parameter("initialize_timeout_s", "1"), COMPLETE + "time.sleep(600)" + EXECUTE)
    )
    assert (
        "auto_complete_config did not return within 1 s; parameter 'initialize_timeout_s' allows"
        in reason(served)
    )


@pytest.mark.parametrize(
    ("config", "text"),
    [
        (
            parameter("execution_timeout_s", "9000"),
            'execution_timeout_s: expected a number <= 3600.0; got "9000"',
        ),
        (parameter("execution_timeout_s", "soon"), 'expected a number; got "soon"'),
        ('default_model_filename: "model.txt"', "a Python model is a file of the version"),
        ('default_model_filename: "other.py"', "missing; model 'm' is loaded from it"),
    ],
)
def test_what_cannot_work_is_refused_with_the_remedy(serve: Serve, config: str, text: str) -> None:
    assert text in reason(serve(m=(config, EXECUTE)))


def test_a_models_own_parameters_are_its_own(serve: Serve) -> None:
    served = serve(
        m=(
            parameter("FORCE_CPU_ONLY_INPUT_TENSORS", "no") + parameter("gain", "3"),
            """
            def initialize(self, args):
                parameters = json.loads(args["model_config"])["parameters"]
                self.gain = int(parameters["gain"]["string_value"])
            def execute(self, requests):
                return [y(x(r) * self.gain) for r in requests]
            """,
        )
    )
    assert served.values("m", 2) == [6]


def test_a_metric_is_refused_at_once(serve: Serve) -> None:
    family = "pb_utils.MetricFamily('made', 'early', pb_utils.MetricFamily.COUNTER)"
    config = parameter("initialize_timeout_s", "60")
    served = serve(m=(config, COMPLETE + f"{family}.Metric(); return config" + EXECUTE))
    assert "TritonModelException: the server keeps no metrics of" in reason(served)
