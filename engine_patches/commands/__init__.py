"""The commands `seamark worker` and `seamark model`."""
