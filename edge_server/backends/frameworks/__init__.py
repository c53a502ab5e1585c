"""Models of PyTorch, TensorFlow, OpenVINO and Paddle, each instance in its own process.

`backend` is the door: it completes and checks configurations in the daemon, and starts the same
processes that Python models run in (`backends.python`). In the process `runner` joins requests to
a batch, runs the model and splits the result; `pytorch`, `tensorflow`, `openvino` and `paddle` open
the model's file and run it. These modules need msgspec and numpy beside their framework, and
nothing else that the daemon has: the framework may be installed for another Python, see
`settings.Python.interpreters`.
"""
