"""KServe v2 over HTTP, as Triton serves it.

`api` has what the daemon gives it, `table` every path, `routes` what Starlette serves.
"""
