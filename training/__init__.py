"""A trio for your own target: its own answers as data, losses, train loops, evaluation. Needs the `train` extra."""
