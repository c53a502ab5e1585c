"""Models of PyTorch, TensorFlow, OpenVINO and Paddle, each instance in its own process.

`backend` is the door in the daemon; the processes are those of Python models (`backends.python`).
There `runner` joins requests to a batch and splits the result; a module for each framework opens
and runs the model's file. They need msgspec and numpy beside their framework, which may be
installed for another Python: `settings.Python.interpreters`.
"""
