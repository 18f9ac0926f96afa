"""The order of the rooms: a module imports only from its own room and from rooms before it."""

import ast
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
LIBRARY = (
    "base config prompts tokens models cost drafting engine measure recordings servers"
    " search training evidence"
)
# `cluster` and `dashboards` stand side by side: neither imports the other.
ROOMS = [
    *({f"specdec_core.{room}"} for room in LIBRARY.split()),
    {"cluster", "dashboards"},
    {"jobs"},
    {"research"},
]


def imports(folder):
    """What each module below `folder` imports of the project, imports for types included."""
    files = {
        ".".join(file.relative_to(folder).with_suffix("").parts).removesuffix(".__init__"): file
        for package in ("specdec_core", "cluster", "dashboards", "jobs", "research")
        for file in (folder / package).rglob("*.py")
    }

    def found(name, file):
        for node in ast.walk(ast.parse(file.read_text())):
            named = []
            if isinstance(node, ast.Import):
                named = [alias.name for alias in node.names]
            elif isinstance(node, ast.ImportFrom) and node.module:
                named = [f"{node.module}.{alias.name}" for alias in node.names]
            for module in named:
                while module and module not in files:
                    module = module.rpartition(".")[0]
                if module not in ("", name):
                    yield module

    return {name: set(found(name, file)) for name, file in files.items()}


def level(module):
    """The place in the order; raises for a module that is in no room."""
    [place] = [
        n
        for n, rooms in enumerate(ROOMS)
        if any(module == room or module.startswith(f"{room}.") for room in rooms)
    ]
    return place


def wrong_way(graph):
    """Imports against the order, and those between rooms that stand side by side."""
    return sorted(
        f"{module} imports {other}"
        for module, others in graph.items()
        for other in others
        if module != "specdec_core"
        and (
            level(other) > level(module)
            or (
                (level(other) == level(module) and len(ROOMS[level(module)]) > 1)
                and other.partition(".")[0] != module.partition(".")[0]
            )
        )
    )


@pytest.fixture(scope="module")
def graph():
    return imports(ROOT)


def test_a_room_imports_only_from_rooms_before_it(graph):
    assert wrong_way(graph) == []


def test_no_modules_import_each_other_in_a_circle(graph):
    # A package's face names its own modules, which is no circle.
    faces = {name for name in graph if any(other.startswith(f"{name}.") for other in graph)}
    inner = {
        module: {other for other in others if other not in faces}
        for module, others in graph.items()
        if module not in faces
    }
    try:
        TopologicalSorter(inner).prepare()
    except CycleError as error:
        pytest.fail(" → ".join(error.args[1]))


def test_an_import_against_the_order_is_found(tmp_path):
    for room, text in {
        "specdec_core/tokens": "def f():\n    from specdec_core.engine.a import x",
        "specdec_core/engine": "from specdec_core.tokens import a",
        "dashboards": "import cluster.a",
        "cluster": "from specdec_core.engine import a",
    }.items():
        (tmp_path / room).mkdir(parents=True)
        (tmp_path / room / "a.py").write_text(text)
    assert wrong_way(imports(tmp_path)) == [
        "dashboards.a imports cluster.a",
        "specdec_core.tokens.a imports specdec_core.engine.a",
    ]


def test_no_two_classes_share_a_name():
    places: dict[str, list[str]] = {}
    for package in ("specdec_core", "cluster", "dashboards", "jobs", "research"):
        for file in (ROOT / package).rglob("*.py"):
            for node in ast.walk(ast.parse(file.read_text())):
                if isinstance(node, ast.ClassDef):
                    places.setdefault(node.name, []).append(str(file.relative_to(ROOT)))
    assert {name: files for name, files in places.items() if len(files) > 1} == {}
