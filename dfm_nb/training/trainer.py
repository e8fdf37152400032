"""Model, optimizer and schedule of one rank: a training step, and the loss on validation packs.

The loss is the mean over the tokens of the whole global batch in every layout. A step with NaN or Inf changes no
weights; validation changes nothing and uses no random numbers.
"""

import contextlib
import math
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, fields
from typing import Any

import torch
import torch.distributed as dist
from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig, finalize_model_grads
from megatron.core.pipeline_parallel import get_forward_backward_func

from dfm_nb import config as cfg
from dfm_nb import parallel
from dfm_nb.base.log import log, tqdm, warn_once
from dfm_nb.checkpoints import saving
from dfm_nb.checkpoints.loading import Weights
from dfm_nb.diffusion.objective import get_objective
from dfm_nb.model.build import build_chunks, why_eager
from dfm_nb.model.denoiser import PackInputs, TokenLosses, forward, run
from dfm_nb.model.ema import PowerEMA
from dfm_nb.packs.packs import Pack
from dfm_nb.parallel.groups import mpu
from dfm_nb.training.distillation import Teacher
from dfm_nb.training.muon import Muon, matrices_of
from dfm_nb.training.step_graph import StepGraph

LONG_S = 10.0
"""A step that takes longer gets a bar of its packs on a terminal."""


@dataclass
class StepResult:
    """Result of one optimizer step, over all ranks.

    loss : mean per token. tokens : that have a loss. skipped : NaN or Inf, or no token at all (loss is
    NaN then), so the weights stayed as they were.
    """

    loss: float
    tokens: int
    grad_norm: float
    skipped: bool


def _loss_and_count(losses: TokenLosses) -> torch.Tensor:
    """[sum of a pack's token losses, tokens that count]."""
    return torch.stack(((losses.loss * losses.mask).sum(), losses.mask.sum().float()))


def no_bars() -> bool:
    """Whether this process shows no progress bars: rank 0 alone does, on a terminal."""
    return parallel.rank() != 0 or not sys.stderr.isatty()


class Trainer:
    """Model, optimizer and schedule of one rank, which write no file.

    Parameters
    ----------
    config : resolved configuration with `model.in_channels`, `model.text_dim` and `model.sigma_data` set.
    empty_text : [L, D], needed by the teacher of a student.
    teacher : its `source` and `guidance`, where they are known; else it is found at `checkpoint.pretrained`.
    """

    def __init__(
        self,
        config: cfg.Config,
        empty_text: torch.Tensor | None = None,
        teacher: tuple[Weights | None, float | None] = (None, None),
    ):
        self.config = config
        self.device = parallel.device()
        self.objective = get_objective(config.model.objective, config.model.sigma_data)
        self.dp_rank = mpu.get_data_parallel_rank()
        self.dp_size = mpu.get_data_parallel_world_size()
        self.model_config, self.chunks = build_chunks(config.model, config.mixed_precision, config.rng.seed)
        self.model_config.finalize_model_grads_func = self._finish_gradients
        # Parameters are not gathered late (overlap_param_gather): the averages and validation read them after the step.
        ddp_config = DistributedDataParallelConfig(
            grad_reduce_in_fp32=True,
            use_distributed_optimizer=config.optimizer.use_distributed_optimizer,
            overlap_grad_reduce=self.dp_size > 1 and self.device.type == "cuda",
        )
        self.ddp = [
            # Buckets let communication overlap with the backward pass. Later chunks finish theirs before the first one
            # does, so their communication overlaps with it even in one piece (Megatron-LM's training does the same).
            DistributedDataParallel(self.model_config, ddp_config, c, disable_bucketing=i > 0)
            for i, c in enumerate(self.chunks)
        ]
        # megatron-core adds each gradient to its float32 buffer by a hook: 551 operations and Python calls a pack for
        # DiT-XL. Where nothing overlaps with the backward pass, `_add_gradients` does all at once.
        self.trained: list[Any] = []
        whole = config.model.pipeline_model_parallel_size == config.model.tensor_model_parallel_size == 1
        if whole and not (ddp_config.overlap_grad_reduce or ddp_config.use_distributed_optimizer):
            self.trained = self.ddp[0].params_with_grad
            self.ddp[0].grad_accs.clear()  # the hooks live no longer than these
        self.first_pack = True
        self.graph: StepGraph | None = None
        self.why_no_graph = self._why_no_graph()
        if config.model.cuda_graph and self.why_no_graph and parallel.rank() == 0:
            log.warning("model.cuda_graph is not used, because %s", self.why_no_graph)
        sync = [d.no_sync for d in self.ddp]
        self.model_config.no_sync_func = sync if len(sync) > 1 else sync[0]
        self._compile_layers()
        self.optimizer = self._build_optimizer()
        self.scheduler = self._build_scheduler()
        self.ema = PowerEMA(self.chunks, config.ema.sigma_rels)
        self.run_schedule = get_forward_backward_func()
        self.steps_taken = 0  # optimizer steps that changed the weights
        self.teacher: Teacher | None = None
        if config.model.student:
            self.teacher = Teacher(config, self.chunks, self.objective, empty_text, *teacher)

    def _compile_layers(self) -> None:
        """As `model.compile` says: one compiled function for all layers."""
        wanted = self.config.model.compile
        eager = why_eager(self.config.model, self.device)
        if wanted and eager:
            raise ValueError(f"model.compile=true is not possible, because {eager}; leave it out")
        if wanted is None and eager and self.device.type == "cuda" and parallel.rank() == 0:
            log.info("The layers are not compiled, because %s", eager)
        if wanted is False or eager:
            return
        # what cannot be compiled on this machine runs as it is, with a warning
        torch._dynamo.config.suppress_errors = True
        layers = self.chunks[0].decoder.layers
        compiled = torch.compile(type(layers[0]).inner)
        for layer in layers:
            layer.compiled = compiled

    def _build_optimizer(self):
        """megatron-core's, which keeps float32 copies; with `optimizer=muon` our Muon replaces its inner AdamW."""
        from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer

        from dfm_nb.parallel.megatron_cpu import cuda_type_names, spare_dynamo

        spare_dynamo()
        o = self.config.optimizer
        own = {"optimizer": "adam", "bf16": self.config.mixed_precision == "bf16"}
        shared = {f.name for f in fields(OptimizerConfig)} & dict(o).keys()  # names that both have
        settings = OptimizerConfig(
            **{name: getattr(o, name) for name in shared} | own, params_dtype=self.model_config.params_dtype
        )
        parameters = [p for chunk in self.ddp for p in chunk.parameters()]
        with contextlib.nullcontext() if self.device.type == "cuda" else cuda_type_names(parameters):
            optimizer = get_megatron_optimizer(settings, self.ddp)
        matrices = matrices_of(self.chunks) if o.optimizer == "muon" else {}
        for part in optimizer.chained_optimizers:
            for group in part.optimizer.param_groups:
                group["fused"] = True  # one kernel per step instead of ten
                group["foreach"] = False
            if matrices:  # none with LoRA, where the matrices are frozen
                part.optimizer = Muon(part.optimizer.param_groups, matrices, o, self.model_config.params_dtype)
        return optimizer

    def _build_scheduler(self):
        from megatron.core.optimizer_param_scheduler import OptimizerParamScheduler

        o = self.config.optimizer
        s = self.config.scheduler
        decay = s.lr_decay_iters or self.config.train.train_iters
        return OptimizerParamScheduler(
            self.optimizer,
            init_lr=0.0,
            max_lr=o.lr,
            min_lr=o.min_lr,
            lr_warmup_steps=min(s.lr_warmup_iters or 0, decay - 1),
            lr_decay_steps=decay,
            lr_decay_style=s.lr_decay_style,
            start_wd=o.weight_decay,
            end_wd=o.weight_decay,
            wd_incr_steps=decay,
            wd_incr_style="constant",
            # after a resume, the current settings apply, not the checkpoint's
            use_checkpoint_opt_param_scheduler=False,
            override_opt_param_scheduler=True,
        )

    @property
    def lr(self) -> float:
        """Learning rate as the schedule has it now."""
        return self.optimizer.param_groups[0]["lr"]

    def pieces(self) -> saving.Pieces:
        """This object's part of a checkpoint."""
        return saving.Pieces(self.chunks, self.optimizer, self.scheduler, self.ema)

    def _sums(
        self, packs: list[Pack], sums_of: Callable[[Pack, TokenLosses], torch.Tensor], width: int, forward_only: bool
    ) -> torch.Tensor:
        """Run the network on this rank's packs and add up `sums_of` over the packs of all ranks.

        Returns float64 [width], the same on every rank.
        """

        # the signature that megatron-core's schedules require
        def forward_step(packs: Iterator[Pack], model):
            self._add_gradients()  # of the pack before
            pack = next(packs)
            output, loss_of = forward(model, pack, self.objective, self.device)

            def loss_function(network_output):
                losses = loss_of(network_output)
                total = (losses.loss * losses.weight).sum()
                return total, losses.mask.sum().int(), {"sum": sums_of(pack, losses)}

            return output, loss_function

        with tqdm(packs, "packs", leave=False, unit="pack", delay=LONG_S, disable=no_bars()) as bar:
            iterators = [iter(bar), *(iter(packs) for _ in self.ddp[1:])]
            outputs = self.run_schedule(
                forward_step_func=forward_step,
                data_iterator=iterators if len(iterators) > 1 else iterators[0],
                model=self.ddp if len(self.ddp) > 1 else self.ddp[0],
                num_microbatches=len(packs),
                seq_length=len(packs[0].x0),
                micro_batch_size=1,
                forward_only=forward_only,
            )
        total = torch.zeros(width, dtype=torch.float64, device=self.device)
        for out in outputs:  # only the last pipeline stage has any
            total += out["sum"]
        # all ranks take part
        dist.all_reduce(total, group=mpu.get_data_parallel_group(with_context_parallel=True))
        return parallel.broadcast_from_last_stage(total)

    def backward(self, packs: list[Pack]) -> torch.Tensor:
        """Gradients of the mean loss per token over all ranks' packs; returns float64 [loss sum, tokens]."""
        for chunk in self.ddp:
            chunk.zero_grad_buffer()
        self.optimizer.zero_grad()
        self.first_pack = True
        if self.config.model.cuda_graph and not self.why_no_graph:
            backend = self.model_config.packed_attention_backend
            return self._backward_by_graph([PackInputs.of(pack, self.device, backend) for pack in packs])

        def loss_and_count(_pack: Pack, losses: TokenLosses) -> torch.Tensor:
            return _loss_and_count(losses).detach()

        return self._sums(self.lessons(packs), loss_and_count, 2, forward_only=False)

    def _why_no_graph(self) -> str | None:
        """Why a step's forward and backward cannot be one CUDA graph; None if they can."""
        if self.config.model.student:
            return "a student's teacher samples in each step"
        if self.dp_size > 1:
            return f"there are {self.dp_size} data-parallel processes"
        if not self.trained:
            return "optimizer.use_distributed_optimizer is true"
        return why_eager(self.config.model, self.device)

    def _backward_by_graph(self, packs: list[PackInputs]) -> torch.Tensor:
        """`backward` without megatron-core's schedule; packs that do not fit the graph run one by one, as it does."""
        if self.graph is None:
            self.graph = StepGraph(self._backward_packs, packs)
        sums = self.graph(packs)
        if sums is None:
            warn_once("the packs of some steps do not fit the CUDA graph and run without it")
            sums = self._backward_packs(packs)
        self._finish_gradients(self.ddp, sums[1].int())
        return sums

    def _backward_packs(self, packs: Sequence[PackInputs]) -> torch.Tensor:
        """Gradients of the summed loss of this rank's packs; float64 [loss sum, tokens]."""
        self.first_pack = True
        sums = torch.zeros(2, dtype=torch.float64, device=self.device)
        for pack in packs:
            output, loss_of = run(self.ddp[0], pack, self.objective)
            losses = loss_of(output)
            (losses.loss * losses.weight).sum().backward()
            self._add_gradients()
            sums = sums + _loss_and_count(losses).detach()
        return sums

    @torch.no_grad()
    def _add_gradients(self) -> None:
        """Add a pack's gradients to the float32 buffers; nothing where megatron-core's hooks have done so.

        After each pack, because several packs' sum in bfloat16 would lose small gradients.
        """
        used = [p for p in self.trained if p.grad is not None]
        if not used:
            return
        mains = [p.main_grad for p in used]
        grads = [p.grad for p in used]
        if self.first_pack:
            torch._foreach_copy_(mains, grads)  # one kernel, also from bfloat16 to float32
        else:
            torch._foreach_add_(mains, grads)
        self.first_pack = False
        for p in used:
            p.grad = None

    def _finish_gradients(self, chunks: list[Any], num_tokens: torch.Tensor, **kwargs) -> None:
        """megatron-core's function, which (in 0.16) would wait for the number of tokens. All ranks take part."""
        self._add_gradients()
        finalize_model_grads(chunks, None, **kwargs)
        parallel.broadcast_from_last_stage(num_tokens)
        dist.all_reduce(num_tokens, group=mpu.get_data_parallel_group(with_context_parallel=True))
        for chunk in chunks:
            chunk.scale_gradients(1.0 / num_tokens.clamp(min=1))

    def lessons(self, packs: list[Pack]) -> list[Pack]:
        """A few-step student's packs, one for each of its levels; without a teacher `packs` themselves."""
        if self.teacher is None:
            return packs
        lessons = []
        for pack in packs:
            lessons += self.teacher.lessons(pack)
        return lessons

    def step(self, packs: list[Pack]) -> StepResult:
        """One optimizer step on this rank's packs; with NaN or Inf, or without a sample, the weights are unchanged.

        A training step from the beginning:

        1. `loop.Training.step` takes this rank's packs from the loader. A pack is one sequence of many samples, whose
           sigma and noise were drawn from (seed, epoch, key) when it was built.
        2. `backward` gives the packs to megatron-core's schedule, which calls `forward_step` (in `_sums`) for each and
           interleaves them over pipeline stages.
        3. `denoiser.forward` adds the noise, scales the input, and runs the network on this rank's tokens of the pack.
        4. The schedule calls `loss_function` on the last stage. It returns the *sum* of the token losses and the number
           of tokens. Both are added over packs and ranks, and `_finish_gradients` divides the gradients by the number,
           so the loss is the mean over the tokens of the global batch in every layout. Gradients are those of the same
           mean with `Pack.weight` (`train.first_frame_share`).
        5. Gradients are reduced in float32. Whether they and the loss are finite is settled on the device, and equally
           on all ranks, because the norm and the loss are sums over all of them.
        6. AdamW or Muon on float32 weights divides by what clips, changes nothing if something is not finite, and is
           copied to the bfloat16 weights. Only now the host reads loss and norm; the averages follow if all was finite.
        7. The learning rate is updated, and the caller reports, validates and saves.
        """
        sums = self.backward(packs)
        self.optimizer.prepare_grads()
        norm = torch.as_tensor(self.optimizer.get_grad_norm(), device=self.device)
        # on the device, so that the host launches the optimizer without waiting for the gradients
        finite = torch.isfinite(sums[0]) & torch.isfinite(norm) & (sums[1] > 0)
        clip = self.config.optimizer.clip_grad
        for part in self.optimizer.chained_optimizers:
            part.optimizer.found_inf = (~finite).float()  # its step then changes neither weights nor moments
            part.optimizer.grad_scale = ((norm + 1e-6) / clip).clamp(min=1) if clip > 0 else None  # it divides by it
        self.optimizer.step_with_ready_grads()
        loss_sum, tokens, grad_norm = torch.cat((sums, norm[None])).tolist()  # the only wait of a step
        loss = loss_sum / tokens if tokens else math.nan
        skipped = not (math.isfinite(grad_norm) and math.isfinite(loss))
        if not skipped:
            self.steps_taken += 1
            self.ema.update(self.steps_taken)
        # Also after a skipped step, unlike in Megatron-LM: the schedule counts iterations, as `train.train_iters` does,
        # so it ends with the run. The averages count steps that changed the weights: a repeated value weighs double.
        self.scheduler.step(increment=1)
        return StepResult(loss, int(tokens), grad_norm, skipped)

    @torch.no_grad()
    def evaluate(self, packs: list[Pack], sigmas: torch.Tensor) -> dict[str, object]:
        """The objective's loss at fixed noise levels with fixed noise: the mean, and one mean per level.

        packs : this rank's validation packs, whose `sigma` are among the noise levels `sigmas` (float32 [levels]).
        """
        levels = sigmas.to(self.device)[:, None]

        def by_level(pack: Pack, losses: TokenLosses) -> torch.Tensor:
            one_hot = (pack.sigma.to(self.device)[losses.row] == levels) & losses.mask  # [levels, S]
            return torch.cat((one_hot.float() @ losses.loss, one_hot.float().sum(1)))

        loss, count = self._sums(packs, by_level, 2 * len(sigmas), forward_only=True).cpu().chunk(2)
        if not count.any():
            raise ValueError("no validation sample can be used; dfm inspect --verify lists their faults")
        by_sigma = [(a / b).item() if b else None for a, b in zip(loss, count)]
        return {"loss": (loss.sum() / count.sum()).item(), "by_sigma": by_sigma}
