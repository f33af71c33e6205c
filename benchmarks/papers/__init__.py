"""The five papers that Plait is made of: what they publish beside what Plait computes.

``published/PAPER.toml`` has each figure's numbers with their place in the paper, and the claims that
follow. ``PAPER.py`` computes Plait's numbers (``FIGURES``: a function a figure), by the planner, the
simulator, the placer and the queue, as the commands on the pages do. ``python -m benchmarks.papers``
writes what they find to ``benchmarks/results/papers`` (JSON, a file a figure) and the pages of
``docs/papers`` from that alone.
"""

import sys
from pathlib import Path

sys.path.append(str(Path(__file__).resolve().parents[1]))
# Benchmarks are scripts, which find each other beside them.
