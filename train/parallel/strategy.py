"""Parallel strategies: one process, DDP and FSDP2 here, DeepSpeed in `train.parallel.zero`. accelerate's config
chooses.

Each way wraps the module, averages the gradients of the processes, and can gather its state into full tensors and take
it back.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, nullcontext
from typing import Protocol

import torch
from accelerate import Accelerator
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, distribute_tensor

from drafters.base.errors import UserError
from drafters.eagle3_ssd.model import Eagle3Drafter
from drafters.targets.model import whole
from train.objective.objective import Objective
from train.parallel.launch import agreed
from train.trainer.state import MOMENTS, Saved, TrainingState


class ParallelStrategy(Protocol):
    """One way. Methods marked collective are called by all processes at the same time."""

    module: nn.Module  # called with what `Objective.forward` takes

    def forward_of(self, is_last: bool) -> AbstractContextManager[None]:
        """Around forward and backward of one part of a step; gradients need not be exchanged before the last part."""
        ...

    def backward(self, loss: Tensor, is_last: bool) -> None:
        """Add the gradient of `loss`, averaged over the processes once the last part is done. Collective."""
        ...

    def update(self, lr: float) -> float:
        """One optimizer step after the last `backward`; returns the gradient's norm before clipping. Collective."""
        ...

    def state(self) -> TrainingState | None:
        """Full tensors in the first process, None in the others. Collective."""
        ...

    def restore(self, state: TrainingState) -> None:
        """Take back the moments of a state; the weights were loaded before wrapping."""
        ...

    def whole_drafter(self) -> Eagle3Drafter | None:
        """The drafter with full weights in the first process, to measure or write; None in the others. Collective."""
        ...


class TorchStrategy:
    """One process, DDP or FSDP2: an ordinary optimizer over parameters that are whole or DTensors."""

    def __init__(
        self, accelerator: Accelerator, objective: Objective, optimizer: torch.optim.Optimizer, clip_norm: float
    ) -> None:
        self.accelerator, self.objective, self.clip_norm = accelerator, objective, clip_norm
        self.module, self.optimizer = accelerator.prepare(objective, optimizer)

    def forward_of(self, is_last: bool) -> AbstractContextManager[None]:
        """See `ParallelStrategy`."""
        return nullcontext() if is_last else self.accelerator.no_sync(self.module)

    def backward(self, loss: Tensor, is_last: bool) -> None:
        """See `ParallelStrategy`."""
        del is_last
        loss.backward()

    def update(self, lr: float) -> float:
        """See `ParallelStrategy`."""
        for group in self.optimizer.param_groups:
            group["lr"] = lr
        norm = whole(torch.nn.utils.clip_grad_norm_([p for _, p in self._trained()], self.clip_norm))
        check_finite(float(norm))
        self.optimizer.step()
        self.optimizer.zero_grad()
        return float(norm)

    def state(self) -> TrainingState | None:
        """See `ParallelStrategy`."""
        weights, updates = {}, 0
        moments: dict[str, dict[str, Tensor]] = {moment: {} for moment in MOMENTS}
        for name, parameter in self._trained():
            own = self.optimizer.state[parameter]
            weights[name] = whole(parameter.detach()).cpu()
            for moment in MOMENTS:
                moments[moment][name] = whole(own[moment]).cpu()
            updates = int(own["step"])
        return TrainingState(weights, moments, updates) if self.accelerator.is_main_process else None

    def restore(self, state: TrainingState) -> None:
        """See `ParallelStrategy`."""
        for name, parameter in self._trained():
            own = {moment: like(state.moments[moment][name], parameter) for moment in MOMENTS}
            step = torch.tensor(float(state.updates), device=own[MOMENTS[0]].device)
            self.optimizer.state[parameter] = {"step": step, **own}

    def whole_drafter(self) -> Eagle3Drafter | None:
        """See `ParallelStrategy`."""
        drafter = self.objective.drafter
        if not any(isinstance(parameter, DTensor) for parameter in drafter.parameters()):
            return drafter if self.accelerator.is_main_process else None
        weights = {name: whole(tensor.detach()) for name, tensor in drafter.state_dict().items()}
        return drafter_of(drafter, weights) if self.accelerator.is_main_process else None

    def _trained(self) -> Iterator[tuple[str, nn.Parameter]]:
        return ((name, p) for name, p in self.objective.drafter.named_parameters() if p.requires_grad)


def like(content: Tensor, parameter: Tensor) -> Tensor:
    """`content`, known to every process, laid out as `parameter` is."""
    moved = content.to(parameter.device)
    if not isinstance(parameter, DTensor):
        return moved
    return distribute_tensor(moved, parameter.device_mesh, parameter.placements, src_data_rank=None)


def drafter_of(drafter: Eagle3Drafter, weights: dict[str, Tensor]) -> Eagle3Drafter:
    """A plain drafter of the same shape with these weights."""
    with torch.device("meta"):
        plain = Eagle3Drafter(drafter.config)
    plain.load_state_dict(weights, strict=True, assign=True)
    return plain


def check_finite(norm: float) -> None:
    """Stop before a gradient that is no number reaches the weights."""
    if not math.isfinite(norm):
        raise UserError(
            f"the gradient's norm is {norm}: training has diverged and the weights were not changed; "
            "lower optimizer.lr (or lengthen optimizer.warmup_steps) and run again: "
            "it goes on from the last saved state"
        )


def load_weights(drafter: Eagle3Drafter, state: TrainingState) -> None:
    """Put a state's weights into a drafter that is not wrapped yet."""
    trained = {name for name, parameter in drafter.named_parameters() if parameter.requires_grad}
    assert trained == state.weights.keys(), trained ^ state.weights.keys()
    drafter.load_state_dict(state.weights, strict=False)  # frozen embeddings are the target's


def share(saved: Saved | None, accelerator: Accelerator) -> Saved | None:
    """What the first process has read, in all: they may see other disks. Collective."""
    if accelerator.num_processes == 1:
        return saved
    layout = agreed(
        None if saved is None else saved._replace(state=on_each(saved.state, lambda tensor: tensor.to("meta")))
    )
    if layout is None:
        return None

    def sent(tensor: Tensor) -> Tensor:
        here = torch.empty_like(tensor, device=accelerator.device) if tensor.is_meta else tensor.to(accelerator.device)
        torch.distributed.broadcast(here, src=0)
        return here.cpu()

    return layout._replace(state=on_each((saved or layout).state, sent))


def on_each(state: TrainingState, change: Callable[[Tensor], Tensor]) -> TrainingState:
    """`change` applied to every tensor of a state, in one order everywhere."""
    weights = {name: change(tensor) for name, tensor in state.weights.items()}
    moments = {
        moment: {name: change(tensor) for name, tensor in by_name.items()} for moment, by_name in state.moments.items()
    }
    return TrainingState(weights, moments, state.updates)
