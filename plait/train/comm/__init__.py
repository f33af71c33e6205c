"""Collectives, transfers and their threads."""
