"""TensorRT engines: from the ONNX graphs of a bundle to plans that a named platform loads."""
