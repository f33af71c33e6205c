"""Explain a recorded run, or the predicted timeline of a plan."""
