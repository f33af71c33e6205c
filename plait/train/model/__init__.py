"""The model's mathematics between collectives, and the storage of its parameters."""
