"""Settings: frozen pydantic models, read from a YAML recipe plus `key=value` overrides, validated once.

Torch-free. An unknown key is an error that names the nearest known one; a bad value names the key, the value and what
would do.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar

import yaml
from pydantic import BaseModel, ConfigDict, ValidationError

from drafters.base.errors import UserError, unknown_name


class Settings(BaseModel):
    """Base of every settings record: immutable, and closed to names it does not know."""

    model_config = ConfigDict(frozen=True, extra="forbid")


S = TypeVar("S", bound=Settings)


def read_yaml(path: str | Path) -> dict[str, Any]:
    """Read a YAML file that holds one mapping. Raises `UserError` naming the file where it is missing or malformed."""
    file = Path(path)
    if not file.is_file():
        raise UserError(
            f"no such file: {file} (give the path of a YAML recipe, such as those in recipes/smollm2-135m)"
        )
    try:
        content = yaml.safe_load(file.read_text(encoding="utf-8"))
    except yaml.YAMLError as error:
        raise UserError(f"{file} is not valid YAML: {error}") from error
    if content is None:
        return {}
    if not isinstance(content, dict):
        raise UserError(f"{file} has to hold `key: value` lines, not a {type(content).__name__}")
    return content


def parse_overrides(pairs: Sequence[str]) -> dict[str, Any]:
    """Turn `["lookahead=5", "optimizer.lr=1e-4"]` into `{"lookahead": 5, "optimizer": {"lr": 1e-4}}`; values are YAML."""
    result: dict[str, Any] = {}
    for pair in pairs:
        key, separator, value = pair.partition("=")
        if not separator or not key:
            raise UserError(f"cannot read {pair!r}: write settings as key=value, for example lookahead=5")
        *parents, leaf = key.split(".")
        level = result
        for parent in parents:
            level = level.setdefault(parent, {})
            if not isinstance(level, dict):
                raise UserError(f"{key!r} goes below {parent!r}, which was already given a plain value")
        level[leaf] = _parse_value(key, value)
    return result


def build_settings(
    kind: type[S], content: Mapping[str, Any], overrides: Mapping[str, Any] | None = None, where: str = "settings"
) -> S:
    """Validate `content` with `overrides` laid on top. `where` (a file name) stands in the error messages."""
    merged = _merge(dict(content), overrides or {})
    try:
        return kind.model_validate(merged)
    except ValidationError as error:
        raise _explain(kind, error, where) from error


def load_settings(kind: type[S], path: str | Path | Sequence[str | Path], overrides: Sequence[str] = ()) -> S:
    """Read a recipe file, or several of which each is laid on top of those before it, and `key=value` overrides into
    `kind`.
    """
    paths = [path] if isinstance(path, str | Path) else path
    content: dict[str, Any] = {}
    for each in paths:
        content = _merge(content, read_yaml(each))
    return build_settings(kind, content, parse_overrides(overrides), " + ".join(map(str, paths)))


def _parse_value(key: str, text: str) -> Any:
    try:
        value = yaml.safe_load(text) if text else None
    except yaml.YAMLError as error:
        raise UserError(
            f"cannot read the value of {key!r}: {text!r} is not valid YAML (close brackets and quotes)"
        ) from error
    if isinstance(value, str):  # YAML 1.1 reads 1e-4 as a string: it wants a dot in the mantissa
        try:
            return float(value)
        except ValueError:
            return value
    return value


def _merge(base: dict[str, Any], extra: Mapping[str, Any]) -> dict[str, Any]:
    result = dict(base)
    for key, value in extra.items():
        below = result.get(key)
        nested = isinstance(value, Mapping) and isinstance(below, Mapping)
        result[key] = _merge(dict(below), value) if nested else value  # type: ignore[arg-type]
    return result


def _explain(kind: type[BaseModel], error: ValidationError, where: str) -> UserError:
    first = error.errors()[0]
    path = [str(part) for part in first["loc"]]
    name = ".".join(path)
    if first["type"] == "extra_forbidden":
        return UserError(f"{where}: {unknown_name('setting', path[-1], _fields_at(kind, path[:-1]))}")
    if first["type"] == "missing":
        return UserError(f"{where}: setting {name!r} is missing; add it to the file or give {name}=VALUE")
    return UserError(f"{where}: setting {name!r} = {first['input']!r}: {first['msg']}")


def _fields_at(kind: type[BaseModel], path: Sequence[str]) -> list[str]:
    for part in path:
        field = kind.model_fields.get(part)
        annotation = field.annotation if field else None
        if not (isinstance(annotation, type) and issubclass(annotation, BaseModel)):
            break
        kind = annotation
    return list(kind.model_fields)
