"""Stage 6, tensors in, tensors out; knows nothing of SGLang."""
