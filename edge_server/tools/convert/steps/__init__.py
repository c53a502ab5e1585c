"""What runs in a framework's own interpreter: Python 3.10, numpy and that framework alone.
A step that cannot be done raises `InvalidRequest` with the reason.

No module here imports more of edge_server than `errors`, and none but its own framework:
`edge_server.tools.convert.conversion` runs its functions in an interpreter that has the framework
(`edge_server.process.child`), where packages of ours may be missing.
"""
