"""`edge-server provision`: the settings of one device, from a USB stick or its broker."""
