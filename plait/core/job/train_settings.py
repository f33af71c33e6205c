"""The section ``[train]`` of a job file: batches, learning rate, optimizer, checkpoints."""

from __future__ import annotations

from fnmatch import fnmatchcase
from typing import Annotated, Literal

from pydantic import Field

from plait.core.base.codec.data import Count, Natural, NotNegative, OrAuto, Positive, Section
from plait.core.job.data_settings import Fraction, Seed
from plait.core.job.rampup import BatchSizes, RampupSection
from plait.core.model.precision import ITEMSIZE, Precision, SmallType, size_in
from plait.core.parallel.sharding import OptimizerName

OnNan = Literal["stop", "skip"]


class MuonSection(Section):
    """Muon (Jordan 2024, https://kellerjordan.github.io/posts/muon/), as in torch.optim.Muon: it
    updates the matrices of layers, each as a matrix of its own (queries, keys, values, gate, up,
    ...). AdamW updates embedding, positions, head, norms and biases, with AdamW's settings."""

    momentum: Fraction = 0.95
    """Decay rate of the running average of gradients: the share that a step keeps."""
    nesterov: bool = True
    """Look ahead by the momentum (Nesterov)."""
    adjust_lr: Literal["match_rms_adamw", "original"] = "match_rms_adamw"
    """Scale of the learning rate for a matrix [A, B]. ``match_rms_adamw``: 0.2 sqrt(max(A, B)), so
    that AdamW's learning rate and weight decay suit both optimizers (Liu 2025, arXiv 2502.16982).
    ``original``: sqrt(max(1, A / B))."""
    precision: SmallType = "bf16"
    """Type in which matrices are orthogonalised and sent for it. ``bf16``: as torch does.
    ``master``: the type of master weights, fp32 or fp64."""
    ns_steps: Annotated[int, Field(ge=1, lt=100)] = 5
    """Newton-Schulz iterations."""
    ns_coefficients: Annotated[tuple[float, float, float], Field(strict=False)] = (3.4445, -4.775, 2.0315)
    """Coefficients of the polynomial of a Newton-Schulz iteration."""
    eps: Positive = 1e-7
    """Least norm by which a matrix is divided: a matrix of a smaller norm is not scaled up
    further."""

    def itemsize(self, precision: Precision) -> int:
        """Return the bytes of one element of a matrix that is orthogonalised. precision: the
        model's."""
        return size_in(self.precision, ITEMSIZE[precision])


class SgdSection(Section):
    """Stochastic gradient descent with momentum, as in torch.optim.SGD: weight decay is added to
    the gradient."""

    momentum: Fraction = 0.9
    """Decay rate of the running sum of gradients: the share that a step keeps."""
    nesterov: bool = False
    """Look ahead by the momentum (Nesterov)."""


class TrainSection(Section):
    """Batches, the learning rate, the optimizer, evaluation, checkpoints."""

    steps: Count = 300
    """Optimizer steps of the whole run."""
    tokens: int | float | str = 0
    """Tokens of the whole run in place of ``steps``, as in ``15e12`` or ``"15T"`` (K, M, B, T): the
    run has as many steps as these tokens need. 0: ``steps`` counts."""
    global_batch_size: Count = 8
    """Sequences of one optimizer step, over all ranks."""
    rampup_batch_size: RampupSection | None = None
    """Batch ramp-up: the first steps have fewer sequences than ``global_batch_size``, as in ``{
    start = 16, increment = 16, samples = 1000000 }``. Micro-batches keep their size, so a small
    batch has fewer micro-batches. Plans and predictions are for a step of the whole batch; learning
    rates follow steps."""
    micro_batch_size: OrAuto[Natural] = 1
    """Sequences of one micro-batch of one data-parallel replica (of the first pipeline stage); the
    other sequences of the global batch are accumulated. Left out where the planner chooses any key
    of ``[strategy]``: the planner chooses this key too. 0: the whole global batch at once."""
    learning_rate: Positive = 3e-4
    """Peak learning rate."""
    min_learning_rate: NotNegative = 0.0
    """Final learning rate."""
    warmup_steps: Natural = 0
    """Steps in which the learning rate rises from zero to its peak."""
    lr_decay_style: Literal["constant", "linear", "cosine", "inverse-square-root", "wsd"] = "cosine"
    """Learning rate after the warm-up. ``constant``: stays at its peak. ``linear``, ``cosine``:
    falls to ``min_learning_rate``. ``inverse-square-root``: falls with the square root of the
    steps, down to ``min_learning_rate`` at least. ``wsd`` (warm-up, stable, decay): stays at its
    peak, then falls linearly over the last ``lr_wsd_decay_steps``."""
    lr_decay_steps: Natural = 0
    """Steps after which the learning rate has its final value: with a number here, more ``steps``
    do not change the earlier learning rates. 0: ``steps``."""
    lr_wsd_decay_steps: Natural = 0
    """Steps of the decay phase of ``wsd``. 0: a tenth of ``lr_decay_steps``."""
    optimizer: OptimizerName = "adamw"
    """``muon``: Muon for the matrices of layers, AdamW for everything else. Settings of ``muon``
    are in ``[train.muon]``, settings of ``sgd`` in ``[train.sgd]``."""
    optimizer_dtype: SmallType = "master"
    """Type of optimizer moments and momentum, which are rounded after every step. ``master``: the
    type of master weights. ``bf16``: half the bytes or less."""
    muon: MuonSection = MuonSection()
    """Settings of Muon."""
    sgd: SgdSection = SgdSection()
    """Settings of SGD."""
    weight_decay: NotNegative = 0.1
    """Weight decay of matrices, embedding and head included; norms and biases do not decay."""
    weight_decay_of: dict[str, NotNegative] = Field(default_factory=dict)
    """Weight decay of tensors whose names match a pattern, such as ``{ "embedding.*" = 0.0,
    "*.k.weight" =
    0.2 }``; if several patterns match, the last counts. Names are those of checkpoints:
    ``layers.0.attn.q.weight``."""
    adam_betas: Annotated[tuple[Fraction, Fraction], Field(strict=False)] = (0.9, 0.95)
    """AdamW's decay rates of the first and the second moment."""
    adam_eps: Positive = 1e-8
    """AdamW's epsilon."""
    clip_grad: NotNegative = 1.0
    """Largest norm of the gradients: larger gradients are scaled down to it. 0: no clipping."""
    precision: Precision = "fp32"
    """Type of parameters and activations. ``bf16-mixed`` also keeps weights, gradients and moments
    in fp32. ``fp8``, ``mxfp8`` and ``nvfp4`` (matrix products of layers in 8 or 4 bit) can be
    planned and not trained. The type of the weights saved with ``model.huggingface`` does not
    change this key; a note reports a different type."""
    on_nan: OnNan = "stop"
    """Reaction to a loss or gradients that are not finite. ``stop``: end the run with its last good
    checkpoint. ``skip``: skip this update and go on, up to twenty times in a row; meanwhile nothing
    is saved."""
    seed: Seed = 0
    """Seed of initial weights and dropout."""
    eval_every: Natural = 100
    """Steps between evaluations. 0: none."""
    eval_batches: Count = 8
    """Batches of one evaluation, of ``global_batch_size`` sequences each; fewer if the evaluation
    data have no more."""
    checkpoint_every: Natural = 100
    """Steps between checkpoints. 0: one at the end only."""
    keep_checkpoints: Count = 2
    """Checkpoints that stay on disk. 1: the previous one also stays until the next is begun."""
    keep_every: Natural = 0
    """Checkpoints of steps that are a multiple of this number are never deleted. 0: none."""
    keep_best: bool = False
    """Also keep the checkpoint with the least evaluation loss. ``plait export --step best`` takes
    it, among checkpoints after whose step there was an evaluation."""
    log_every: Count = 10
    """Steps between printed lines; ``metrics.jsonl`` has every step."""
    init_from: str | None = None
    """Folder from which the initial weights are read: a Hugging Face model, a run, a checkpoint of
    a run (``runs/NAME/checkpoints/step-00000100``), or a torch.distributed.checkpoint with Hugging
    Face's names."""

    @property
    def batches(self) -> BatchSizes:
        """Number of sequences of each step."""
        return BatchSizes.of(self.global_batch_size, self.rampup_batch_size)

    def decay_of(self, name: str, dimensions: int) -> float:
        """Return the weight decay of the tensor ``name``. dimensions: the tensor's number of
        dimensions.

        >>> train = TrainSection(weight_decay_of={"embedding.*": 0.0})
        >>> [train.decay_of(*each) for each in (("embedding.weight", 2), ("head.weight", 2), ("bias", 1))]
        [0.0, 0.1, 0.0]
        """
        matching = [decay for pattern, decay in self.weight_decay_of.items() if fnmatchcase(name, pattern)]
        return matching[-1] if matching else self.weight_decay if dimensions > 1 else 0.0
