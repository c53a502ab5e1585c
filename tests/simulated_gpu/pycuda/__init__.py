"""SIMULATION of the package pycuda, found where a test puts its folder on the path."""

VERSION = (2026, 1)
VERSION_STATUS = ""
VERSION_TEXT = "2026.1"
