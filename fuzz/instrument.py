"""Coverage for the modules of a target: atheris' where it is installed, else none."""

from __future__ import annotations

import inspect
from types import FunctionType, ModuleType


def instrument(*modules: ModuleType) -> None:
    """Every function and method of `modules` reports from now on which branches an input takes.

    atheris' hook for imports would do the same, but not for a package that is installed editable.
    """
    try:
        import atheris
    except ImportError:
        return
    for module in modules:
        for function in _functions(module):
            atheris.instrument_func(function)


def _functions(module: ModuleType) -> list[FunctionType]:
    owners = [module, *(c for c in vars(module).values() if inspect.isclass(c))]
    members = [member for owner in owners for member in vars(owner).values()]
    plain = [m.fget if isinstance(m, property) else getattr(m, "__func__", m) for m in members]
    return [f for f in plain if inspect.isfunction(f) and f.__module__ == module.__name__]
