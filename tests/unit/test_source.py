"""The source as a whole: class names, import cycles, platforms, files that docstrings and comments
cite, and words."""

from __future__ import annotations

import ast
import io
import re
import subprocess
import tokenize
from collections import defaultdict
from functools import cache
from pathlib import Path

import pytest

import drillyard

ROOT = Path(__file__).resolve().parents[2]
SOURCE = ROOT / "src" / "drillyard"
# Launchers are packages of these names; the registry lists them, and starters and the example
# configs show them.
PLATFORMS = {
    "slurm": "launch/slurm",
    "ssh": "launch/hosts",
    "vertex": "launch/vertex",
    "local": "launch/hosts",
}
PLATFORM_REGISTRY = "config/platforms.py"
WORDS = re.compile(
    r"(?<![A-Za-z])(told|anew|whoever|mend(s|ed|ing)?|guests?|happenings?|patience)(?![A-Za-z])",
    re.IGNORECASE,
)
# Their tables of words to avoid.
ABOUT_WORDS = {"docs/style.md", "docs/glossary.md", "tests/unit/test_source.py"}
# Nouns of questions, names of Google's, and what an older version printed.
FOREIGN_WORDS = {"text_to_sql_vocabulary.yaml", "network_stacks.yaml"}
CITED_FILE = re.compile(
    r"(?<![\w./{}<>*-])((?:[a-z_0-9]+/)*[a-z_0-9]+\.py|docs/[a-z_0-9]+\.md)(?![\w/])"
)


@cache
def modules() -> dict[str, tuple[Path, ast.Module]]:
    found = {}
    for path in sorted(SOURCE.rglob("*.py")):
        parts = ("drillyard", *path.relative_to(SOURCE).with_suffix("").parts)
        found[".".join(parts[:-1] if parts[-1] == "__init__" else parts)] = (
            path,
            ast.parse(path.read_text("utf-8")),
        )
    return found


def relative(path: Path) -> str:
    return str(path.relative_to(SOURCE))


def test_a_public_class_name_stands_once() -> None:
    places = defaultdict(list)
    for path, tree in modules().values():
        for node in tree.body:
            if isinstance(node, ast.ClassDef) and not node.name.startswith("_"):
                places[node.name].append(relative(path))
    assert {name: paths for name, paths in places.items() if len(paths) > 1} == {}


def imports_of(name: str, tree: ast.Module, *, is_package: bool = False) -> set[str]:
    """Modules of ours that a module imports, those in functions and under TYPE_CHECKING
    included."""
    found = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            # Relative imports count from the package, which a package's own __init__.py is itself.
            parts = name.split(".") if is_package else name.split(".")[:-1]
            base = [*parts[: len(parts) + 1 - node.level], *([node.module] if node.module else [])]
            source = ".".join(base) if node.level else str(node.module)
            for alias in node.names:
                full = f"{source}.{alias.name}"
                found.add(full if full in modules() else source)
    return (found & modules().keys()) - {name}


def import_cycles(edges: dict[str, set[str]]) -> list[list[str]]:
    """Strongly connected groups of two or more modules (Tarjan)."""
    order: dict[str, int] = {}
    lowest: dict[str, int] = {}
    stack: list[str] = []
    cycles: list[list[str]] = []

    def visit(name: str) -> None:
        order[name] = lowest[name] = len(order)
        stack.append(name)
        for other in sorted(edges[name]):
            if other not in order:
                visit(other)
            if other in stack:
                lowest[name] = min(lowest[name], lowest[other])
        if lowest[name] == order[name]:
            group = stack[stack.index(name) :]
            del stack[stack.index(name) :]
            if len(group) > 1:
                cycles.append(sorted(group))

    for name in edges:
        if name not in order:
            visit(name)
    return cycles


def test_files_import_each_other_in_one_direction() -> None:
    imports = {
        name: imports_of(name, tree, is_package=path.name == "__init__.py")
        for name, (path, tree) in modules().items()
    }
    assert import_cycles(imports) == []


def room_imports() -> dict[str, set[str]]:
    """The rooms that each room imports: directories of src/drillyard."""
    rooms: dict[str, set[str]] = {
        path.name: set() for path in SOURCE.iterdir() if (path / "__init__.py").exists()
    }
    for name, (path, tree) in modules().items():
        room = relative(path).split("/")[0]
        if room in rooms:
            found = imports_of(name, tree, is_package=path.name == "__init__.py")
            rooms[room] |= {
                other.split(".")[1] for other in found if "." in other
            } & rooms.keys() - {room}
    return rooms


def test_rooms_import_each_other_in_one_direction_but_those_that_the_document_names() -> None:
    rooms = room_imports()
    assert import_cycles(rooms) == [["cli", "faults"]]
    assert "except `cli` and `faults`:" in (ROOT / "docs/architecture.md").read_text("utf-8")
    assert rooms["config"] == rooms["modelspec"] == rooms["loglines"] == set() and rooms[
        "hardware"
    ] == {"config"}


def test_relative_imports_count() -> None:
    tree = ast.parse(
        "from . import state_file\nfrom .job import SECONDS_AFTER_FAILURE\nfrom ..plan import Plan"
    )
    package = "drillyard.launch"
    found = {f"{package}.agent.state_file", f"{package}.agent.job", f"{package}.plan"}
    assert imports_of(f"{package}.agent.leader", tree) == found
    assert imports_of(f"{package}.agent", tree, is_package=True) == found


def test_a_cycle_is_found() -> None:
    assert import_cycles({"a": {"b"}, "b": {"c"}, "c": {"b"}, "d": {"a"}}) == [["b", "c"]]


def places_of(platform: str) -> tuple[str, ...]:
    """The places that may name a platform: its launcher, and what makes its clusters."""
    makers = {"slurm": "provision/nebius/soperator.py"}
    return f"{PLATFORMS[platform]}/", makers.get(platform, f"provision/{platform}/")


def platforms_named(place: str, tree: ast.Module) -> list[str]:
    """Where a platform is named outside of its launcher: as a value, in a collection, as a section
    of the config, or compared."""
    found = []
    for node in ast.walk(tree):
        name = None
        elements = node.keys if isinstance(node, ast.Dict) else getattr(node, "elts", [])
        listed = [
            str(each.value)
            for each in elements
            if isinstance(each, ast.Constant) and each.value in PLATFORMS
        ]
        # A list of one is a command or an example.
        if len(listed) > 1 or (listed and len(elements) == 1 and not isinstance(node, ast.List)):
            name = next((one for one in listed if not place.startswith(places_of(one))), None)
        elif isinstance(node, ast.Constant) and node.value in ("slurm", "vertex"):
            name = str(node.value)
        elif isinstance(node, ast.Attribute) and node.attr in ("slurm", "vertex"):
            name = node.attr
        elif isinstance(node, ast.Compare | ast.MatchValue) and "platform" in ast.unparse(node):
            name = next((one for one in PLATFORMS if repr(one) in ast.unparse(node)), None)
        if name is not None and not place.startswith(places_of(name)):
            found.append(f"{place}:{node.lineno}: {name}")
    return found


def test_a_platform_is_named_by_its_launcher_only() -> None:
    named = [
        line
        for path, tree in modules().values()
        if relative(path) != PLATFORM_REGISTRY
        for line in platforms_named(relative(path), tree)
    ]
    assert named == []


def test_a_named_platform_is_found() -> None:
    tree = ast.parse("if cluster.platform == 'ssh' or cluster.slurm.partition: pass")
    assert platforms_named("cli/launch.py", tree) == [
        "cli/launch.py:1: ssh",
        "cli/launch.py:1: slurm",
    ]
    assert platforms_named("launch/hosts/plan.py", tree) == ["launch/hosts/plan.py:1: slurm"]


@pytest.mark.parametrize(
    "text", ["('local', 'ssh')", "['ssh', 'local']", "{'local'}", "('local',)", "{'local': 1}"]
)
def test_a_platform_in_a_collection_is_found(text: str) -> None:
    assert platforms_named("launch/agent/index.py", ast.parse(f"LED_HERE = {text}")) != []
    assert platforms_named("launch/hosts/plan.py", ast.parse(f"LED_HERE = {text}")) == []
    assert (
        platforms_named(
            "programs.py", ast.parse("words = ['ssh']; kinds = {'local': 1, 'srun': 2}")
        )
        == []
    )


def explanations(text: str, tree: ast.Module) -> list[str]:
    """Docstrings, those of attributes included, and comments, where one may cite a file."""
    expressions = [node.value for node in ast.walk(tree) if isinstance(node, ast.Expr)]
    found = [
        node.value
        for node in expressions
        if isinstance(node, ast.Constant) and isinstance(node.value, str)
    ]
    # To find tokens takes ten times as long.
    if not re.search(rf"#.*(?:{CITED_FILE.pattern})", text):
        return found
    tokens = tokenize.generate_tokens(io.StringIO(text).readline)
    return [*found, *(token.string for token in tokens if token.type == tokenize.COMMENT)]


@cache
def tracked_files() -> tuple[str, ...]:
    listed = subprocess.run(
        ["git", "ls-files"], cwd=ROOT, capture_output=True, text=True, check=False
    )
    if listed.returncode == 0 and listed.stdout:
        return tuple(line for line in listed.stdout.splitlines() if (ROOT / line).is_file())
    return tuple(
        str(path.relative_to(ROOT))
        for path in ROOT.rglob("*")
        if path.is_file() and ".venv" not in path.parts
    )


@cache
def file_names() -> frozenset[str]:
    """Our files under every name that cites them: `agent/leader.py` for
    `src/drillyard/launch/agent/leader.py`."""
    parts = [name.split("/") for name in tracked_files()]
    return frozenset("/".join(each[start:]) for each in parts for start in range(len(each)))


def missing_files(text: str) -> list[str]:
    """Files that `text` cites and that are not ours."""
    return [name for name in CITED_FILE.findall(text) if name not in file_names()]


# Files of others that docstrings and comments cite.
FOREIGN_FILES = {
    "modeling_llama.py",
    "integrations/moe.py",
    "torch/distributed/fsdp/_fully_shard/_fsdp_param.py",
    "torch/_inductor/kernel/flex/flex_attention.py",
    "metric_logger.py",
    "megatron/training/training.py",
    "torchtitan/components/metrics.py",
    "torchtune/training/metric_logging.py",
    "torchtune/training/memory.py",
    "recipes/full_finetune_distributed.py",
    "process_training_results.py",
    "src/transformers/trainer.py",
    "src/transformers/trainer_callback.py",
    "src/transformers/trainer_utils.py",
    "src/transformers/trainer_pt_utils.py",
    "swift/trainers/callback.py",
    "src/lightning/pytorch/callbacks/progress/tqdm_progress.py",
    "src/llamafactory/train/callbacks.py",
    "src/olmo_core/train/callbacks/console_logger.py",
    "src/olmo_core/train/callbacks/speed_monitor.py",
    "train.py",
    "litgpt/pretrain.py",
    "litgpt/finetune/full.py",
}


def test_docstrings_and_comments_cite_files_that_exist() -> None:
    missing = {
        relative(path): names
        for path, tree in modules().values()
        for texts in [explanations(path.read_text("utf-8"), tree)]
        if (
            names := [
                name for text in texts for name in missing_files(text) if name not in FOREIGN_FILES
            ]
        )
    }
    assert missing == {}


def test_a_docstring_of_an_attribute_and_a_comment_are_found() -> None:
    text = '"""a.py"""\nX = 1  # b.py\n"""c.py"""\nclass A:\n    y: int\n    """d.py"""\n'
    assert explanations(text, ast.parse(text)) == ["a.py", "c.py", "d.py", "# b.py"]


@pytest.mark.parametrize(
    "name",
    [
        "docs/architecture.md",
        "docs/rooms.md",
        "docs/glossary.md",
        "CONTRIBUTING.md",
        "README.md",
        "docs/failures.md",
        "docs/launch.md",
        "docs/security.md",
        "docs/train.md",
    ],
)
def test_documents_cite_files_that_exist(name: str) -> None:
    assert missing_files((ROOT / name).read_text("utf-8")) == []


def test_words_that_are_not_used() -> None:
    found = []
    for name in tracked_files():
        path = ROOT / name
        if (
            name in ABOUT_WORDS
            or path.name in FOREIGN_WORDS
            or path.suffix not in (".py", ".md", ".yaml", ".toml", ".sh", ".sbatch", ".js", ".css")
        ):
            continue
        for number, line in enumerate(path.read_text("utf-8").splitlines(), 1):
            # Keys of exit reports of an earlier version and of messages between agents; a flag of
            # theirs; keys of Axolotl; a block of Google's node pools.
            foreign = (
                '["`]told["`]|patience_seconds|--patience|(stopping|watchdog)_patience'
                "|guest_accelerator"
            )
            if WORDS.search(re.sub(foreign, "", line).replace("_", " ")):
                found.append(f"{name}:{number}: {line.strip()[:100]}")
    assert found == []


def names_of(module: str) -> set[str]:
    """What can be imported from a module: its names outside functions, and a package's modules."""
    _, tree = modules()[module]
    found = {name.removeprefix(f"{module}.") for name in modules() if name.startswith(f"{module}.")}
    nodes: list[ast.AST] = [tree]
    while nodes:
        node = nodes.pop()
        for child in ast.iter_child_nodes(node):
            if isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
                found.add(child.name)
            elif isinstance(child, ast.alias):
                found.add(child.asname or child.name)
            elif isinstance(child, ast.Name) and isinstance(child.ctx, ast.Store):
                found.add(child.id)
            if not isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
                nodes.append(child)
    return found | (set(drillyard.__all__) if module == "drillyard" else set())


@pytest.mark.parametrize("directory", ["benchmarks", "demo", "tools"])
def test_programs_beside_the_package_import_what_it_has(directory: str) -> None:
    missing = [
        f"{path.relative_to(ROOT)}:{node.lineno}: {node.module}.{alias.name}"
        for path in sorted((ROOT / directory).rglob("*.py"))
        for node in ast.walk(ast.parse(path.read_text("utf-8")))
        if isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] == "drillyard"
        for alias in node.names
        if node.module not in modules() or alias.name not in names_of(str(node.module))
    ]
    assert missing == []
