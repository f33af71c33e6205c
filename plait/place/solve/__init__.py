"""Solvers that choose hosts: lower bounds, constructions and exact methods."""
