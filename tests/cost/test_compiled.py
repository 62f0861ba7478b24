"""Machine code is used again as long as no source of it has changed, and no longer."""

import ast
import os
import shutil
import subprocess
import sys
import threading
from pathlib import Path

import numba
import pytest

from partopt.cost import compiled as module
from tests.helpers import ROOT

RUN = "run = 1, 6"  # the first and the last of six members
CALLER = """
from partopt.cost.compiled import compiled
from partopt.cost.called import members
{constants}

@compiled()
def twice(run):
    return FACTOR * members(run[0], run[1])
"""
CALLED = """
from partopt.cost.compiled import compiled

@compiled()
def members(first, last):
    return last - first + 1
"""


@pytest.fixture
def package(tmp_path, monkeypatch) -> Path:
    """A copy of the package, with a compiled function that calls one of another file."""
    monkeypatch.delenv("NUMBA_CACHE_DIR", raising=False)
    shutil.copytree(
        ROOT / "partopt", tmp_path / "partopt", ignore=shutil.ignore_patterns("__pycache__")
    )
    (tmp_path / "partopt/cost/called.py").write_text(CALLED)
    (tmp_path / "partopt/cost/constants.py").write_text("FACTOR = 2.0\n")
    (tmp_path / "partopt/cost/caller.py").write_text(
        CALLER.format(constants="from partopt.cost.constants import FACTOR")
    )
    return tmp_path / "partopt"


def run(package: Path, script: str, **environment: str) -> list[str]:
    done = subprocess.run(
        [sys.executable, "-c", script],
        cwd=package.parent,
        env=os.environ | environment,
        capture_output=True,
        text=True,
        check=True,
    )
    return done.stdout.split()


def twice(package: Path, **environment: str) -> tuple[float, int, Path]:
    """What the compiled function of the copy gives, how often it came from the cache, and from
    which folder.
    """
    script = (
        f"{RUN}; from partopt.cost.caller import twice; print(twice(run)); "
        "print(sum(twice.stats.cache_hits.values())); print(twice.stats.cache_path)"
    )
    value, hits, folder = run(package, script, **environment)
    return float(value), int(hits), Path(folder)


def edit(path: Path, old: str, new: str) -> None:
    """Change a file but neither its size nor its time of modification."""
    content, times = path.read_text(), path.stat()
    assert content.count(old) == 1
    assert len(old) == len(new)
    path.write_text(content.replace(old, new))
    os.utime(path, ns=(times.st_atime_ns, times.st_mtime_ns))


def test_a_changed_formula_is_not_answered_from_the_cache(package):
    """Twice six members are 12; with the sign of the 1 wrong, twice four are 8."""
    first = twice(package)
    assert first[0] == 12.0
    again = twice(package)
    assert again == (12.0, 1, first[2])
    assert first[2].parent == package / "__pycache__/compiled"
    edit(package / "cost/called.py", "last - first + 1", "last - first - 1")
    value, hits, folder = twice(package)
    assert (value, hits) == (8.0, 0)
    assert folder != first[2]
    edit(package / "cost/called.py", "last - first - 1", "last - first + 1")
    assert twice(package) == again


def test_a_changed_constant_is_not_answered_from_the_cache(package):
    """The constant's file has no compiled function itself."""
    assert twice(package)[0] == 12.0
    edit(package / "cost/constants.py", "2.0", "3.0")
    assert twice(package)[:2] == (18.0, 0)


def test_the_cache_lies_where_numba_is_told(package, tmp_path):
    folder = twice(package, NUMBA_CACHE_DIR=str(tmp_path / "cache"))[2]
    assert folder.parent == tmp_path / "cache/partopt"
    assert list(folder.glob("partopt.cost.caller.twice-*.nbc"))


def test_an_installation_that_cannot_be_written_caches_for_the_user(package, tmp_path):
    (package / "__pycache__").write_text("no folder can be made here")
    folder = twice(package, XDG_CACHE_HOME=str(tmp_path / "home"), HOME=str(tmp_path))[2]
    assert folder.parent.parts[-2:] == ("partopt", "compiled")
    assert tmp_path in folder.parents
    assert package not in folder.parents


def test_without_a_place_for_the_cache_functions_are_compiled_without_it(package, tmp_path):
    (package / "__pycache__").write_text("no folder can be made here")
    (tmp_path / "home").write_text("nor here")
    home = str(tmp_path / "home")
    script = (
        f"{RUN}; from partopt.cost.caller import twice; print(twice(run)); "
        "print(twice.stats.cache_path)"
    )
    assert run(package, script, XDG_CACHE_HOME=home, HOME=home) == ["12.0", "None"]


def test_numba_s_own_settings_stay_as_they_are(package):
    script = (
        "import numba; from numba.core import caching; "
        "see = lambda: (numba.config.CACHE_DIR, caching.FunctionCache._impl_class, "
        "caching.CompileResultCacheImpl._locator_classes[:]); before = see(); "
        "import partopt.cost.heap; print(see() == before)"
    )
    assert run(package, script) == ["True"]


def test_without_jit_functions_are_python_s(package):
    script = f"{RUN}; from partopt.cost.caller import twice; print(twice(run))"
    assert run(package, script, NUMBA_DISABLE_JIT="1") == ["12.0"]


def test_help_does_not_import_numba():
    script = (
        "import sys, contextlib, partopt.cli\n"
        "with contextlib.suppress(SystemExit): partopt.cli.main(['--help'])\n"
        "print('numba' in sys.modules)"
    )
    assert run(ROOT / "partopt", script)[-1] == "False"


def test_of_old_folders_the_last_used_are_kept(tmp_path):
    for age in range(10):
        folder = tmp_path / f"old{age}"
        folder.mkdir()
        (folder / "f.nbc").write_bytes(b"code")
        os.utime(folder, (1e9 - age, 1e9 - age))
    module._open_folder(tmp_path / "new")
    kept = {"new", *(f"old{age}" for age in range(module.KEPT - 1))}
    assert {path.name for path in tmp_path.iterdir()} == kept
    (tmp_path / "old9").mkdir()
    module._open_folder(tmp_path / "new")
    assert (tmp_path / "old9").exists(), "a folder that is there already removes no others"


def test_each_use_of_a_folder_is_its_last_use(tmp_path):
    os.utime(module._open_folder(tmp_path / "used"), (1e9, 1e9))
    assert module._open_folder(tmp_path / "used").stat().st_mtime > 1e9


@pytest.fixture
def folder(tmp_path, monkeypatch) -> Path:
    """Where functions of this file are cached, as if it were one of the package's."""
    monkeypatch.setattr(module, "compiled_sources", lambda package: [Path(__file__).resolve()])
    monkeypatch.setattr(module, "cache_folder", lambda: tmp_path / "digest")
    return tmp_path / "digest"


def test_code_is_kept_for_each_signature(folder):
    """numba's private names are as `partopt.cost.compiled` takes them: what one dispatcher
    compiled, another loads.
    """

    def half(x):
        return x / 2

    for argument, hits in ((3, 0), (3.0, 0), (3, 1), (3.0, 1)):
        dispatcher = module.compiled()(half)
        assert dispatcher(argument) == 1.5
        assert sum(dispatcher.stats.cache_hits.values()) == hits, (
            "numba does not use the cache that it is given: numba.core.caching has changed"
        )
    assert len(list(folder.iterdir())) == 2
    dispatcher.recompile()
    assert dispatcher(5.0) == 2.5


def test_code_under_another_key_is_not_used(tmp_path):
    files = module._Files(tmp_path, "f")
    files.save("key", "code")
    files._path("key").rename(files._path("other"))
    assert files.load("other") is None
    assert files.load("key") is None


def test_functions_of_one_name_do_not_share_their_code(folder):
    """They have the same bytecode, in which a constant is a number of its place."""
    assert module.compiled()(lambda x: x + 1)(1) == 2
    assert module.compiled()(lambda x: x + 2)(1) == 3


def test_functions_outside_the_package_are_not_cached(tmp_path, monkeypatch):
    """Nothing would notice that their sources change."""
    monkeypatch.setattr(module, "cache_folder", lambda: tmp_path)
    assert module.compiled()(lambda x: x + 1)(1) == 2
    assert not list(tmp_path.iterdir())


def test_a_cache_that_is_gone_is_made_again(folder):
    """Another process may remove the folder, and what cannot be saved is not needed."""
    assert module.compiled()(lambda x: x + 1)(1) == 2
    shutil.rmtree(folder)
    assert module.compiled()(lambda x: x + 1)(1) == 2
    assert list(folder.iterdir())
    shutil.rmtree(folder)
    folder.write_text("no folder any more")
    assert module.compiled()(lambda x: x + 1)(1) == 2


def test_writers_at_once_leave_a_whole_file(tmp_path):
    files = module._Files(tmp_path, "f")
    codes = [bytes([number]) * 10**6 for number in range(8)]
    writers = [threading.Thread(target=files.save, args=("key", code)) for code in codes]
    for writer in writers:
        writer.start()
    for writer in writers:
        writer.join()
    assert files.load("key") in codes
    assert len(list(tmp_path.iterdir())) == 1


def test_options_reach_numba():
    assert module.compiled(nogil=True)(lambda x: x).targetoptions["nogil"] is True


def test_what_numba_cannot_compile_still_fails():
    with pytest.raises(numba.core.errors.NumbaError):
        module.compiled()(lambda x: x.nothing)(1)


def test_a_package_without_sources_has_no_digest(tmp_path):
    assert module.digest_of(module.compiled_sources(tmp_path)) == ""
    assert module.digest_of(module.compiled_sources(ROOT / "partopt")) != ""


def test_every_source_of_a_constant_is_in_the_digest():
    """A file that a compiled one imports is in it; a constant there must not be made of what that
    file imports in turn.
    """
    sources = module.compiled_sources(module.PACKAGE)
    for path in sources:
        tree = ast.parse(path.read_text())
        origin = {
            alias.asname or alias.name: node.module
            for node in tree.body
            if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("partopt.")
            for alias in node.names
        }
        for node in tree.body:
            if isinstance(node, ast.Assign | ast.AnnAssign) and node.value is not None:
                used = {name.id for name in ast.walk(node.value) if isinstance(name, ast.Name)}
                for module_name in {origin[name] for name in used & origin.keys()}:
                    stem = module.PACKAGE.parent.joinpath(*module_name.split("."))
                    assert {stem.with_suffix(".py"), stem / "__init__.py"} & set(sources), (
                        f"{path}, line {node.lineno}: {module_name} is not in the digest"
                    )
