"""Tensors that move between meshes: layouts, unit tasks, messages."""

# pyright: reportUnsupportedDunderAll=false

__all__ = ["layouts", "plan", "script"]
