"""The recorder: `Recorder` in `recorder`; the rest is its own. Needs the extra `recorder`."""
