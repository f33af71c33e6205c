"""All environment variables that Plait reads, except those of cluster managers (``cluster_env``),
and the folder of its data files.

    variable            meaning                                         if it is not set
    ------------------  ----------------------------------------------  -------------------------------------
    RANK                global rank of this process                     a run of one process
    WORLD_SIZE          number of ranks of the run                      1; needed as soon as RANK is set
    LOCAL_WORLD_SIZE    number of ranks on this machine                 all, if rank 0 is on it
    LOCAL_RANK          this process's rank on this machine             RANK modulo LOCAL_WORLD_SIZE
    GROUP_RANK          this machine's rank (torchrun; or NODE_RANK)    RANK divided by LOCAL_WORLD_SIZE
    MASTER_ADDR         address at which rank 0 listens                 127.0.0.1 on one machine, else needed
    MASTER_PORT         its port                                        29500
    GLOO_SOCKET_IFNAME  network interface for gloo                      the one this machine's name leads to
    TORCH_GLOO_LAZY_INIT  0: gloo connects all pairs of a group         1: only pairs that communicate
    PLAIT_SPECS         folder to read presets from                     the one that came with Plait
    PLAIT_LAUNCHER      descriptor of the channel to the launcher       no launcher, as under torchrun
    PLAIT_EPOCH         word of the current attempt at the run          no fencing of older attempts
    PLAIT_AGENT         launcher's address for a node's agent           no agent
    PLAIT_RUN           name of the run that this pod belongs to        not in a pod
    PLAIT_LAB           name of the lab (emulated cluster) we run in    not in a lab
    OMP_NUM_THREADS     threads of one rank, passed on to it            1: ranks share the machine's cores
    COLUMNS             width of the terminal, in place of its own      the terminal's own
    NO_COLOR            if not empty: no colours in any output          colours on a terminal
    TERM                if dumb: no colours, no line that changes       a terminal that can do both
    PYTORCH_ALLOC_CONF  options of the GPU allocator, passed on         segments that grow in place
    CUDA_DEVICE_MAX_CONNECTIONS  a GPU's hardware queues, 8 to 32       32
    CUDA_MODULE_LOADING when a GPU's kernels are loaded, passed on      EAGER; LAZY if no NCCL
    NVIDIA_TF32_OVERRIDE  1: fp32 products in TF32, 0: none             torch's own setting
    CXX                 C++ compiler for strategy.compile on a CPU      g++

torchrun sets the first seven, so ``plait train``, torchrun or a scheduler may start the ranks;
``cluster_env.STARTERS`` lists the variables of other launchers. PLAIT_RANK_TABLE names a rank table
that orders the ranks of another launcher. torchrun also sets TORCHELASTIC_USE_AGENT_STORE (ranks
meet at the agent's store) and TORCHELASTIC_RESTART_COUNT (number of earlier starts).

Variables of Slurm: SLURM_JOB_ID, SLURM_RESTART_COUNT, SLURM_CLUSTER_NAME (which start of which
job), SLURM_JOB_NODELIST (the job's nodes), SLURMD_NODENAME (this node's name; elsewhere the host
name), SLURM_PROCID (a task's index). Variables of sbatch: SBATCH_PARTITION (the partition of its
nodes), and all that would override options of a batch script.

Variables of a pod: JOB_COMPLETION_INDEX (its index), and PLAIT_HOSTS, PLAIT_BY_NODES, PLAIT_NODE,
PLAIT_POD_ADDRESS, PLAIT_FILES, PLAIT_ENDED and PLAIT_ATTEMPT, which the launcher and the pod set
(``PodEnv``).
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Mapping, MutableMapping
from dataclasses import dataclass
from pathlib import Path
from typing import TextIO

from plait.core.base.errors import JobError, LaunchError

MASTER_PORT = 29500

# Variables of every rank, unless the user's environment sets them.
_RANK_DEFAULTS = {
    "OMP_NUM_THREADS": "1",  # ranks share the cores, and the thread that moves data needs its share too
    # By default glibc returns freed memory to the kernel and faults it in again, page by page, for every
    # activation; with these settings it keeps and reuses the memory.
    "MALLOC_TRIM_THRESHOLD_": str(8 << 30),
    "MALLOC_MMAP_THRESHOLD_": str(1 << 30),
    "MALLOC_TOP_PAD_": str(64 << 20),
    "TORCH_CPP_LOG_LEVEL": "ERROR",  # hides warnings about unresolved host names; failures raise exceptions
}


@dataclass(frozen=True, kw_only=True)
class RankEnv:
    """The rank, its node and its rendezvous address. Without arguments: a run of one process.

    >>> env = {"RANK": "3", "WORLD_SIZE": "4", "LOCAL_WORLD_SIZE": "2", "MASTER_ADDR": "host0"}
    >>> RankEnv.read(env).local_rank
    1
    """

    rank: int = 0
    world_size: int = 1
    local_rank: int = 0
    local_world_size: int = 1
    node_rank: int = 0
    master_addr: str = "127.0.0.1"
    master_port: int = MASTER_PORT
    lab: str | None = None
    agent_store: bool = False
    attempt: int = 0

    @staticmethod
    def read(environ: Mapping[str, str] | None = None) -> RankEnv:
        """Return the rank's values from the environment. Raises LaunchError naming the variable,
        its value and what is allowed."""
        env = os.environ if environ is None else environ
        if "RANK" in env and "WORLD_SIZE" not in env:
            raise LaunchError(
                "RANK is set but WORLD_SIZE is not. Start ranks with plait train or torchrun, or set both."
            )
        if "WORLD_SIZE" in env and "RANK" not in env and env["WORLD_SIZE"] != "1":
            raise LaunchError(
                f"WORLD_SIZE is {env['WORLD_SIZE']!r} but RANK is not set. "
                "Start ranks with plait train or torchrun, or set both."
            )
        world_size = number_in(env, "WORLD_SIZE", 1, least=1)
        rank = number_in(env, "RANK", 0, most=world_size - 1)
        local_world_size = number_in(env, "LOCAL_WORLD_SIZE", world_size, least=1, most=world_size)
        where = env.get("MASTER_ADDR", "127.0.0.1")
        if world_size > 1 and "LOCAL_WORLD_SIZE" not in env and where != "localhost" and not where.startswith("127."):
            raise LaunchError(
                f"LOCAL_WORLD_SIZE is not set, and rank 0 listens at {where}: ranks may run on several machines. "
                "Set it to how many run on this one, as plait train and torchrun do."
            )
        if local_world_size < world_size and "MASTER_ADDR" not in env:
            raise LaunchError(
                "MASTER_ADDR is not set though ranks run on several machines. "
                "Set it to the address of rank 0's machine."
            )
        node = "GROUP_RANK" if "GROUP_RANK" in env else "NODE_RANK"
        return RankEnv(
            rank=rank,
            world_size=world_size,
            local_rank=number_in(env, "LOCAL_RANK", rank % local_world_size, most=local_world_size - 1),
            local_world_size=local_world_size,
            node_rank=number_in(env, node, rank // local_world_size),
            master_addr=env.get("MASTER_ADDR", "127.0.0.1"),
            master_port=number_in(env, "MASTER_PORT", MASTER_PORT, least=1, most=65535),
            lab=env.get("PLAIT_LAB") or None,
            agent_store=env.get("TORCHELASTIC_USE_AGENT_STORE") == "True",
            attempt=number_in(env, "TORCHELASTIC_RESTART_COUNT", 0),
        )

    @property
    def place_among_cores(self) -> tuple[int, int]:
        """(index of this process, number of processes) among the processes that share the machine's
        cores. All hosts of a lab share one machine."""
        return (self.rank, self.world_size) if self.lab else (self.local_rank, self.local_world_size)

    def variables(self) -> dict[str, str]:
        """Return the variables from which ``read`` makes this object."""
        values: dict[str, str | int] = {
            "RANK": self.rank,
            "WORLD_SIZE": self.world_size,
            "LOCAL_RANK": self.local_rank,
            "LOCAL_WORLD_SIZE": self.local_world_size,
            "GROUP_RANK": self.node_rank,
            "NODE_RANK": self.node_rank,
            "MASTER_ADDR": self.master_addr,
            "MASTER_PORT": self.master_port,
        }
        return {key: str(value) for key, value in values.items()} | ({"PLAIT_LAB": self.lab} if self.lab else {})


def become_rank(variables: Mapping[str, str], environ: MutableMapping[str, str] = os.environ) -> None:
    """Set torchrun's variables in the environment; a MASTER_ADDR or MASTER_PORT set by the user
    stays."""
    for name, value in variables.items():
        if name in ("MASTER_ADDR", "MASTER_PORT") and environ.get(name):
            continue
        environ[name] = value


def rank_variables(rank: RankEnv) -> dict[str, str]:
    """Return the whole environment to start a rank with: this process's own and the rank's
    variables."""
    return rank_base() | rank.variables()


def rank_base() -> dict[str, str]:
    """Return this process's environment with the defaults for every rank; the user's own values
    take precedence."""
    return _RANK_DEFAULTS | inherited()


def launcher_variable(descriptor: int) -> dict[str, str]:
    """Return the variable that passes the descriptor of the channel to the launcher to a rank."""
    return {"PLAIT_LAUNCHER": str(descriptor)}


def adopt_environment(variables: Mapping[str, str], line: int) -> None:
    """Set the variables in this process's environment. line: this process's descriptor of the
    channel to the launcher."""
    os.environ.update({**variables, **launcher_variable(line)})


def take_launcher(environ: MutableMapping[str, str] = os.environ) -> int | None:
    """Return the descriptor of the channel to the launcher; None if there is no launcher. Its
    variable is removed, so that child processes do not inherit it."""
    descriptor = number_in(environ, "PLAIT_LAUNCHER", -1)
    environ.pop("PLAIT_LAUNCHER", None)
    return descriptor if descriptor >= 0 else None


def note_epoch(word: str, environ: MutableMapping[str, str] = os.environ) -> None:
    """Set PLAIT_EPOCH, the word that identifies an attempt at the run, for this process and its
    future children; an empty word removes the variable."""
    if word:
        environ["PLAIT_EPOCH"] = word
    else:
        environ.pop("PLAIT_EPOCH", None)


def epoch_word(environ: Mapping[str, str] = os.environ) -> str:
    """Return PLAIT_EPOCH, the word that identifies the current attempt at the run; empty if there
    is none."""
    return environ.get("PLAIT_EPOCH", "")


def use_network(variables: Mapping[str, str], environ: MutableMapping[str, str] = os.environ) -> None:
    """Make NCCL and gloo use the job's network, unless the user's environment sets another one."""
    for name, value in variables.items():
        environ.setdefault(name, value)


def stay_on_loopback(environ: MutableMapping[str, str] = os.environ) -> None:
    """Make gloo listen only on this machine's loopback interface, unless the user has chosen
    another one."""
    environ.setdefault("GLOO_SOCKET_IFNAME", "lo")


def connect_when_needed(environ: MutableMapping[str, str] = os.environ) -> None:
    """Make gloo connect two ranks when they first communicate, unless the user has set otherwise.
    By default every group asks the store for every rank in it and connects all pairs."""
    environ.setdefault("TORCH_GLOO_LAZY_INIT", "1")


def gloo_interface() -> str:
    """Return the network interface for gloo; empty for the interface that this machine's name leads
    to."""
    return os.environ.get("GLOO_SOCKET_IFNAME", "").split(",")[0]


def chosen_port() -> int | None:
    """Return the user's MASTER_PORT, at which ranks meet; None if it is not set."""
    return number_in(os.environ, "MASTER_PORT", 0, most=65535) or None


def inherited() -> dict[str, str]:
    """Return a copy of this process's whole environment, for a child process."""
    return dict(os.environ)


def dumb_terminal() -> bool:
    """True if the terminal can only print line after line."""
    return os.environ.get("TERM", "") in ("dumb", "unknown")


def terminal_width(stream: TextIO) -> int | None:
    """Return the columns of the terminal ``stream``; None for a file or a pipe."""
    if not stream.isatty():
        return None
    own = os.get_terminal_size(stream.fileno()).columns or 80  # 0: the terminal does not report its width
    return shutil.get_terminal_size((own, 24)).columns  # COLUMNS, standard output's width, or ``stream``'s


def no_colour() -> bool:
    """True if the user, or the terminal, wants plain text (no-color.org)."""
    return bool(os.environ.get("NO_COLOR")) or dumb_terminal()


def specs_folder() -> Path:
    """Return the folder of data files (``models/``, ``jobs/``, ...): ``PLAIT_SPECS``, else the
    checkout's, else the installed one. Raises JobError if ``PLAIT_SPECS`` names no such folder."""
    chosen = os.environ.get("PLAIT_SPECS")
    if chosen:
        if not Path(chosen, "models").is_dir():
            raise JobError(
                f"PLAIT_SPECS names '{chosen}', which has no folder 'models'", fix="Correct the variable or unset it"
            )
        return Path(chosen)
    package = Path(__file__).parents[2]
    checkout = package.parent / "specs"
    # A wheel is installed in site-packages, where another package may have a folder called specs;
    # pyproject.toml identifies a checkout of Plait.
    return checkout if (package.parent / "pyproject.toml").is_file() and checkout.is_dir() else package / "specs"


def data_folder(environ: Mapping[str, str] = os.environ) -> Path:
    """Return the folder that keeps the user's measurements from one job to the next: ``plait`` in
    XDG_DATA_HOME."""
    chosen = environ.get("XDG_DATA_HOME", "")
    base = Path(chosen) if chosen and Path(chosen).is_absolute() else Path.home() / ".local" / "share"
    return base / "plait"


def number_in(env: Mapping[str, str], name: str, default: int, *, least: int = 0, most: int | None = None) -> int:
    """Return a variable as a whole number. Raises LaunchError naming the variable and what is
    allowed."""
    text = env.get(name)
    if text is None:
        return default
    allowed = f"{least} to {most}" if most is not None else f"at least {least}"
    try:
        value = int(text)
    except ValueError:
        raise LaunchError(
            f"The environment variable {name} is {text!r}, not a whole number. Allowed: {allowed}."
        ) from None
    if value < least or (most is not None and value > most):
        raise LaunchError(f"The environment variable {name} is {value}. Allowed: {allowed}.")
    return value


def cpp_compiler(environ: Mapping[str, str] = os.environ) -> str:
    """Return the C++ compiler that torch.compile calls."""
    return environ.get("CXX") or "g++"


LEAST_QUEUES, QUEUES = 8, 32
"""Hardware queues of a GPU: the fewest that are allowed, and the default."""


def c_compiler(environ: Mapping[str, str] = os.environ) -> str:
    """Return the C compiler that builds the extensions."""
    return (environ.get("CC") or "cc").split()[0]


def visible_gpus(environ: Mapping[str, str] = os.environ) -> str | None:
    """Return the user's CUDA_VISIBLE_DEVICES; None if all GPUs are visible."""
    return environ.get("CUDA_VISIBLE_DEVICES")


def tf32_override(environ: Mapping[str, str] = os.environ) -> bool | None:
    """Return True if NVIDIA's libraries are forced to round fp32 products to TF32, False if they
    are forced not to; None if torch decides."""
    return {"1": True, "0": False}.get(environ.get("NVIDIA_TF32_OVERRIDE", ""))


def ready_for_accelerator(environ: MutableMapping[str, str] = os.environ, *, lazy: bool = False) -> None:
    """Set the variables that a GPU's driver reads once, at its first use; the user's own values
    take precedence. Raises LaunchError if they would let ranks deadlock.

    A stream that waits blocks all work behind it in its hardware queue, even across ranks; so the
    number of queues is the largest possible. Kernels are loaded at the start. Loading a kernel
    later may wait for the whole device, hence for a posted message whose sender waits for this
    rank.

    lazy: no kernel of this rank waits for another rank, so each kernel is loaded at its first use.
    The rank then starts sooner and takes less GPU memory.
    """
    queues = number_in(environ, "CUDA_DEVICE_MAX_CONNECTIONS", QUEUES, least=1, most=QUEUES)
    if queues < LEAST_QUEUES:
        raise LaunchError(
            f"The environment variable CUDA_DEVICE_MAX_CONNECTIONS is {queues}. Plait keeps communication of several "
            f"groups under way at once, which so few queues can bring to a standstill. Allowed: {LEAST_QUEUES} to "
            f"{QUEUES}; unset it for {QUEUES}."
        )
    environ["CUDA_DEVICE_MAX_CONNECTIONS"] = str(queues)
    environ.setdefault("CUDA_MODULE_LOADING", "LAZY" if lazy else "EAGER")


def single_threaded_compiler(environ: MutableMapping[str, str] = os.environ) -> None:
    """Make torch's compiler work in the calling process and thread. Call this before the compiler
    is imported."""
    environ["TORCHINDUCTOR_COMPILE_THREADS"] = "1"


def expand_segments(environ: MutableMapping[str, str] = os.environ) -> None:
    """Make the GPU's allocator grow its segments in place, so that tensors of changing sizes leave
    no holes, unless the user has configured the allocator.

    The setting takes effect if it is made before the first allocation.
    """
    if not {"PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF"} & set(environ):
        environ["PYTORCH_ALLOC_CONF"] = "expandable_segments:True"
