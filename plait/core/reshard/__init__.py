"""Resharding of tensors between meshes: layouts, unit tasks, plans and messages."""

# pyright: reportUnsupportedDunderAll=false

__all__ = ["layouts", "plan"]
