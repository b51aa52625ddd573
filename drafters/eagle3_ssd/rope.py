"""RoPE settings of a config: theta and scaling, read and written in the styles of transformers 4 and 5 (torch-free).

Old style (transformers 4): `rope_theta` and `rope_scaling` at the top. New style (transformers 5): both in
`rope_parameters`. A file may state both; they have to agree. The frequencies are computed in `model.py`.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any, Literal, NamedTuple, get_args

from pydantic import PositiveFloat, PositiveInt, ValidationError, model_validator

from drafters.base.errors import UserError
from drafters.base.settings import Settings

ScalingType = Literal["linear", "llama3", "yarn"]
NEEDS: dict[str, tuple[str, ...]] = {
    "linear": (),
    "llama3": ("low_freq_factor", "high_freq_factor", "original_max_position_embeddings"),
    "yarn": ("original_max_position_embeddings",),
}
WHOLE = (None, 1, 1.0)  # values of partial_rotary_factor under which every dimension of a head is rotated


class RopeScaling(Settings):
    """How frequencies are stretched for longer contexts, under transformers' names."""

    rope_type: ScalingType
    factor: PositiveFloat
    original_max_position_embeddings: PositiveInt | None = None
    low_freq_factor: PositiveFloat | None = None
    high_freq_factor: PositiveFloat | None = None
    attention_factor: PositiveFloat | None = None
    beta_fast: PositiveFloat | None = None
    beta_slow: PositiveFloat | None = None
    mscale: float | None = None
    mscale_all_dim: float | None = None
    truncate: bool | None = None

    @model_validator(mode="after")
    def _is_complete(self) -> RopeScaling:
        for name in NEEDS[self.rope_type]:
            if getattr(self, name) is None:
                raise ValueError(f"rope type {self.rope_type!r} needs {name}")
        return self

    def stated(self) -> dict[str, Any]:
        """What a config file has to say."""
        return self.model_dump(exclude_none=True)


class Rope(NamedTuple):
    """All that rotary tables depend on; hashable."""

    head_dim: int
    theta: float
    scaling: RopeScaling | None = None

    @property
    def attention_factor(self) -> float:
        """Factor of cosines and sines: 1, except for yarn, where it is 0.1 ln(factor) + 1 or the config's value."""
        scaling = self.scaling
        if scaling is None or scaling.rope_type != "yarn":
            return 1.0
        if scaling.attention_factor is not None:
            return scaling.attention_factor

        def mscale(weight: float) -> float:
            return 1.0 if scaling.factor <= 1 else 0.1 * weight * math.log(scaling.factor) + 1.0

        if scaling.mscale and scaling.mscale_all_dim:
            return mscale(scaling.mscale) / mscale(scaling.mscale_all_dim)
        return mscale(1.0)


def rope_to_json(theta: float, scaling: RopeScaling | None) -> dict[str, Any]:
    """The keys of a `config.json`, in both styles."""
    stated = {"rope_type": "default"} if scaling is None else scaling.stated()
    old_style = {} if scaling is None else {"rope_scaling": scaling.stated()}
    return {"rope_theta": theta, **old_style, "rope_parameters": {**stated, "rope_theta": theta}}


def theta_from_json(content: Mapping[str, Any], where: str, default: float | None = None) -> float:
    """The theta that `content` states, once or equally in both styles; `default` where it states none."""
    parts = (content, content.get("rope_parameters") or {}, content.get("rope_scaling") or {})
    stated = {float(part["rope_theta"]) for part in parts if part.get("rope_theta") is not None}
    if not stated and default is not None:
        return default
    if len(stated) != 1:
        found = "is missing" if not stated else f"is stated twice, as {sorted(stated)}"
        raise UserError(
            f"{where}: rope_theta {found}; write the target's value once or equally in rope_theta and rope_parameters"
        )
    return stated.pop()


def scaling_from_json(content: Mapping[str, Any], where: str) -> RopeScaling | None:
    """The scaling that `content` states, or None. Raises `UserError` where it is unsupported or contradictory."""
    stated: dict[str, RopeScaling | None] = {}
    for key in ("rope_scaling", "rope_parameters"):
        part = content.get(key)
        if part and ("rope_type" in part or "type" in part):
            stated[key] = _scaling(part, f"{where}: {key}")
    if content.get("partial_rotary_factor") not in WHOLE:
        raise UserError(
            f"{where}: partial_rotary_factor = {content['partial_rotary_factor']} is not supported; "
            "heads are rotated whole"
        )
    found = list(stated.values())
    if len(found) == 2 and found[0] != found[1]:
        raise UserError(
            f"{where}: rope_scaling and rope_parameters disagree ({found[0]}; {found[1]}); correct one of them"
        )
    return found[0] if found else None


def scaling_of_target(rope_parameters: Mapping[str, Any]) -> tuple[RopeScaling | None, str | None]:
    """The scaling for a drafter that follows a target, and a line for the user where it cannot follow."""
    unscaled = "the drafter's own rotary embedding is unscaled"
    if any(isinstance(value, Mapping) for value in rope_parameters.values()):
        return None, f"the target's rotary embedding differs by layer type: {unscaled}"
    try:
        return scaling_from_json({"rope_parameters": rope_parameters}, "the target"), None
    except UserError as error:
        return None, f"{error}: {unscaled}"


def _scaling(part: Mapping[str, Any], where: str) -> RopeScaling | None:
    kind = part.get("rope_type", part.get("type"))
    if part.get("partial_rotary_factor") not in WHOLE:
        raise UserError(
            f"{where}: partial_rotary_factor = {part['partial_rotary_factor']} is not supported; "
            "heads are rotated whole"
        )
    if kind == "default" or kind is None:
        return None
    if kind not in get_args(ScalingType):
        raise UserError(
            f"{where}: rope type {kind!r} is not supported; known: default, {', '.join(get_args(ScalingType))}"
        )
    left_out = ("type", "rope_type", "rope_theta", "partial_rotary_factor")
    try:
        return RopeScaling(rope_type=kind, **{name: value for name, value in part.items() if name not in left_out})
    except ValidationError as error:
        first = error.errors()[0]
        name = ".".join(str(place) for place in first["loc"])
        raise UserError(f"{where}: {name or 'scaling'}: {first['msg']}") from error
