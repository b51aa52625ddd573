"""The drafter's configuration and its `config.json`, in both tap conventions and both RoPE styles (torch-free)."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from pydantic import Field, PositiveFloat, PositiveInt, model_validator

from drafters.base.errors import UserError
from drafters.base.settings import Settings
from drafters.eagle3_ssd.rope import Rope, RopeScaling, rope_to_json, scaling_from_json, theta_from_json

ARCHITECTURE = "LlamaForCausalLMEagle3"


class DrafterConfig(Settings):
    """Sizes of an EAGLE-3 drafter with one or more decoder layers.

    `tap_hidden_states_ids` index transformers' `hidden_states`: id i is the INPUT of the target's decoder layer i.
    """

    hidden_size: PositiveInt
    intermediate_size: PositiveInt
    num_attention_heads: PositiveInt
    num_key_value_heads: PositiveInt
    head_dim: PositiveInt
    num_hidden_layers: PositiveInt = 1
    rms_norm_eps: PositiveFloat = 1e-5
    rope_theta: PositiveFloat
    rope_scaling: RopeScaling | None = None
    max_position_embeddings: PositiveInt
    vocab_size: PositiveInt
    draft_vocab_size: PositiveInt
    target_hidden_size: PositiveInt
    tap_hidden_states_ids: tuple[int, int, int]
    fc_norm: bool = Field(default=False, description="an RMS norm of each tap before `fc` (EAGLE-3.1)")
    feature_norm: bool = Field(
        default=False, description="an RMS norm of every feature that enters the first layer and its residual"
    )
    norm_output: bool = Field(
        default=False, description="the output of the final norm is fed back, not the state before it (EAGLE-3.1)"
    )

    @model_validator(mode="after")
    def _fits_together(self) -> DrafterConfig:
        if self.num_attention_heads % self.num_key_value_heads:
            raise ValueError(
                f"num_attention_heads ({self.num_attention_heads}) has to be a multiple of "
                f"num_key_value_heads ({self.num_key_value_heads})"
            )
        if self.head_dim % 2:
            raise ValueError(f"head_dim ({self.head_dim}) has to be even: rotary embeddings turn pairs")
        if self.draft_vocab_size > self.vocab_size:
            raise ValueError(
                f"draft_vocab_size ({self.draft_vocab_size}) is larger than vocab_size ({self.vocab_size})"
            )
        if self.feature_norm and self.norm_output:
            raise ValueError(
                "feature_norm and norm_output are both true: the fed-back state would be normalised twice; choose one"
            )
        return self

    @property
    def rope(self) -> Rope:
        """What the rotary tables depend on."""
        return Rope(self.head_dim, self.rope_theta, self.rope_scaling)


def default_taps(target_layers: int) -> tuple[int, int, int]:
    """EAGLE-3's three taps, as `hidden_states` indices: 2, L//2 and L-3 (a low, a middle and an upper one)."""
    if target_layers < 6:
        raise UserError(
            f"the target has {target_layers} layers; the default taps need 6: "
            "set the tap ids yourself (tap_hidden_states_ids)"
        )
    return 2, target_layers // 2, target_layers - 3


def to_config_json(config: DrafterConfig, dtype: str = "bfloat16") -> dict[str, Any]:
    """The content of `config.json`, with taps as inputs of layers and, in `eagle_config`, as outputs of layers."""
    taps = list(config.tap_hidden_states_ids)
    return {
        "architectures": [ARCHITECTURE],
        "model_type": "llama",
        "hidden_act": "silu",
        "attention_bias": False,
        "mlp_bias": False,
        "tie_word_embeddings": False,
        "norm_before_residual": False,
        "torch_dtype": dtype,
        **config.model_dump(exclude={"tap_hidden_states_ids", "rope_theta", "rope_scaling"}),
        **rope_to_json(config.rope_theta, config.rope_scaling),
        "eagle_aux_hidden_state_layer_ids": taps,
        "eagle_config": {"eagle_aux_hidden_state_layer_ids": [tap - 1 for tap in taps], "use_aux_hidden_state": True},
    }


def from_config_json(content: Mapping[str, Any], where: str) -> DrafterConfig:
    """Read a `config.json`. Raises `UserError`, starting with `where`, for a missing size or contradictory values."""
    if content.get("architectures") != [ARCHITECTURE]:
        found = content.get("architectures")
        raise UserError(f"{where}: architectures = {found!r}, expected [{ARCHITECTURE!r}]: this is no EAGLE-3 drafter")
    if content.get("norm_before_residual"):
        raise UserError(
            f"{where}: norm_before_residual = true is not supported; "
            "export the drafter with norm_before_residual false"
        )
    fields = {name: content[name] for name in DrafterConfig.model_fields if name in content}
    fields["rope_theta"] = theta_from_json(content, where)
    fields["rope_scaling"] = scaling_from_json(content, where)
    fields["tap_hidden_states_ids"] = taps_from_json(content, where)
    missing = [
        name for name, field in DrafterConfig.model_fields.items() if field.is_required() and name not in fields
    ]
    if missing:
        raise UserError(f"{where}: {missing[0]!r} is missing; a drafter's config.json has to state it")
    try:
        return DrafterConfig.model_validate(fields)
    except ValueError as error:
        raise UserError(f"{where}: {error}") from error


def taps_from_json(content: Mapping[str, Any], where: str) -> tuple[int, ...]:
    """The taps as `hidden_states` indices, from layer inputs (top level) or layer outputs (`eagle_config`).

    Raises `UserError` where both are stated and disagree.
    """
    inputs = content.get("eagle_aux_hidden_state_layer_ids")
    outputs = (content.get("eagle_config") or {}).get("eagle_aux_hidden_state_layer_ids")
    converted = None if outputs is None else [layer + 1 for layer in outputs]
    found = converted if inputs is None else list(inputs)
    if found is None:
        raise UserError(
            f"{where}: eagle_aux_hidden_state_layer_ids is missing; "
            "it names the three layers whose inputs the drafter reads"
        )
    if converted is not None and found != converted:
        raise UserError(
            f"{where}: eagle_aux_hidden_state_layer_ids = {found} (layer inputs) disagrees with eagle_config's "
            f"{outputs} (layer outputs, one less each); correct one of them"
        )
    return tuple(found)
