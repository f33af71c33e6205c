"""Measuring: collectives, one layer's modules, plain operations, and what they lose side by side."""
