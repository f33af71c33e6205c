"""The data path from text to batches of tokens."""
