"""xpress-export: speculative-decoding trios from checkpoints to engines, and a lean runtime to run them."""
