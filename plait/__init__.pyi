"""The public names, for type checkers: ``plait`` itself loads a module at the first use of its name."""

from plait.api import Engine as Engine
from plait.api import PlacementRequest as PlacementRequest
from plait.api import diagnose_run as diagnose_run
from plait.api import dry_run as dry_run
from plait.api import explain_hang as explain_hang
from plait.api import export_run as export_run
from plait.api import place_job as place_job
from plait.api import place_of as place_of
from plait.api import plan_job as plan_job
from plait.api import prepare as prepare
from plait.api import read_run_timeline as read_run_timeline
from plait.api import sampler as sampler
from plait.api import start_run as start_run

__version__: str
