"""Stage 5, decisions without tensors."""
