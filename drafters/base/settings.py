"""Settings: frozen pydantic models, read from a YAML recipe plus `key=value` overrides, validated once.

Torch-free. An unknown key is an error that names the nearest known one; a bad value names the key, the value and what
would do. A renamed setting keeps its old name for one version, with a warning.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from copy import deepcopy
from functools import cache
from pathlib import Path
from typing import Any, ClassVar, NamedTuple, TypeVar

import yaml
from pydantic import BaseModel, ConfigDict, ValidationError

from drafters.base.errors import UserError, unknown_name

logger = logging.getLogger(__name__)


class Alias(NamedTuple):
    """Another name of the setting `name`. A deprecated one warns, and leaves with the next version.

    `defaults` are settings that held beside the old name, where they differ from today's: a recipe that uses the old
    name and does not give them gets these.
    """

    name: str
    deprecated: bool = True
    defaults: Mapping[str, Any] = {}


class Settings(BaseModel):
    """Base of every settings record: immutable, and closed to names it does not know.

    `aliases` are further names by which files and `key=value` may give a setting, as dotted paths from this record.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")
    aliases: ClassVar[Mapping[str, Alias]] = {}


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
    """Turn `["lookahead=5", "optimizer.lr=1e-4"]` into `{"lookahead": 5, "optimizer": {"lr": 1e-4}}`.

    Values are YAML.
    """
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
    return build_layered(kind, [content, overrides or {}], where)


def build_layered(kind: type[S], layers: Sequence[Mapping[str, Any]], where: str = "settings") -> S:
    """Validate several contents, each laid on top of those before it. Each may give a setting by any of its names."""
    merged: dict[str, Any] = {}
    for layer in layers:
        merged = _merge(merged, _by_canonical_names(kind, layer, where))
    for defaults in [alias.defaults for old, alias in kind.aliases.items() if any(_has(x, old) for x in layers)]:
        for path, value in defaults.items():
            merged = _merge(_nested(path, value), merged)
    try:
        return kind.model_validate(merged)
    except ValidationError as error:
        raise _explain(kind, error, where) from error


def load_settings(kind: type[S], path: str | Path | Sequence[str | Path], overrides: Sequence[str] = ()) -> S:
    """Read a recipe file, or several of which each is laid on top of those before it, and `key=value` overrides into
    `kind`.
    """
    paths = [path] if isinstance(path, str | Path) else path
    layers = [*(read_yaml(each) for each in paths), parse_overrides(overrides)]
    return build_layered(kind, layers, " + ".join(map(str, paths)))


def deprecated_names_help(kind: type[Settings]) -> str:
    """The old names that settings still have, for `--help`; empty where there are none."""
    lines = [f"  {old} -> {alias.name}" for old, alias in kind.aliases.items() if alias.deprecated]
    return "\n".join(["renamed settings (the old names are accepted in this version):", *lines]) if lines else ""


def _by_canonical_names(kind: type[Settings], content: Mapping[str, Any], where: str) -> dict[str, Any]:
    """A copy of `content` with each alias moved to the name it stands for."""
    result = deepcopy(dict(content))
    for old, alias in kind.aliases.items():
        if not _has(result, old):
            continue
        if _has(result, alias.name):
            raise UserError(f"{where}: {old!r} and {alias.name!r} are the same setting; leave out {old!r}")
        result = _merge(result, _nested(alias.name, _pop(result, old.split("."))))
        if alias.deprecated:
            _warn_once(where, old, alias.name)
    return result


@cache
def _warn_once(where: str, old: str, new: str) -> None:
    logger.warning(
        "%s: setting %r is now called %r; the old name will be refused by the next version", where, old, new
    )


def _has(content: Mapping[str, Any], path: str) -> bool:
    level: Any = content
    for part in path.split("."):
        if not isinstance(level, Mapping) or part not in level:
            return False
        level = level[part]
    return True


def _pop(content: dict[str, Any], path: Sequence[str]) -> Any:
    """Take the value at `path` out of nested mappings, and the mappings that this leaves empty."""
    if len(path) == 1:
        return content.pop(path[0])
    value = _pop(content[path[0]], path[1:])
    if not content[path[0]]:
        del content[path[0]]
    return value


def _nested(path: str, value: Any) -> dict[str, Any]:
    for part in reversed(path.split(".")):
        value = {part: value}
    return value


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


def _explain(kind: type[Settings], error: ValidationError, where: str) -> UserError:
    first = error.errors()[0]
    path = [str(part) for part in first["loc"]]
    name = ".".join(path)
    in_block = [alias.name for old, alias in kind.aliases.items() if old.startswith(f"{name}.")]
    if first["type"] == "extra_forbidden" and in_block and isinstance(first["input"], Mapping):
        known = [path.rpartition(".")[2] for path in in_block]
        return UserError(f"{where}: {unknown_name('setting', str(next(iter(first['input']), '')), known)}")
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
