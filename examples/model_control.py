"""Unload a model and load it again, also with another configuration. The server needs
--model-control-mode=explicit."""

import json
import sys

import tritonclient.grpc as triton
from tritonclient.utils import InferenceServerException

client = triton.InferenceServerClient(sys.argv[1] if len(sys.argv) > 1 else "127.0.0.1:8001")
client.unload_model("simple")
while client.is_model_ready("simple"):
    pass
client.load_model("simple")
assert client.is_model_ready("simple")
assert client.get_model_config("simple").config.max_batch_size == 8

config = client.get_model_config("simple", as_json=True)["config"]
config.update(max_batch_size=2, dynamic_batching={"preferred_batch_size": [2]})
# Those who send batches of 8 are refused from now on, so the load has to say that this is meant.
config["parameters"] = {"allow_interface_change": {"string_value": "true"}}
client.load_model("simple", config=json.dumps(config))
assert client.get_model_config("simple").config.max_batch_size == 2
client.load_model("simple")

try:
    client.load_model("nothing_of_that_name")
except InferenceServerException as error:
    print(error.message())
else:
    raise AssertionError("a model that is not there was loaded")
for model in client.get_model_repository_index().models:
    print(model.name, model.version, model.state)
client.close()
