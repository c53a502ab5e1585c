"""What a server is and has: health, metadata, the model index, statistics."""

import sys

import tritonclient.grpc as triton

client = triton.InferenceServerClient(sys.argv[1] if len(sys.argv) > 1 else "127.0.0.1:8001")
assert client.is_server_live()
assert client.is_server_ready()
assert client.is_model_ready("simple")
server = client.get_server_metadata()
print(f"{server.name} {server.version}: {', '.join(server.extensions)}")
for model in client.get_model_repository_index().models:
    print(f"{model.name} {model.version} {model.state} {model.reason}")
metadata = client.get_model_metadata("simple")
for tensor in (*metadata.inputs, *metadata.outputs):
    print(f"simple: {tensor.name} {tensor.datatype} {list(tensor.shape)}")
assert client.get_model_config("simple").config.max_batch_size == 8
for model in client.get_inference_statistics("simple").model_stats:
    print(f"simple: {model.inference_count} inferences in {model.execution_count} executions")
client.close()
