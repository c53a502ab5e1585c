"""Users' Python models: each instance runs `model.py` in its own process.

From a request to the model's code: `backend` (the door; instances, restarts) → `session` (the
process, and one life of it) → `messages` → `child.link` → `child.runner` → the user's `execute`.
Tensors lie in `shared_memory`; only their places travel.

`pb_utils` is Triton's API in the process; only `child.runner` knows it, which makes its requests
and reads its responses.
"""
