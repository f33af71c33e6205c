"""A run inside of its pods (``plait.launch.kubernetes_pod``), what finds out why its ranks hang, and what
orders its nodes.

python -m plait.api.in_pod
"""

from __future__ import annotations

import sys

from plait.api.ordering import pod_order
from plait.api.ranks import suspicion_of_plan
from plait.core.base.errors import PlaitError
from plait.launch.kubernetes_pod import main

if __name__ == "__main__":
    try:
        sys.exit(main(suspicion_of_plan, pod_order))
    except PlaitError as error:
        print(f"plait: {error}", file=sys.stderr)
        sys.exit(1)  # another pod knows better what becomes of the run
