"""Queue policies beside a planned job, and predictions of how long jobs run, on traces of real clusters.

    python benchmarks/queue.py TRACES... [--columns FIELD=COLUMN,...] [--json] [--save FILE]

All of it is in ``queue_policies.py``. This file's name is the standard library's too, whose module every
script of this folder would miss: when it is imported instead of run, it hands that one over.
"""

from __future__ import annotations

if __name__ == "__main__":
    from keeping import finish
    from queue_policies import main

    finish(main)
else:
    import importlib.util
    import os
    import sys
    from pathlib import Path

    spec = importlib.util.spec_from_file_location("queue", Path(os.__file__).with_name("queue.py"))
    assert spec and spec.loader
    sys.modules[__name__] = module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
