"""Data flows up, imports flow down: each module imports its own layer or a lower one, and outside packages by one door.

Lower layers come first. A module belongs to the longest prefix that matches it.
"""

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

PACKAGE = Path(__file__).parent.parent / "slotpy"
FOUNDATION = [
    "errors", "units", "config", "machine", "budget", "governor", "lock", "native",
]  # fmt: skip
LAYERS = [
    ("foundation", [*FOUNDATION, ""]),
    ("checkpoint", ["checkpoint"]),
    ("hub", ["hub"]),
    ("store", ["store"]),
    ("slots", ["slots"]),
    ("layers", ["layers"]),
    ("models", ["models"]),
    ("engine", ["engine", "demo", "doctor"]),
    ("server", ["server"]),
    ("cli", ["cli"]),
]
DOORS = {
    "aiohttp": ["server"],
    "click": ["cli"],
    "huggingface_hub": ["hub.listing"],
    "httpcore2": ["hub.fetch"],
    "httpx2": ["hub.listing", "hub.fetch"],
    "ctypes": ["native", "store"],
    "jinja2": ["engine"],
    "llguidance": ["engine.grammar"],
    "mlx": ["slots.backings", "slots.cache", "slots.resizing", "layers", "models", "engine", "doctor.checks"],
    "mlx_lm": ["engine.tools"],
    "prometheus_client": ["server.metrics"],
    "psutil": ["machine.hardware"],
    "rich": ["cli"],
    "safetensors": ["engine.check", "demo"],
    "tokenizers": ["engine.text"],
}


def modules() -> list[str]:
    paths = (p.relative_to(PACKAGE).with_suffix("") for p in PACKAGE.rglob("*.py"))
    return sorted(".".join(p.parts).removesuffix("__init__").rstrip(".") for p in paths)


def imports(module: str) -> Iterator[str]:
    """Yield the absolute names a module imports, everywhere in its source."""
    stem = PACKAGE / Path(*module.split(".")) if module else PACKAGE
    path = stem.with_suffix(".py") if stem.with_suffix(".py").exists() else stem / "__init__.py"
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{module}: imports are written in full"
            yield node.module
            yield from (f"{node.module}.{alias.name}" for alias in node.names)


def within(module: str, prefixes: list[str]) -> bool:
    return any(module == p or module.startswith(f"{p}.") for p in prefixes)


def layer_of(module: str) -> int:
    found = [i for i, (_, prefixes) in enumerate(LAYERS) if within(module, prefixes)]
    assert found, f"slotpy.{module} has no layer: add it to LAYERS"
    return found[0]


def misplaced(module: str, imported: Iterator[str]) -> list[str]:
    """List the imports that point up, or go around a door."""
    problems = []
    for name in imported:
        root, _, rest = name.partition(".")
        if root == "slotpy":
            known = rest if rest in ALL else rest.rpartition(".")[0]
            if known in ALL and layer_of(known) > layer_of(module):
                problems.append(f"imports slotpy.{known} of a higher layer")
        elif root in DOORS and not within(module, DOORS[root]):
            problems.append(f"imports {root}; only {', '.join(DOORS[root])} may")
        elif name == "os.environ":
            problems.append("reads the environment; only config may")
    return problems


ALL = modules()


@pytest.mark.parametrize("module", ALL)
def test_imports_flow_down_and_through_their_doors(module):
    assert misplaced(module, imports(module)) == []


@pytest.mark.parametrize("module", [m for m in ALL if m != "config"])
def test_only_config_touches_the_environment(module):
    stem = PACKAGE / Path(*module.split(".")) if module else PACKAGE
    path = stem.with_suffix(".py") if stem.with_suffix(".py").exists() else stem / "__init__.py"
    names = {ast.unparse(n) for n in ast.walk(ast.parse(path.read_text())) if isinstance(n, ast.Attribute | ast.Name)}
    assert not names & {"os.environ", "os.getenv", "os.putenv"}


@pytest.mark.parametrize(
    ("module", "name"),
    [("store", "slotpy.engine.session"), ("slots.table", "mlx.core"), ("engine.session", "click")],
)
def test_the_rule_itself_finds_a_misplaced_import(module, name):
    assert misplaced(module, iter([name])) != []
