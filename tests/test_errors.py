"""The tree drawn in the errors' docstring is the tree of the classes."""

from __future__ import annotations

import inspect
import pickle
import re

import pytest

from tpucache import errors


def drawn_tree() -> dict[str, tuple[str, str]]:
    """Return each drawn class with its parent and its text."""
    tree: dict[str, tuple[str, str]] = {}
    branch: list[str] = []
    for line in (errors.__doc__ or "").splitlines():
        found = re.fullmatch(r"([│├└─ ]*)([A-Z]\w*Error)\b *(.*)", line)
        if found:
            depth = len(found[1]) // 4
            branch[depth:] = [found[2]]
            tree[found[2]] = (branch[depth - 1] if depth else "", found[3])
    return tree


def real_classes() -> dict[str, type[BaseException]]:
    return {
        name: value
        for name, value in vars(errors).items()
        if inspect.isclass(value) and issubclass(value, BaseException) and value.__module__ == errors.__name__
    }


def test_the_drawn_tree_is_the_real_tree() -> None:
    real = {name: kind.__bases__[0].__name__ for name, kind in real_classes().items()}
    assert {name: parent or "Exception" for name, (parent, _) in drawn_tree().items()} == real


def test_what_an_error_also_is_is_drawn_beside_it() -> None:
    drawn = {name: re.findall(r"also an? (\w+)", text) for name, (_, text) in drawn_tree().items()}
    assert drawn == {name: [base.__name__ for base in kind.__bases__[1:]] for name, kind in real_classes().items()}


@pytest.mark.parametrize("kind", real_classes().values(), ids=real_classes())
def test_every_error_says_what_it_means_and_survives_a_worker(kind: type[BaseException]) -> None:
    assert kind.__doc__
    error = kind("a.png", "is cut short") if kind is errors.SampleError else kind("it broke")
    copied = pickle.loads(pickle.dumps(error))
    assert type(copied) is kind
    assert (str(copied), vars(copied)) == (str(error), vars(error))
    secret = f"no file at {'https:/ann:pa55word@host/x'}?token=t0ken"
    error = kind(secret, "is cut short") if kind is errors.SampleError else kind(secret)
    assert "no file at https:/host/x?***" in str(error)


def test_a_sample_error_names_the_sample_and_the_reason() -> None:
    error = errors.SampleError("a\n.png", "is cut short")
    assert (error.path, error.reason) == ("a\n.png", "is cut short")
    assert str(error) == "'a\\n.png': is cut short"
    assert errors.SampleError("a.png", "is broken:\nat 7\n").reason == "is broken: at 7"
