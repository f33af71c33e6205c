"""A small cluster, and jobs and planned jobs drawn for it."""

from __future__ import annotations

from hypothesis import assume
from hypothesis import strategies as st

from plait.core.base.errors import PlacementError
from plait.place.queue.reservation import ClusterShape, Planned, check_planned

NODES, SIZE = 6, 4


CLUSTER = ClusterShape(nodes=NODES, gpus_per_node=SIZE, minipod=2)


ROWS = st.lists(
    st.tuples(
        st.integers(0, 400).map(float), st.sampled_from((1.0, 7.0, 50.0, 300.0, 900.0)), st.integers(1, NODES * SIZE)
    ),
    min_size=1,
    max_size=40,
)


PLANNED = st.builds(
    Planned,
    nodes=st.integers(1, NODES),
    spares=st.sampled_from((0, 0, 1, 2)),
    arrival=st.integers(100, 500).map(float),
    notice=st.integers(0, 100).map(float),
    duration=st.sampled_from((10.0, 200.0)),
)


REPLAN = st.sampled_from((0.0, 7.0, 60.0))


@st.composite
def several(draw: st.DrawFn, least: int = 0) -> list[Planned]:
    """Planned jobs that the cluster can take, one after the other or at one time."""
    found = draw(st.lists(PLANNED, min_size=least, max_size=3))
    try:
        check_planned(found, CLUSTER)
    except PlacementError:
        assume(False)
    return found
