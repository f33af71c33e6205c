"""Stragglers, hangs and what they cost."""
