"""Explain what ran, or what would run."""
