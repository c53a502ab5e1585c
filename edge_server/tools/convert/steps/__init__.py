"""What runs in a framework's own interpreter: Python 3.10, numpy and that framework alone.

No module here imports edge_server, and none but its own framework:
`edge_server.tools.convert.conversion` starts an interpreter that has the framework, and that
imports this package from its files.
"""
