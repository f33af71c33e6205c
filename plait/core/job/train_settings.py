"""``[train]``: batches, the learning rate, the optimizer, checkpoints."""

from __future__ import annotations

from fnmatch import fnmatchcase
from typing import Annotated, Literal

from pydantic import Field

from plait.core.base.codec.data import Count, Natural, NotNegative, OrAuto, Positive, Section
from plait.core.job.data_settings import Fraction, Seed
from plait.core.job.rampup import BatchSizes, RampupSection
from plait.core.model.precision import ITEMSIZE, Precision, SmallType, size_in
from plait.core.parallel.optimizers import OptimizerName

OnNan = Literal["stop", "skip"]


class MuonSection(Section):
    """Muon (Jordan 2024, https://kellerjordan.github.io/posts/muon/), as torch.optim.Muon has it: of the
    matrices of layers, each a matrix of its own (queries, keys, values, gate, up, ...). Embedding, positions,
    head, norms and biases are AdamW's, with its settings."""

    momentum: Fraction = 0.95
    """Share of the average of gradients that a step keeps."""
    nesterov: bool = True
    """Look ahead by the momentum (Nesterov)."""
    adjust_lr: Literal["match_rms_adamw", "original"] = "match_rms_adamw"
    """How the learning rate depends on a matrix [A, B]. ``match_rms_adamw``: times 0.2 sqrt(max(A, B)), so
    that AdamW's rate and decay suit both (Liu 2025, arXiv 2502.16982). ``original``: times sqrt(max(1, A /
    B))."""
    precision: SmallType = "bf16"
    """What orthogonalises, and travels for it: ``bf16``, as torch does, or the type of master weights, fp32
    or fp64."""
    ns_steps: Annotated[int, Field(ge=1, lt=100)] = 5
    """Newton-Schulz iterations."""
    ns_coefficients: Annotated[tuple[float, float, float], Field(strict=False)] = (3.4445, -4.775, 2.0315)
    """Their polynomial's coefficients."""
    eps: Positive = 1e-7
    """A matrix of a smaller norm is not scaled up further."""

    def itemsize(self, precision: Precision) -> int:
        """Bytes of a number of a matrix that is orthogonalised. precision: the model's."""
        return size_in(self.precision, ITEMSIZE[precision])


class SgdSection(Section):
    """Stochastic gradient descent with momentum, as torch.optim.SGD: decay is added to the gradient."""

    momentum: Fraction = 0.9
    """Share of the sum of gradients that a step keeps."""
    nesterov: bool = False
    """Look ahead by the momentum (Nesterov)."""


class TrainSection(Section):
    """Batches, the learning rate, the optimizer, evaluation, checkpoints."""

    steps: Count = 300
    """Optimizer steps of the whole run."""
    tokens: int | float | str = 0
    """Tokens of the whole run in place of ``steps``, as in ``15e12`` or ``"15T"`` (K, M, B, T): so many steps
    as are needed for them. 0: as ``steps`` says."""
    global_batch_size: Count = 8
    """Sequences of one optimizer step, over all ranks."""
    rampup_batch_size: RampupSection | None = None
    """Batch ramp-up: the first steps have less than ``global_batch_size``, as in ``{ start = 16, increment =
    16, samples = 1000000 }``. Micro-batches keep their size, and a small batch has fewer of them. Plans and
    predictions are of a step of the whole batch; rates follow steps."""
    micro_batch_size: OrAuto[Natural] = 1
    """Sequences that one data-parallel replica (of the first pipeline stage) computes at once; the rest of
    the global batch is gradient accumulation. Left out where the planner chooses any key of ``[strategy]``:
    it chooses this one too. 0: the whole global batch at once."""
    learning_rate: Positive = 3e-4
    """The learning rate at its peak."""
    min_learning_rate: NotNegative = 0.0
    """The learning rate at its end."""
    warmup_steps: Natural = 0
    """Steps in which the rate rises from nothing to its peak."""
    lr_decay_style: Literal["constant", "linear", "cosine", "inverse-square-root", "wsd"] = "cosine"
    """After the warm-up. ``constant``: stays at its peak. ``linear``, ``cosine``: falls to
    ``min_learning_rate``. ``inverse-square-root``: falls with the root of the steps, to
    ``min_learning_rate`` at least. ``wsd`` (warm-up, stable, decay): stays at its peak, then falls linearly
    over the last ``lr_wsd_decay_steps``."""
    lr_decay_steps: Natural = 0
    """Steps after which the rate is at its end, so that more ``steps`` need not change the rates before.
    0: ``steps``."""
    lr_wsd_decay_steps: Natural = 0
    """Length of the decay of ``wsd``. 0: a tenth of ``lr_decay_steps``."""
    optimizer: OptimizerName = "adamw"
    """``muon``: of layers' matrices, AdamW of everything else; its settings stand in ``[train.muon]``, those
    of ``sgd`` in ``[train.sgd]``."""
    optimizer_dtype: SmallType = "master"
    """Type of moments and momentum: ``master``, that of master weights, or ``bf16``, half the bytes or
    less. They are rounded after every step."""
    muon: MuonSection = MuonSection()
    """Settings of Muon."""
    sgd: SgdSection = SgdSection()
    """Settings of SGD."""
    weight_decay: NotNegative = 0.1
    """Weight decay of matrices, embedding and head among them; norms and biases do not decay."""
    weight_decay_of: dict[str, NotNegative] = Field(default_factory=dict)
    """Weight decay of tensors whose names match a pattern, such as ``{ "embedding.*" = 0.0, "*.k.weight" =
    0.2 }``; of several that match the last counts. Names are those of checkpoints:
    ``layers.0.attn.q.weight``."""
    adam_betas: Annotated[tuple[Fraction, Fraction], Field(strict=False)] = (0.9, 0.95)
    """AdamW's two decay rates of its moments."""
    adam_eps: Positive = 1e-8
    """AdamW's epsilon."""
    clip_grad: NotNegative = 1.0
    """Gradients are scaled down to this norm. 0: never."""
    precision: Precision = "fp32"
    """Type of parameters and activations. ``bf16-mixed`` keeps weights, gradients and moments in fp32 too.
    ``fp8``, ``mxfp8`` and ``nvfp4``, layers' products in 8 or 4 bit, can be planned and not trained. The type
    in which weights of ``model.huggingface`` are saved does not change it; a note says if it is another."""
    on_nan: OnNan = "stop"
    """What to do when loss or gradients are not finite: ``stop`` ends the run with its last good checkpoint;
    ``skip`` leaves this update out and goes on, up to twenty times in a row; meanwhile nothing is saved."""
    seed: Seed = 0
    """Seed of initial weights and dropout."""
    eval_every: Natural = 100
    """Steps between evaluations. 0: none."""
    eval_batches: Count = 8
    """Batches of ``global_batch_size`` sequences of an evaluation, or fewer where its data have no more."""
    checkpoint_every: Natural = 100
    """Steps between checkpoints. 0: at the end only."""
    keep_checkpoints: Count = 2
    """How many checkpoints stay on disk. 1: the one before stays as well, until the next is begun."""
    keep_every: Natural = 0
    """Checkpoints after a multiple of so many steps stay for ever. 0: none."""
    keep_best: bool = False
    """Whether the checkpoint with the least evaluation loss stays too. ``plait export --step best``
    takes it, of those after whose step there was an evaluation."""
    log_every: Count = 10
    """Steps between printed lines; ``metrics.jsonl`` has every step."""
    init_from: str | None = None
    """A folder to take the initial weights from: Hugging Face's, a run's or one of its checkpoints
    (``runs/NAME/checkpoints/step-00000100``), or a torch.distributed.checkpoint in torchtitan's names."""

    @property
    def batches(self) -> BatchSizes:
        """How many sequences each step has."""
        return BatchSizes.of(self.global_batch_size, self.rampup_batch_size)

    def decay_of(self, name: str, dimensions: int) -> float:
        """Weight decay of a tensor, by its name.

        >>> train = TrainSection(weight_decay_of={"embedding.*": 0.0})
        >>> [train.decay_of(*each) for each in (("embedding.weight", 2), ("head.weight", 2), ("bias", 1))]
        [0.0, 0.1, 0.0]
        """
        matching = [decay for pattern, decay in self.weight_decay_of.items() if fnmatchcase(name, pattern)]
        return matching[-1] if matching else self.weight_decay if dimensions > 1 else 0.0
