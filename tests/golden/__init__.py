"""Golden files: what Plait computes today, number by number, so that a redesign can be held to it.

- ``inputs``: jobs, points, problems and recordings, drawn once from seeds.
- ``adapter``: the only module that knows Plait's internals; a redesign edits it and nothing else
here.
- ``files``: the files, and how two contents differ.
- ``python -m tests.golden``: writes the files anew and prints a line for each that changed.
- ``test_golden``: compares. A difference is either a mistake, or is written anew and explained in
the commit.
"""
