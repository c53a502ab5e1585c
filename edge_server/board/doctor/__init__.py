"""`edge-server doctor`: checks of this machine, each with a remedy."""
