"""A bundle in, the same bundle with calibrated INT8, FP8 and weight-only graphs out, and what they cost in quality."""
