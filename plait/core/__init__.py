"""What all parts speak of: frozen values and pure functions, in packages. ``__all__`` of a package names the
modules that others may import; the rest are its own."""
