"""Models as data: their sizes, their precision, and their names in Hugging Face."""

# pyright: reportUnsupportedDunderAll=false

__all__ = ["dropout", "experts", "families", "huggingface", "precision", "spec", "weights"]
