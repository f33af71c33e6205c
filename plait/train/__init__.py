"""Execute a plan; the only folder that imports torch."""
