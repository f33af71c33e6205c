"""Mutation test of the suite: ``make mutants N=20 SEED=3`` draws faults, plants each, and runs the
tests that reach it.

Parts: ``operators`` (what a fault is), ``draw`` (which are drawn), ``reach`` (which tests execute a
line), ``run`` (plant, test, report).
"""
