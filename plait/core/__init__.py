"""Frozen values and pure functions that all other packages share. ``__all__`` of each subpackage
lists the modules that other packages may import; its further modules are private."""
