"""Compare names and parameters of fusec's classes with those of the installed onnxruntime."""

from __future__ import annotations

import inspect
from pathlib import Path
from typing import Any

import numpy as np
import onnxruntime
import pytest

from fusec import session
from fusec.session.missing_names import MODULE, WITHOUT
from fusec.session.settings import HONOURED, IGNORED

CLASSES = ("InferenceSession", "OrtValue", "IOBinding", "SessionOptions", "RunOptions")
# attributes of options exist on objects only
MADE = {"SessionOptions": session.SessionOptions(), "RunOptions": session.RunOptions()}


def public(kind: Any) -> set[str]:
    return {name for name in dir(kind) if not name.startswith("_")}


@pytest.mark.parametrize("name", CLASSES)
def test_every_public_name_is_there_or_has_a_reason(name: str) -> None:
    theirs, ours = public(getattr(onnxruntime, name)), public(MADE.get(name, getattr(session, name)))
    without = set(WITHOUT.get(name, {}))
    assert theirs - ours == without
    assert all(WITHOUT.get(name, {}).values())


def test_every_call_of_the_module_is_there_or_has_a_reason() -> None:
    theirs = {name for name in public(onnxruntime) if callable(getattr(onnxruntime, name))} | {"capi"}
    assert theirs - set(session.__all__) - {"ModelMetadata"} == set(MODULE)
    manual = (Path(__file__).parents[2] / "docs" / "session.md").read_text()
    assert all(f"`{name}`" in manual and reason in manual for name, reason in MODULE.items())


def test_the_version_is_that_of_the_onnxruntime_that_is_compared() -> None:
    assert session.__version__ == session.get_version_string() == onnxruntime.__version__
    assert f"with the interface of onnxruntime {onnxruntime.__version__}" in session.get_build_info()


def test_calls_that_change_nothing_take_the_same_parameters() -> None:
    """Of functions in C++ only the text of the documentation names parameters."""
    own, theirs = (inspect.signature(module.preload_dlls).parameters for module in (session, onnxruntime))
    assert list(own) == list(theirs)
    for name, parameter in inspect.signature(session.set_global_thread_pool_sizes).parameters.items():
        assert parameter.default == 0
        assert f"{name}: " in onnxruntime.set_global_thread_pool_sizes.__doc__
    session.set_default_logger_verbosity(3)
    session.disable_telemetry_events()
    session.enable_telemetry_events()


@pytest.mark.parametrize("name", ["InferenceSession", "OrtValue", "IOBinding"])
def test_parameters_have_the_same_names_and_order(name: str) -> None:
    """Ours may have more keywords; classes that onnxruntime writes in C++ have no signature."""
    theirs, ours = getattr(onnxruntime, name), getattr(session, name)
    for method in (public(theirs) - set(WITHOUT.get(name, {}))) | {"__init__"}:
        given = inspect.signature(getattr(theirs, method)).parameters
        own = inspect.signature(getattr(ours, method)).parameters
        kinds = (inspect.Parameter.VAR_KEYWORD, inspect.Parameter.VAR_POSITIONAL)
        wanted = [p.name for p in given.values() if p.kind not in kinds]
        assert [n for n, p in own.items() if p.kind not in kinds][: len(wanted)] == wanted, f"{name}.{method}"
        for key in wanted:
            required = given[key].default is inspect.Parameter.empty
            assert (own[key].default is inspect.Parameter.empty) is required, f"{name}.{method}: {key}"


@pytest.mark.parametrize("name", ["SessionOptions", "RunOptions"])
def test_options_have_the_same_defaults(name: str) -> None:
    theirs = getattr(onnxruntime, name)()
    for field in public(theirs) - set(WITHOUT.get(name, {})):
        if not callable(getattr(theirs, field)):
            want, got = getattr(theirs, field), getattr(MADE[name], field)
            assert getattr(got, "name", got) == getattr(want, "name", want), field


@pytest.mark.parametrize("name", ["GraphOptimizationLevel", "ExecutionMode", "ExecutionOrder"])
def test_enumerations_have_the_same_members(name: str) -> None:
    theirs, ours = getattr(onnxruntime, name), getattr(session, name)
    assert {key: int(value) for key, value in theirs.__members__.items()} == {e.name: e.value for e in ours}


def test_every_session_option_is_honoured_or_ignored_with_a_reason() -> None:
    known = public(onnxruntime.SessionOptions()) - set(WITHOUT["SessionOptions"])
    assert known == set(HONOURED) | set(IGNORED)
    assert not set(HONOURED) & set(IGNORED)
    manual = (Path(__file__).parents[2] / "docs" / "session.md").read_text()
    for table in (HONOURED, IGNORED):
        assert all(f"| `{name}` | {text} |" in manual for name, text in table.items())


def test_fields_of_descriptions_are_the_same() -> None:
    for name in ("NodeArg", "ModelMetadata"):
        ours = getattr(session, name).__dataclass_fields__
        assert public(getattr(onnxruntime, name)) == set(ours)


def test_a_missing_method_says_why() -> None:
    with pytest.raises(AttributeError, match="no attribute 'as_sparse_tensor': fusec has no sparse tensors"):
        session.OrtValue.ortvalue_from_numpy(np.zeros(1)).as_sparse_tensor()
    with pytest.raises(AttributeError, match="no attribute 'set_load_cancellation_flag': loading cannot be"):
        session.SessionOptions().set_load_cancellation_flag(True)
    with pytest.raises(AttributeError, match=r"no attribute 'nothing'$"):
        _ = session.RunOptions().nothing
    assert not hasattr(session.RunOptions(), "add_active_adapter")
    with pytest.raises(AttributeError, match="no attribute 'LoraAdapter': fusec has no LoRA adapters"):
        _ = session.LoraAdapter
    with pytest.raises(AttributeError, match=r"no attribute 'nothing'$"):
        _ = session.nothing
