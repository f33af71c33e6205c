"""What a job says of its placement."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Literal

from pydantic import Field

from plait.core.base.codec.data import Also, Natural, NotNegative, Section, Such, Texts, decode
from plait.core.base.codec.toml_text import override
from plait.core.job.paths import located

Weight = Annotated[float, Field(ge=0, le=1)]


class PlaceSection(Section):
    """Where ranks may go, and what is to be least, for ``plait place``. No part of the plan: a plan keeps it
    beside, and its hash does not change."""

    alpha: Weight | None = None
    """Weight of the spread of DP groups; that of PP groups is 1 - alpha. Not set: that of the nearest job in
    ``affinity``."""
    affinity: Annotated[str, Also("auto")] = "auto"
    """``auto``: jobs that were measured by placement, by you or as published; or a file of such jobs."""
    distance: Literal["scaled", "plain"] = "scaled"
    """How the nearest of these jobs is found: by ratios scaled to be alike, or by Arnold's plain distance."""
    by: Literal["spread", "seconds"] = "spread"
    """What is to be least: the spread over minipods, weighted by ``alpha``, or predicted seconds."""
    unit: Literal["pp", "dp", "both"] = "both"
    """Groups to keep together first. ``both``: the better of the two."""
    method: Literal["exact", "cpsat", "program"] = "exact"
    """``exact``: closed forms, in milliseconds, and a solver for small jobs that these leave open. ``cpsat``:
    a solver, for what these cannot say. ``program``: the program of Arnold's paper, to compare with."""
    limit: NotNegative = 10.0
    """Seconds that a solver may take."""
    level: str = ""
    """Switches that are counted as minipods: a level's name or depth. Those below the top if empty."""
    spares: Natural | Annotated[str, Field(pattern=r"^\d{1,9}(/(minipod|row))?$"), Such("2/minipod or 1/row")] = 0
    """Nodes to keep for repairs: ``N``, ``N/minipod``, ``N/row`` (of each PP group)."""
    avoid: str = ""
    """Nodes and switches to leave out, such as ``n3,leaf07,n[10-14]``."""
    gpu: Texts = ()
    """Type of GPU, or ``STAGE=TYPE`` where stages differ. Empty: the best single type."""
    gpus_per_node: Natural = 0
    """GPUs of a node, where neither the topology nor the cluster says."""
    forbid: Texts = ()
    """``STAGE:MINIPOD`` that may not come together."""
    preempt: NotNegative | None = None
    """Nodes of other jobs may be taken too, each at so much of the score."""
    move_price: NotNegative | None = None
    """A repair moves further nodes where each gains as much of the score."""
    topology: str = ""
    """Switches on which ``plait plan`` places every strategy, to predict its step there, and ``plait place``
    without ``--topology``."""
    rank_table: str = ""
    """Where ranks lie on ``topology``, for ``plait plan``: nothing is placed anew."""
    network: str = ""
    """A file with what spreading costs, by measurement; published figures if empty."""
    flows: Natural = 0
    """Connections of a NIC, to predict what hashing them onto uplinks costs. 0: it is not predicted."""
    format: str = ""
    """Format of the topology's file; found by its content if empty."""
    states: Texts = ()
    """Further files that say what nodes are doing."""
    tolerate: Texts = ()
    """Taints of Kubernetes nodes that keep the job not away."""

    def changed(self, words: Sequence[str]) -> PlaceSection:
        """The same with ``place.KEY=VALUE`` applied; other words are passed over. Raises JobError naming the
        key."""
        own = [word.removeprefix("place.") for word in words if word.startswith("place.")]
        text = {name for name, one in PlaceSection.model_fields.items() if one.annotation is str}
        values, _ = override(self.model_dump(mode="json", exclude_none=True), own, text.__contains__)
        return decode(PlaceSection, located({"place": values}, Path())["place"], "place")
