"""Plait: plan, place, train and diagnose large-language-model training when the network is what you wait
for."""

__version__ = "0.1.0"
