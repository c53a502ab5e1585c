"""How fast a model of the daemon is, and with which settings it would be fastest."""
