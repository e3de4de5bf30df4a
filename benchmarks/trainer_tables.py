"""The tables of other trainers' keys against the packages themselves.

    pip download --no-deps --dest DIR axolotl trl llamafactory
    python benchmarks/trainer_tables.py DIR

Reads the classes of each wheel's settings as source (nothing is imported) and transformers'
TrainingArguments as installed; prints keys that a table lacks and defaults that differ. DeepSpeed's
are constants and pydantic models in several files: they are in
`tests/unit/config/trainer_defaults/deepspeed.json`, read by eye.
"""

from __future__ import annotations

import ast
import dataclasses
import sys
import zipfile
from pathlib import Path
from typing import Any

from drillyard.config.trainer_table import table_of

FILES = {
    "axolotl": (
        "utils/schemas/model.py ModelInputConfig ModelOutputConfig",
        "utils/schemas/peft.py LoraConfig ReLoRAConfig",
        "utils/schemas/training.py HyperparametersConfig JaggedLRConfig",
        "utils/schemas/integrations.py *",
        "utils/schemas/config.py AxolotlInputConfig",
    ),
    "trl": (
        "trainer/sft_config.py SFTConfig",
        "trainer/model_config.py ModelConfig",
        "scripts/utils.py ScriptArguments",
    ),
    "llamafactory": (
        "hparams/data_args.py *",
        "hparams/finetuning_args.py *",
        "hparams/model_args.py *",
    ),
}
UNREADABLE = object()


def main() -> int:
    """1 where a key is missing or a default differs."""
    wrong = 0
    for tool, files in FILES.items():
        (wheel,) = Path(sys.argv[1]).glob(f"{tool}-*.whl")
        stated: dict[str, Any] = {}
        with zipfile.ZipFile(wheel) as archive:
            for entry in files:
                path, *names = entry.split()
                source = archive.read(f"{tool}/{path}").decode()
                stated |= fields(source, names)
        wrong += compare(tool, wheel.name, stated)
    from transformers import TrainingArguments, __version__

    installed = {field.name: field.default for field in dataclasses.fields(TrainingArguments)}
    plain = {
        key: value if value is None or isinstance(value, bool | int | float | str) else UNREADABLE
        for key, value in installed.items()
    }
    return int(bool(wrong + compare("training_arguments", f"transformers {__version__}", plain)))


def compare(tool: str, name: str, stated: dict[str, Any]) -> int:
    """Print the differences between a table and the defaults that a package states."""
    keys = table_of(tool).keys
    missing = sorted(stated.keys() - keys.keys() - table_of(tool).aliases.keys())
    differing = {
        key: (keys[key].default, default)
        for key, default in stated.items()
        if key in keys and default is not UNREADABLE and keys[key].default != default
    }
    print(f"{name}: {len(stated)} keys, missing {missing}, differing {differing}")
    return len(missing) + len(differing)


def fields(source: str, names: list[str]) -> dict[str, Any]:
    """Annotated fields of classes, under their aliases, with their defaults."""
    found: dict[str, Any] = {}
    for node in ast.parse(source).body:
        if isinstance(node, ast.ClassDef) and (node.name in names or names == ["*"]):
            for each in node.body:
                if not isinstance(each, ast.AnnAssign) or not isinstance(each.target, ast.Name):
                    continue
                if "init=False" not in ast.unparse(each):
                    key, default = stated_default(each.target.id, each.value)
                    found[key] = default
    return found


def stated_default(name: str, value: ast.expr | None) -> tuple[str, Any]:
    """Name or alias, and the default; UNREADABLE where it is computed."""
    if isinstance(value, ast.Call):
        arguments = {each.arg: each.value for each in value.keywords}
        alias = arguments.get("alias")
        shown = alias.value if isinstance(alias, ast.Constant) else name
        if "default_factory" in arguments:
            return str(shown), UNREADABLE
        first = value.args[0] if value.args else None
        return str(shown), literal(arguments.get("default", first))
    return name, literal(value)


def literal(value: ast.expr | None) -> Any:
    """The value of a literal, None of a field without a default."""
    try:
        found = None if value is None else ast.literal_eval(value)
    except ValueError:
        return UNREADABLE
    return None if found is ... else found


if __name__ == "__main__":
    sys.exit(main())
