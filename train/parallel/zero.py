"""DeepSpeed's ZeRO stages 1 to 3 as a parallel strategy (`train.parallel.strategy`).

The engine clips, steps and clears gradients itself. It divides gradients by the number of processes and by its own
accumulation count; the count is kept at 1 and parts of a step are told apart by the boundary flag, so what arrives is
the plain average.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import deepspeed
import torch
from accelerate import Accelerator
from deepspeed.utils import (
    safe_get_full_optimizer_state,
    safe_set_full_optimizer_state,
    safe_set_local_optimizer_state,
)
from deepspeed.utils.mixed_precision_linkage import lazy_init_hp_params_optimizer_state
from torch import Tensor, nn
from torch.nn import functional as F

from drafters.base.errors import UserError
from drafters.eagle3_ssd.model import Eagle3Drafter
from train.objective.objective import Objective
from train.parallel.strategy import check_finite, drafter_of
from train.trainer.state import MOMENTS, TrainingState

KEEP_ALL = 10**12  # parameters


def configure(accelerator: Accelerator, rows_per_forward: int, clip_norm: float) -> None:
    """Write what the recipe decides into DeepSpeed's configuration, and refuse what would contradict it."""
    plugin: Any = accelerator.state.deepspeed_plugin
    config: dict[str, Any] = plugin.deepspeed_config
    for name in ("fp16", "bf16"):
        if config.get(name, {}).get("enabled") is True:
            raise UserError(
                f"DeepSpeed's {name}.enabled is true, but master weights are fp32: remove it, "
                "the recipe's dtype sets the forward's"
            )
    for part in ("offload_optimizer", "offload_param"):
        device = config["zero_optimization"].get(part, {}).get("device") or "none"
        if device != "none":
            raise UserError(
                f"DeepSpeed's {part}.device = {device!r} is not supported: sharded, a drafter fits the devices; "
                "use none"
            )
    if (
        config["zero_optimization"]["stage"] == 3
    ):  # every depth uses all weights: keep what was gathered, do not fetch it for each
        config["zero_optimization"].update(stage3_max_live_parameters=KEEP_ALL, stage3_max_reuse_distance=KEEP_ALL)
    config.update(
        train_micro_batch_size_per_gpu=rows_per_forward,
        gradient_accumulation_steps=1,
        train_batch_size=rows_per_forward * accelerator.num_processes,
        gradient_clipping=clip_norm,
    )


class ZeroStrategy:
    """ZeRO stage 1, 2 or 3."""

    def __init__(self, accelerator: Accelerator, objective: Objective, optimizer: torch.optim.Optimizer) -> None:
        self.accelerator, self.objective = accelerator, objective
        self.module, _ = accelerator.prepare(objective, optimizer)
        self.stage = int(self.module.zero_optimization_stage())
        self.zero: Any = self.module.optimizer

    def forward_of(self, is_last: bool) -> AbstractContextManager[None]:
        """See `train.parallel.strategy.ParallelStrategy`."""
        del is_last
        return nullcontext()

    def backward(self, loss: Tensor, is_last: bool) -> None:
        """See `train.parallel.strategy.ParallelStrategy`."""
        self.module.set_gradient_accumulation_boundary(is_boundary=is_last)
        self.module.backward(loss)

    def update(self, lr: float) -> float:
        """See `train.parallel.strategy.ParallelStrategy`."""
        for group in self.zero.param_groups:
            group["lr"] = lr
        self.module.step()
        norm = float(self.module.get_global_grad_norm())
        check_finite(norm)
        return norm

    def state(self) -> TrainingState | None:
        """See `train.parallel.strategy.ParallelStrategy`."""
        self._link()
        weights: dict[str, Tensor] = {}
        moments: dict[str, dict[str, Tensor]] = {moment: {} for moment in MOMENTS}
        for name, parameter in self._trained():
            weights[name] = self._whole(parameter)
            for moment in MOMENTS:
                found: Any = safe_get_full_optimizer_state(parameter, moment)
                moments[moment][name] = found.cpu().view(weights[name].shape)
        updates = int(self.zero.optimizer.state[self._parts()[0]]["step"])
        return TrainingState(weights, moments, updates) if self.accelerator.is_main_process else None

    def restore(self, state: TrainingState) -> None:
        """See `train.parallel.strategy.ParallelStrategy`."""
        for part in self._parts():
            own = {moment: torch.zeros_like(part) for moment in MOMENTS}
            self.zero.optimizer.state[part] = {"step": torch.tensor(float(state.updates), device=part.device), **own}
        self._link()
        for name, parameter in self._trained():
            for moment in MOMENTS:
                self._set(parameter, state.moments[moment][name], moment)

    def whole_drafter(self) -> Eagle3Drafter | None:
        """See `train.parallel.strategy.ParallelStrategy`."""
        drafter = self.objective.drafter
        if self.stage < 3:
            return drafter if self.accelerator.is_main_process else None
        weights = {name: self._whole(parameter) for name, parameter in drafter.named_parameters()}
        return drafter_of(drafter, weights) if self.accelerator.is_main_process else None

    def _trained(self) -> Iterator[tuple[str, nn.Parameter]]:
        return ((name, p) for name, p in self.objective.drafter.named_parameters() if p.requires_grad)

    def _parts(self) -> list[Tensor]:
        """The flat fp32 pieces that this process's optimizer works on."""
        return self.zero.fp32_partitioned_groups_flat if self.stage == 3 else self.zero.single_partition_of_fp32_groups

    def _link(self) -> None:
        """Let stages 1 and 2 find each parameter's part of the flat moments: DeepSpeed does it for the first group
        only.
        """
        if self.stage < 3:
            for group, part in zip(self.zero.bit16_groups, self._parts(), strict=True):
                lazy_init_hp_params_optimizer_state(group, part, self.zero.optimizer.state)

    def _whole(self, parameter: nn.Parameter) -> Tensor:
        with deepspeed.zero.GatheredParameters([parameter], enabled=self.stage == 3):
            return parameter.detach().to("cpu", copy=True)

    def _set(self, parameter: nn.Parameter, whole: Tensor, moment: str) -> None:
        if self.stage < 3:
            safe_set_full_optimizer_state(parameter, whole.to(parameter.device), moment)
            return
        size = parameter.ds_tensor.numel()  # type: ignore[attr-defined]  # the same in every process, the last ones are padded
        flat = F.pad(whole.flatten(), (0, size * self.accelerator.num_processes - whole.numel()))
        mine = flat.narrow(0, size * self.accelerator.process_index, size)
        safe_set_local_optimizer_state(parameter, mine.to(parameter.device), moment)
