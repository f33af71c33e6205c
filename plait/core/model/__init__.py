"""Models as data: their sizes, their precision, and what Hugging Face calls them."""

# pyright: reportUnsupportedDunderAll=false

__all__ = ["dropout", "experts", "families", "huggingface", "precision", "spec", "weights"]
