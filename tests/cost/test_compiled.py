import numba
import pytest

from partopt.cost import compiled as module


def test_without_a_place_for_the_cache_functions_are_compiled_without_it(monkeypatch):
    """numba refuses `cache=True` where neither the package's folder nor the user's can be
    written.
    """

    def refusing(cache=False, **options):
        if cache:
            raise RuntimeError("cannot cache function 'twice': no locator available for file")
        return numba.njit(**options)

    monkeypatch.setattr(module, "njit", lambda **options: refusing(**options))

    @module.compiled()
    def twice(x):
        return 2 * x

    assert twice(3) == 6


def test_options_reach_numba(monkeypatch):
    given = {}
    monkeypatch.setattr(
        module, "njit", lambda **options: given.update(options) or (lambda function: function)
    )
    module.compiled(inline="always")(lambda: None)
    assert given == {"cache": True, "inline": "always"}


def test_what_numba_cannot_compile_still_fails():
    with pytest.raises(numba.core.errors.NumbaError):
        module.compiled()(lambda x: x.nothing)(1)
