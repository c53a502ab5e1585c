"""Users' Python models: each instance runs `model.py` in a process of its own.

From a request to the model's code: `backend` (the door; instances, restarts) → `session` (one life
of a process) → `process` and `messages` (the process, and the channel to it) → `child.link` →
`child.runner` → the user's `execute`. Tensors lie in `shared_memory`; only their
places travel.

`pb_utils` is Triton's API in the process. `process`, `session`, `shared_memory` and `child` know
nothing of it but that `child.runner` makes its requests and reads its responses.
"""
