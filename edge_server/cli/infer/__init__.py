"""One request to a model of the running daemon, with a picture or with arrays."""
