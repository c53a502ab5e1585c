"""The workshop: `calibrate`, `convert`, `bench`, `plan`, and `road`, the drawn road of
`synthetic://`.

`edge_server.cli` imports these modules; `edge_server.cameras.source` loads `road` by its name, when
a drawn road is opened. The daemon runs without this room.
"""
