"""The runtime: opens a bundle and generates text by draft, refine, verify. Never imports torch or onnx."""
