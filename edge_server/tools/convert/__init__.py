"""Converters of model files: `formats` says what can be made of what, `conversion` runs the
steps.

A framework's own code stands in `steps` and runs in an interpreter that has the framework: this
one, or one that the user names.
"""
