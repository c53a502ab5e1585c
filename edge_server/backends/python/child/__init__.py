"""What runs in a model's process: `__main__` closes it off (`sandbox`) and starts the
runner."""
