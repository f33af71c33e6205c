"""Ranks as processes of this machine."""

from __future__ import annotations

from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING

from plait.api.ranks import collected, kept_going, silenced, suspicion_of, watched

if TYPE_CHECKING:
    from plait.api.ranks import Ranks
    from plait.core.cluster.hardware import Hosts


@dataclass(frozen=True)
class Here:
    """This machine."""

    world: None = None
    lab: None = None
    ours: bool = True

    @property
    def hosts(self) -> Hosts:
        """One."""
        from plait.core.cluster.hardware import HERE

        return HERE

    def takes(self, world: int) -> bool:
        """Any."""
        return True

    def run(self, ranks: Ranks) -> int:
        """As processes. MASTER_PORT, where it is set, is theirs too: Plait's own meet in the launcher."""
        from plait.core.base.cluster_env import this_host
        from plait.core.base.env import chosen_port
        from plait.core.base.process import reserved_port
        from plait.launch.run_folder import keep_plan
        from plait.launch.supervisor import Crew, OneHost
        from plait.launch.warm import warm_starts

        with ExitStack() as held:
            port = chosen_port() or held.enter_context(reserved_port())
            starts = held.enter_context(warm_starts(ranks.module, ranks.arguments, ranks.world, port))
            if ranks.plan is None:
                return watched(starts(), ranks)

            plan, folder = ranks.plan, ranks.logs.parent

            def crew() -> Crew:
                keep_plan(plan, folder)
                start = starts()
                return Crew(
                    start=silenced(start) if ranks.silent else start, world=ranks.world, hosts=(this_host(),),
                    suspicion=partial(suspicion_of, ranks), plan=plan.key,
                    beside=partial(collected, ranks),
                )  # fmt: skip

            return kept_going(OneHost(crew), ranks)
