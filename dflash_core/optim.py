"""The optimiser and its schedule: float32 weights, and a bfloat16 copy of them to compute with.

A bfloat16 weight near 1 cannot take a step smaller than 1/256, so the weights that are stepped are
float32. On a GPU the matrices have a bfloat16 copy beside them, written in the pass that steps the
weights; a cast in every forward would read them once more, and one of every gradient, too.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Generator
from contextlib import contextmanager
from functools import lru_cache

import torch
from torch import Tensor, nn
from torch.optim.adamw import adamw

from dflash_core.config import TrainConfig
from dflash_core.devices import to_device
from dflash_core.model import Drafter
from dflash_core.ranks import own_part

AVERAGE = "average"  # field of the state of a weight that holds the average of it
_BETAS, _EPS, _MOMENTUM = (0.9, 0.95), 1e-8, 0.95
# Polar Express (https://arxiv.org/abs/2505.16932, Algorithm 1) for 3 products and a lower bound of 0.01;
# its margin for rounding of 1 % is in all three.
_POLAR_EXPRESS = (
    (8.0132, -22.9258, 16.5994),
    (3.6006, -2.6419, 0.5105),
    (2.6350, -1.9190, 0.4306),
)


def learning_rate(step: int, config: TrainConfig) -> float:
    """Rate of step `step` (0-based): linear warm-up, then as `config.schedule` says, 0 after the last."""
    warmup = round(config.warmup_fraction * config.num_steps)
    if step < warmup:
        return config.learning_rate * (step + 1) / warmup
    constant = 0
    if config.schedule == "wsd":
        constant = max(
            0, config.num_steps - warmup - round(config.decay_fraction * config.num_steps)
        )
    if step < warmup + constant:
        return config.learning_rate
    done = step - warmup - constant
    progress = done / max(1, config.num_steps - warmup - constant)
    return config.learning_rate * 0.5 * (1 + math.cos(math.pi * progress))


def average_decay(step: int, config: TrainConfig) -> float:
    """What the average keeps of itself at step `step` (0-based): at first less than `config.ema_decay`."""
    return min(config.ema_decay, (1 + step) / (10 + step))


def bfloat16_copy(drafter: Drafter) -> Drafter:
    """A drafter to compute with: matrices are bfloat16 copies, the weights of norms are shared."""
    made = copy.deepcopy(drafter)
    for mine, theirs in zip(made.modules(), drafter.modules(), strict=True):
        if isinstance(theirs, nn.Linear):
            mine.weight = nn.Parameter(theirs.weight.detach().bfloat16())
        elif "weight" in dict(theirs.named_parameters(recurse=False)):
            mine.weight = theirs.weight
    return made


class Optimizer(torch.optim.Optimizer):
    """AdamW, or Muon for the matrices and AdamW for the norms; norms do not decay.

    State is keyed by the parameters of `drafter`: `step`, `exp_avg` and `exp_avg_sq`, or `momentum`; and
    `average`, that of the weights, where steps keep one.

    Args:
        drafter: float32, what is stepped.
        compute: what gradients are made with: `drafter` itself, or its `bfloat16_copy`, which is written
            back after every step.
    """

    def __init__(
        self, drafter: Drafter, config: TrainConfig, compute: Drafter | None = None
    ) -> None:
        parameters = list(drafter.parameters())
        matrices = [parameter for parameter in parameters if parameter.ndim > 1]
        vectors = [parameter for parameter in parameters if parameter.ndim < 2]
        groups = [
            {"params": matrices, "weight_decay": config.weight_decay, "kind": config.optimizer},
            {"params": vectors, "weight_decay": 0.0, "kind": "adamw"},
        ]
        super().__init__(groups, {"lr": config.learning_rate})
        copies = (compute or drafter).parameters()
        self.copies = dict(zip(parameters, copies, strict=True))

    def gradient(self, parameter: nn.Parameter) -> Tensor:
        """The gradient of a parameter of `drafter`, where it is: with its copy, or with itself."""
        copied = self.copies[parameter].grad
        gradient = parameter.grad if copied is None else copied
        assert gradient is not None, "backward comes before a step"
        return gradient

    def accumulate(self, parameter: nn.Parameter) -> None:
        """Adds the gradient of a bfloat16 copy to the float32 one, for a step of several packs."""
        copied = self.copies[parameter]
        if copied is parameter or copied.grad is None:
            return
        if parameter.grad is None:
            parameter.grad = copied.grad.float()
        else:
            parameter.grad += copied.grad
        copied.grad = None

    @torch.no_grad()
    def step(  # ty: ignore[incompatible-method-override]
        self, scale: float = 1.0, average_decay: float = 0.0
    ) -> None:
        """One step with `scale` times the gradients, which are dropped.

        Args:
            average_decay: what averages of the weights keep of themselves; 0 keeps no averages.
        """
        if average_decay:
            for parameter in self.copies:
                if AVERAGE not in self.state[parameter]:
                    self.state[parameter][AVERAGE] = parameter.detach().clone()
        for group in self.param_groups:
            update = self._muon if group["kind"] == "muon" else self._adamw
            update(group, scale)
        for parameter, copied in self.copies.items():
            parameter.grad = copied.grad = None
            if average_decay:
                self.state[parameter][AVERAGE].lerp_(parameter, 1 - average_decay)

    @contextmanager
    def averaged(self) -> Generator[None]:
        """Inside, the weights of `drafter` and their averages have changed places, where there are any."""
        self._swap()
        try:
            yield
        finally:
            self._swap()

    @torch.no_grad()
    def _swap(self) -> None:
        for parameter in self.copies:
            if AVERAGE in self.state[parameter]:
                average = self.state[parameter][AVERAGE]
                weight = parameter.clone()
                parameter.copy_(average)
                average.copy_(weight)

    def _adamw(self, group: dict, scale: float) -> None:
        parameters = group["params"]
        if not parameters:
            return
        for parameter in parameters:
            state = self.state[parameter]
            if "step" not in state:
                state["step"] = torch.zeros((), device=parameter.device)
                state["exp_avg"] = torch.zeros_like(parameter)
                state["exp_avg_sq"] = torch.zeros_like(parameter)
        states = [self.state[parameter] for parameter in parameters]
        first = parameters[0]
        if self.copies[first] is not first or (first.is_cuda and first.ndim > 1):
            self._adamw_in_one_pass(group, states, scale)
            return
        adamw(
            [own_part(parameter) for parameter in parameters],
            [own_part(self.gradient(parameter)) for parameter in parameters],
            [own_part(state["exp_avg"]) for state in states],
            [own_part(state["exp_avg_sq"]) for state in states],
            [],
            [state["step"] for state in states],
            fused=True,
            amsgrad=False,
            beta1=_BETAS[0],
            beta2=_BETAS[1],
            lr=group["lr"],
            weight_decay=group["weight_decay"],
            eps=_EPS,
            maximize=False,
            grad_scale=to_device(torch.tensor(1 / scale), parameters[0].device),
        )

    def _adamw_in_one_pass(self, group: dict, states: list[dict], scale: float) -> None:
        """28 bytes an element, copies included, where a float32 gradient and a cast take 50.

        A kernel for each weight; for many small ones that of torch is faster.
        """
        step = float(states[0]["step"]) + 1
        corrections = [1 - beta**step for beta in _BETAS]
        decay = 1 - group["lr"] * group["weight_decay"]
        numbers = torch.tensor([scale, group["lr"], decay, *corrections])
        numbers = to_device(numbers, states[0]["step"].device)
        torch._foreach_add_([state["step"] for state in states], 1)
        for parameter, state in zip(group["params"], states, strict=True):
            copied = self.copies[parameter]
            copied_W = None if copied is parameter else copied.view(-1)
            tensors = parameter, self.gradient(parameter), state["exp_avg"], state["exp_avg_sq"]
            _compiled_adamw()(*(own_part(x).view(-1) for x in tensors), copied_W, numbers)

    def _muon(self, group: dict, scale: float) -> None:
        for parameter in group["params"]:
            state = self.state[parameter]
            if "momentum" not in state:
                state["momentum"] = torch.zeros_like(parameter)
            gradient = self.gradient(parameter).float() * scale
            momentum = state["momentum"].lerp_(gradient, 1 - _MOMENTUM)
            dtype = torch.bfloat16 if parameter.is_cuda else torch.float32
            direction = orthogonal(gradient.lerp(momentum, _MOMENTUM), dtype)
            # Steps as long as AdamW's: a root mean square of 0.2.
            rate = group["lr"] * 0.2 * math.sqrt(max(parameter.shape))
            parameter.mul_(1 - group["lr"] * group["weight_decay"]).sub_(direction, alpha=rate)
            copied = self.copies[parameter]
            if copied is not parameter:
                copied.copy_(parameter)


def orthogonal(matrix: Tensor, dtype: torch.dtype) -> Tensor:
    """About U V^T of a matrix U S V^T: singular values between 0.7 and 1.3, where they were large enough.

    Large enough is 0.01 of the fourth root of the sum of their fourth powers, which bounds the largest one
    more tightly than the Frobenius norm and comes with the first product. Smaller ones grow 75-fold.

    Args:
        dtype: to compute in; bfloat16 is enough.

    Reference: https://kellerjordan.github.io/posts/muon, with the polynomials of `_POLAR_EXPRESS`.
    """
    x = matrix.to(dtype)
    tall = x.shape[0] > x.shape[1]
    x = x.mT if tall else x
    square = x @ x.mT
    size = square.norm().clamp(min=1e-14)
    x, square = x * size.rsqrt(), square / size
    for index, (a, b, c) in enumerate(_POLAR_EXPRESS):
        if index:
            square = x @ x.mT
        polynomial = torch.addmm(square, square, square, beta=b, alpha=c)
        x = torch.addmm(x, polynomial, x, beta=a)
    return (x.mT if tall else x).to(matrix.dtype)


def adamw_(
    weight_W: Tensor,
    gradient_W: Tensor,
    average_W: Tensor,
    average_square_W: Tensor,
    copied_W: Tensor | None,
    numbers: Tensor,
) -> None:
    """AdamW in place.

    Args:
        copied_W: a bfloat16 copy of the weights that follows them, if there is one.
        numbers: what gradients are multiplied with, learning rate, what weights are multiplied with,
            and the bias corrections of both averages.
    """
    scale, rate, decay, correction, square_correction = numbers.unbind()
    gradient = gradient_W.float() * scale
    average = torch.lerp(average_W, gradient, 1 - _BETAS[0])
    square = average_square_W * _BETAS[1] + gradient * gradient * (1 - _BETAS[1])
    root = (square / square_correction).sqrt() + _EPS
    weight = weight_W * decay - rate * (average / correction) / root
    average_W.copy_(average)
    average_square_W.copy_(square)
    weight_W.copy_(weight)
    if copied_W is not None:
        copied_W.copy_(weight)


@lru_cache
def _compiled_adamw() -> Callable[..., None]:
    """Compiled when first needed: the compiler alone takes seconds to import."""
    return torch.compile(adamw_, dynamic=True)
