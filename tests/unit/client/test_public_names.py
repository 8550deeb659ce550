"""The public names of quire.client are imported when they are used, and are what a type checker takes them for."""

import ast
import subprocess
import sys
from pathlib import Path

import quire.client


def names_of_type_checkers() -> dict[str, str]:
    """The module of each name in the block `if TYPE_CHECKING`."""
    assert quire.client.__file__ is not None
    tree = ast.parse(Path(quire.client.__file__).read_text())
    (block,) = (each for each in tree.body if isinstance(each, ast.If) and isinstance(each.test, ast.Name))
    imports = [each for each in block.body if isinstance(each, ast.ImportFrom)]
    return {name.name: str(each.module) for each in imports for name in each.names}


def test_the_table_has_the_names_of_type_checkers() -> None:
    assert names_of_type_checkers() == quire.client._MODULES
    assert sorted(quire.client.__all__) == sorted(names_of_type_checkers())


def test_each_name_is_its_modules_own() -> None:
    for name, module in names_of_type_checkers().items():
        assert getattr(quire.client, name) is getattr(sys.modules[module], name)
        assert name in dir(quire.client)


def test_a_name_that_is_none() -> None:
    assert not hasattr(quire.client, "Nothing")


def test_an_error_is_imported_without_the_engine() -> None:
    code = "import sys; from quire.client.errors import QuireError; print({'grpc', 'google'} & sys.modules.keys())"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "set()"
