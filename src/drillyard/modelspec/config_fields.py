"""The fields of a config.json as a family reads them: defaults filled in, types checked, unknown ones refused.

Three kinds of fields exist. Those that a family declares decide shapes or attended lengths. Those in
ignored_fields.py decide neither: numerics, dropout, rotary tables, token ids, routing scores, bookkeeping. Any other
field
could change shapes behind our back, so a value that switches something on is an error; null, false, 0 and an empty list
or dictionary switch nothing on.
"""

from __future__ import annotations

import difflib
from collections.abc import Mapping
from typing import Any, Final

from drillyard.errors import UserError
from drillyard.modelspec.families import Family, Switch
from drillyard.modelspec.ignored_fields import is_ignored

REMEDY: Final = "\nGive --params (and --active-params) instead, or --build to count the model that transformers builds."
_ACTIVATIONS: Final = ("hidden_activation", "hidden_act", "activation_function", "activation")

_SIZES: Final = ("hidden_size", "num_hidden_layers", "num_attention_heads", "vocab_size")


class ConfigFields:
    """The fields of one config under one family. Every reader raises UserError where the value has a wrong type."""

    def __init__(
        self,
        config: Mapping[str, Any],
        model_type: str,
        family: Family,
        *,
        source: str,
        built: bool,
    ) -> None:
        """`source` names the config in errors. `built`: transformers has built the model, so fields that it does not
        read are ignored."""
        defaults, aliases, fixed = family.defaults, family.aliases, family.fixed
        self.source = source
        self.model_type = model_type
        self.activation = next((config[name] for name in _ACTIVATIONS if isinstance(config.get(name), str)), None)
        self._values = dict(defaults)
        self.left_out = [name for name in _SIZES if name not in {aliases.get(given, given) for given in config}]
        """Sizes that every model has and the config does not give: those of transformers count."""
        for name, value in config.items():
            own = aliases.get(name, name)
            if own in defaults:
                self._set(own, name, value, config)
            elif not value or built or name in family.ignored or is_ignored(name):
                continue
            elif name not in fixed:
                near = difflib.get_close_matches(name, defaults, n=1)
                hint = f" (did you mean {near[0]}?)" if near else ""
                raise self.error(f"{name}: {model_type} has no such field{hint}, and it may change shapes", remedy=True)
            elif value not in fixed[name]:
                known = " or ".join(repr(choice) for choice in fixed[name])
                raise self.error(f"{name} is {value!r}; of {model_type} only {known} is known", remedy=True)

    def _set(self, own: str, name: str, value: Any, config: Mapping[str, Any]) -> None:
        """Take a value under its own name or another one, which may stand beside each other but not contradict."""
        beside = config.get(own)
        if own != name and beside is not None:
            if value is not None and value != beside:
                raise self.error(f"{name} is {value!r}, but {own}, which means the same, is {beside!r}")
            return
        self._values[own] = value

    def error(self, problem: str, *, remedy: bool = False) -> UserError:
        """The exception for a problem with this config; `remedy` adds how to go on without knowing the shapes."""
        return UserError(f"{self.source}: {problem}.{REMEDY if remedy else ''}")

    def integer(self, name: str, derived: int | None = None, *, minimum: int = 1) -> int:
        """An integer of at least `minimum`; `derived` where the field is null."""
        value = self._values[name]
        if value is None and derived is not None:
            return derived
        if isinstance(value, bool) or not isinstance(value, int) or value < minimum:
            kind = "a positive integer" if minimum == 1 else f"an integer of at least {minimum}"
            raise self.error(f"{name} must be {kind}, found {value!r}")
        return value

    def optional_integer(self, name: str) -> int | None:
        return None if self._values[name] is None else self.integer(name)

    def flag(self, name: str) -> bool:
        """True or false; null counts as false."""
        value = self._values[name]
        if value is not None and not isinstance(value, bool):
            raise self.error(f"{name} must be true or false, found {value!r}")
        return bool(value)

    def switch(self, setting: Switch) -> bool:
        """A constant of the family, or the flag that a config sets."""
        return self.flag(setting) if isinstance(setting, str) else setting

    def sequence(self, name: str) -> list[Any] | None:
        value = self._values[name]
        if value is not None and not isinstance(value, list | tuple):
            raise self.error(f"{name} must be a list, found {value!r}")
        return None if value is None else list(value)

    def layer_indices(self, name: str) -> frozenset[int] | None:
        """A list of layers by index, from 0; null gives None."""
        value = self.sequence(name)
        wrong = next((index for index in value or () if isinstance(index, bool) or not isinstance(index, int)), None)
        if wrong is not None:
            raise self.error(f"{name} must be a list of integers, found {wrong!r} in it")
        return None if value is None else frozenset(value)

    def value(self, name: str) -> Any:
        """The raw value, for fields of more than one type."""
        return self._values[name]

    def has(self, name: str) -> bool:
        return name in self._values

    # The shape that every family has.

    @property
    def hidden(self) -> int:
        return self.integer("hidden_size")

    @property
    def layers(self) -> int:
        return self.integer("num_hidden_layers")

    @property
    def vocab(self) -> int:
        return self.integer("vocab_size")

    @property
    def heads(self) -> int:
        return self.integer("num_attention_heads")

    @property
    def kv_heads(self) -> int:
        kv_heads = self.integer("num_key_value_heads", self.heads) if self.has("num_key_value_heads") else self.heads
        if self.heads % kv_heads:
            raise self.error(f"{self.heads} attention heads do not divide by {kv_heads} key-value heads")
        return kv_heads

    @property
    def head_dim(self) -> int:
        if self.has("head_dim") and self.value("head_dim") is not None:
            return self.integer("head_dim")
        if self.hidden % self.heads:
            raise self.error(f"the hidden size {self.hidden} does not divide by {self.heads} attention heads")
        return self.hidden // self.heads
