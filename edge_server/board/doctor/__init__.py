"""`edge-server doctor`: what is well with this machine, what is not, and what to do about it."""
