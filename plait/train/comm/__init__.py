"""Collectives, transfers and the threads they run on."""
