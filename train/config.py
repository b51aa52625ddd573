"""Settings of a training run, validated once. Torch-free; every field can be set in a recipe or as `key=value`."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar, Literal

from pydantic import (
    Field,
    NonNegativeFloat,
    NonNegativeInt,
    PositiveFloat,
    PositiveInt,
    ValidationError,
    model_validator,
)

from drafters.base.serving import ServingSettings
from drafters.base.settings import Alias, Settings
from drafters.targets.template import TemplateOptions

NormSetting = Literal["none", "fixed", "learnt"]


class DataSettings(Settings):
    """Conversations written by the target, and how they become rows."""

    paths: tuple[str, ...] = Field(min_length=1, description="files, directories or hub names of conversations")
    row_length: int = Field(default=512, ge=8, description="tokens of a packed row; longer conversations are cut")
    max_conversations: PositiveInt | None = Field(default=None, description="read at most that many from each path")
    heldout_conversations: PositiveInt = Field(default=48, description="kept out of training, to measure on")
    template: TemplateOptions = Field(default=TemplateOptions(), description="as serving will ask the chat template")


class FeatureSettings(Settings):
    """Target features: computed once and kept on disk, or computed as they are needed."""

    mode: Literal["offline", "online"] = "offline"
    target: Literal["whole", "sharded"] = Field(
        default="whole",
        description="sharded: the processes of a node share the target's weights; for one that fits no single device",
    )
    directory: str = "runs/features"
    per_node: bool = Field(
        default=False, description="each node has its own directory, and builds the whole store there"
    )
    rows_per_shard: PositiveInt = 32
    rows_per_forward: PositiveInt = 4
    max_gigabytes: PositiveFloat = Field(default=50.0, description="ask before writing a larger store; --yes agrees")


class DrafterSettings(Settings):
    """The drafter to train. Sizes not given here are the target's."""

    init: str = Field(default="target", description="'target', 'random', or a drafter directory to go on from")
    num_hidden_layers: PositiveInt = 1
    draft_vocab_size: PositiveInt = 8192
    feature_norm: NormSetting = Field(
        default="none", description="RMS norm of every feature that enters the first layer and its residual"
    )
    fc_norm: NormSetting = Field(
        default="none", description="RMS norm of each tap before fc; fixed: at the target's scale"
    )
    norm_output: bool = Field(
        default=False, description="feed back the output of the drafter's final norm (EAGLE-3.1)"
    )
    tap_hidden_states_ids: tuple[int, int, int] | None = Field(
        default=None, description="default: 2, L//2, L-3 of the target's L layers"
    )


class OptimizerSettings(Settings):
    """AdamW with linear warm-up and a cosine to `final_lr_ratio`."""

    lr: PositiveFloat = 5e-4
    beta1: float = Field(default=0.9, ge=0, lt=1)
    beta2: float = Field(default=0.95, ge=0, lt=1)
    weight_decay: NonNegativeFloat = 0.0
    warmup_steps: NonNegativeInt = 50
    final_lr_ratio: float = Field(default=0.05, ge=0, le=1)
    clip_norm: PositiveFloat = 1.0


class LossSettings(Settings):
    """What is minimised at each supervised prediction (train/README.md, section 3).

    cross_entropy * soft cross-entropy + total_variation * expected rejection, weighted by depth, + bonus * the loss of
    the bonus token that SSD prepares for.
    """

    cross_entropy: NonNegativeFloat = Field(default=1.0, description="weight of the soft cross-entropy (EAGLE-3)")
    total_variation: NonNegativeFloat = Field(
        default=0.0, description="weight of 1 - sum min(p, q), the expected rejection"
    )
    bonus: NonNegativeFloat = Field(default=0.0, description="weight of the bonus token's loss after a rejection")
    bonus_temperature: Literal[0, 1] = Field(default=0, description="0: greedy drafts and target; 1: both sample")
    depth_weights: Literal["decay", "flat", "visited"] = "decay"
    gamma: float = Field(default=0.9, gt=0, le=1, description="weight of depth d is gamma^d under 'decay'")
    fan_out: PositiveInt = Field(
        default=ServingSettings().mean_fan_out,
        description="F, the bonus tokens prepared for each k; default serving.budget / (serving.lookahead + 1)",
    )
    window: PositiveInt | None = Field(default=None, description="refresh window w of the unroll; null is infinite")
    recompute: bool = Field(
        default=False, description="recompute activations in the backward pass: less memory, a third more time"
    )


class Stage(Settings):
    """A part of the curriculum: so many optimizer steps at one unroll depth.

    With `replay` an anchor trains one round of serving instead of one unroll: the glue pass over K slots and K steps
    of one branch, at a shift and a fork drawn as often as serving visits them. Shifts go up to depth - 2 K, K =
    serving.lookahead.
    """

    steps: PositiveInt
    depth: NonNegativeInt = Field(description="deepest drafter step; depth 0 is the step with true features")
    anchors_per_row: PositiveInt | None = Field(
        default=None, description="anchors sampled for depths >= 1; null takes all"
    )
    replay: bool = False


class BatchSettings(Settings):
    """Rows of one optimizer step over all processes, and of one forward in one process."""

    rows_per_step: PositiveInt = 8
    rows_per_forward: PositiveInt = 4


class HeldoutSettings(Settings):
    """What is measured on held-out data, and when. Serving is replayed, and its speed is predicted.

    What the `serving:` block says of it is the default of `lookahead`, `fallback_lookahead`, `budgets` and `refresh`.
    """

    every: PositiveInt = 200
    patience: PositiveInt | None = Field(
        default=None, description="stop after so many measurements without a better predicted speed"
    )
    max_rows: PositiveInt = 32
    max_answers: PositiveInt = Field(
        default=12, description="answers that serving is replayed on: most of a measurement's time"
    )
    anchors_per_row: PositiveInt | None = Field(
        default=32, description="anchors for figures per depth; null takes all"
    )
    depth: PositiveInt | None = Field(
        default=None, description="deepest step that figures per depth go to; default 2 * lookahead"
    )
    lookahead: PositiveInt = Field(default=5, description="default serving.lookahead")
    fallback_lookahead: PositiveInt | None = Field(
        default=None, description="tokens drafted after a miss; default serving.fallback_lookahead, else lookahead"
    )
    budgets: tuple[PositiveInt, ...] = Field(
        default=(6, 12, 24, 48),
        min_length=1,
        description="budgets to measure; default a quarter, a half, the whole and the double of serving.budget",
    )
    refresh: tuple[NonNegativeInt, ...] = Field(
        default=(0,), min_length=1, description="numbers of refresh passes to compare; default serving.refresh"
    )
    step_share: PositiveFloat | None = Field(
        default=None,
        description="time of a drafter step over that of a verification; default by the weights of both",
    )
    row_share: NonNegativeFloat | None = Field(
        default=None,
        description="time of a further row of a drafter step, as a share of it; default 0.03 on CPU, else 0.003",
    )

    @model_validator(mode="after")
    def _lengths_fit(self) -> HeldoutSettings:
        if self.fallback_lookahead is not None and self.fallback_lookahead > self.lookahead:
            raise ValueError(
                f"fallback_lookahead = {self.fallback_lookahead} is more than lookahead = {self.lookahead}; give less"
            )
        if max(self.refresh) > self.lookahead:
            raise ValueError(
                f"refresh = {list(self.refresh)} has more than lookahead = {self.lookahead}; give 0..lookahead"
            )
        return self


class CheckpointSettings(Settings):
    """Training state, to resume from."""

    every: PositiveInt = 200
    keep: PositiveInt = 2


class WandbSettings(Settings):
    """Weights & Biases; off unless asked for. `offline` needs no network."""

    mode: Literal["disabled", "offline", "online"] = "disabled"
    project: str = "ssd-drafters"


class TrainSettings(Settings):
    """A training run."""

    aliases: ClassVar[Mapping[str, Alias]] = {
        "loss.kl": Alias("loss.cross_entropy"),
        "loss.acceptance": Alias("loss.total_variation"),
        "loss.serving.lookahead": Alias("serving.lookahead", defaults={"loss.fan_out": 4, "heldout.lookahead": 5}),
        "loss.serving.fan_out": Alias("loss.fan_out"),
        "loss.serving.refresh": Alias("serving.refresh", defaults={"heldout.refresh": [0]}),
    }

    target: str
    output: str = Field(description="directory of the run: metrics.jsonl, states/, best-eagle3/ and final-eagle3/")
    seed: int = 0
    dtype: Literal["bfloat16", "float32"] = Field(
        default="bfloat16", description="of the forward passes; master weights are fp32"
    )
    minutes: PositiveFloat | None = Field(
        default=None, description="stop after that long, state saved and drafter written"
    )
    serving: ServingSettings = Field(
        default=ServingSettings(), description="how the drafter will be served: loss and validation follow it"
    )
    data: DataSettings
    curriculum: tuple[Stage, ...] = Field(min_length=1)
    features: FeatureSettings = FeatureSettings()
    drafter: DrafterSettings = DrafterSettings()
    optimizer: OptimizerSettings = OptimizerSettings()
    loss: LossSettings = LossSettings()
    batch: BatchSettings = BatchSettings()
    heldout: HeldoutSettings = HeldoutSettings()
    checkpoint: CheckpointSettings = CheckpointSettings()
    wandb: WandbSettings = WandbSettings()

    @model_validator(mode="before")
    @classmethod
    def _follow_serving(cls, given: Any) -> Any:
        """Fill in what `loss` and `heldout` leave to the `serving:` block. Its own mistakes are told afterwards."""
        if not isinstance(given, Mapping):
            return given
        try:
            serving = ServingSettings.model_validate(given.get("serving", {}))
        except ValidationError:
            return given
        budgets = {max(1, part) for part in (serving.budget // 4, serving.budget // 2, serving.budget)}
        follows = {
            "loss": {"fan_out": serving.mean_fan_out},
            "heldout": {
                "lookahead": serving.lookahead,
                "fallback_lookahead": serving.fallback_lookahead,
                "budgets": (*sorted(budgets), 2 * serving.budget),
                "refresh": (serving.refresh,),
            },
        }
        return {
            **given,
            **{
                block: {**defaults, **given.get(block, {})}
                for block, defaults in follows.items()
                if isinstance(given.get(block, {}), Mapping)
            },
        }

    @model_validator(mode="after")
    def _loss_is_not_empty(self) -> TrainSettings:
        if not self.loss.cross_entropy and not self.loss.total_variation:
            raise ValueError(
                "loss.cross_entropy and loss.total_variation are both 0: nothing would be trained; set one of them"
            )
        return self

    @model_validator(mode="after")
    def _replay_has_room(self) -> TrainSettings:
        lookahead = self.serving.lookahead
        for stage in self.curriculum:
            if stage.replay and stage.depth <= 2 * lookahead:
                raise ValueError(
                    f"a curriculum stage with replay has depth {stage.depth}; take 2 * serving.lookahead + 1 "
                    f"= {2 * lookahead + 1} or more, so that there is a round after a hit to replay"
                )
            if stage.replay and self.loss.window is not None:
                raise ValueError(
                    f"loss.window = {self.loss.window} approximates what a stage with replay does exactly; "
                    "leave one out"
                )
        return self

    @property
    def total_steps(self) -> int:
        """Optimizer steps of the whole curriculum."""
        return sum(stage.steps for stage in self.curriculum)

    def stage_at(self, step: int) -> Stage:
        """The stage that optimizer step `step` (from 0) belongs to."""
        for stage in self.curriculum:
            if step < stage.steps:
                return stage
            step -= stage.steps
        raise IndexError(f"step {step} past the end of the curriculum")
