"""Checkpoints in, ONNX graphs out: readers, PyTorch modules, tracing, parity. Needs the `export` extra."""
