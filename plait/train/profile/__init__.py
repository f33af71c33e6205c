"""Measurements of collectives, modules of a layer, plain operations, and their slowdown when
concurrent."""
