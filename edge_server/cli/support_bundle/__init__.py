"""`edge-server support-bundle`: one archive that a vendor can be sent, without secrets."""
