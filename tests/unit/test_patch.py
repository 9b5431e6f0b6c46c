import inspect

import pytest
import wrapt
from sglang.srt.plugins.hook_registry import HookRegistry, HookType

from kvcanary_plugin.errors import SeamError
from kvcanary_plugin.pool_patcher.patch import Patch, PatchSet, resolve

CALLS = []


class Base:
    def inherited(self, x):
        return ("inherited", x)

    @classmethod
    def who(cls):
        return cls.__name__


class Target(Base):
    def method(self, a, b=2):
        return (a, b)

    @staticmethod
    def static(a):
        return a

    @classmethod
    def make(cls, a):
        return (cls.__name__, a)


class Child(Target):
    pass


def note(wrapped, instance, args, kwargs):
    CALLS.append((wrapped.__name__, args, kwargs))
    return wrapped(*args, **kwargs)


def patch(attribute, parameters, kind="method", owner="Target", **versions):
    return Patch(
        __name__, owner, attribute, note, parameters, "test", versions.pop("since", "1.0"), kind=kind, **versions
    )


EVERY_KIND = (
    patch("method", ("self", "a")),
    patch("static", ("a",), "staticmethod"),
    patch("make", ("cls", "a"), "classmethod"),
    patch("inherited", ("self", "x")),
    patch("who", ("cls",), "classmethod"),
)


@pytest.fixture(autouse=True)
def _no_calls():
    CALLS.clear()


def test_wrapped_calls_pass_through_and_are_seen():
    patches = PatchSet(EVERY_KIND)
    patches.install("1.0")
    try:
        assert Target().method(1, b=3) == (1, 3)
        assert Target.static(4) == 4
        assert Child.make(5) == ("Child", 5)
        assert Child().inherited(6) == ("inherited", 6)
        assert Child.who() == "Child"
        assert [name for name, _, _ in CALLS] == ["method", "static", "make", "inherited", "who"]
    finally:
        patches.uninstall()


def test_uninstall_restores_exactly_what_the_class_held():
    before = {owner: dict(vars(owner)) for owner in (Base, Target, Child)}
    patches = PatchSet(EVERY_KIND)
    patches.install("1.0")
    assert dict(vars(Target)) != before[Target]
    patches.uninstall()

    for owner, held in before.items():
        assert dict(vars(owner)) == held
        assert all(vars(owner)[name] is value for name, value in held.items())
    Target().method(1)
    assert CALLS == []


def test_two_patches_of_one_attribute_both_run_and_come_off_again():
    before = dict(vars(Target))
    patches = PatchSet((patch("method", ("self", "a")), patch("method", ("self",))))
    patches.install("1.0")
    Target().method(1)
    assert len(CALLS) == 2
    patches.uninstall()

    assert dict(vars(Target)) == before


def test_hooks_of_other_plugins_on_the_same_targets_keep_ours():
    """SGLang's own registry takes static and class methods apart and wraps what it finds within."""
    patches = PatchSet(EVERY_KIND)
    patches.install("1.0")
    held = dict(vars(Target))
    seen = []

    def hook(result, *args, **kwargs):
        seen.append(args)

    try:
        for name in ("method", "static", "make"):
            HookRegistry.register(f"{__name__}.Target.{name}", hook, HookType.AFTER)
        HookRegistry.apply_hooks()
        target = Target()
        assert target.method(1) == (1, 2)
        assert Target.static(3) == 3
        assert Target.make(4) == ("Target", 4)
        assert [name for name, _, _ in CALLS] == ["method", "static", "make"]
        assert [args for _, args, _ in CALLS] == [(1,), (3,), (4,)]
        assert seen == [(target, 1), (3,), (Target, 4)]
    finally:
        HookRegistry.reset()
        for name in ("method", "static", "make"):
            setattr(Target, name, held[name])
        patches.uninstall()


def test_a_wrapper_of_wrapt_that_is_already_there_is_kept():
    def outer(wrapped, instance, args, kwargs):
        return ("outer", wrapped(*args, **kwargs))

    held = dict(vars(Target))
    for name in ("method", "static", "make"):
        wrapt.wrap_function_wrapper(Target, name, outer)
    patches = PatchSet(EVERY_KIND)
    patches.install("1.0")
    try:
        assert Target().method(1) == ("outer", (1, 2))
        assert Target.static(3) == ("outer", 3)
        assert Target.make(4) == ("outer", ("Target", 4))
        assert len(CALLS) == 3
    finally:
        patches.uninstall()
        for name in ("method", "static", "make"):
            setattr(Target, name, held[name])


def test_installing_twice_wraps_once():
    patches = PatchSet(EVERY_KIND)
    patches.install("1.0")
    patches.install("1.0")
    Target().method(1)
    patches.uninstall()

    assert len(CALLS) == 1
    assert inspect.isfunction(vars(Target)["method"])


@pytest.mark.parametrize(
    ("bad", "words"),
    [
        (patch("gone", ("self",)), "has no attribute 'gone'"),
        (patch("method", ("self", "z")), r"takes \(self, a, b\); expected it to begin \(self, z\)"),
        (patch("static", ("a",)), "is a staticmethod; expected a method"),
        (patch("method", ("self",), owner="Nobody"), "is missing"),
        (Patch("kvcanary_no_such_module", "A", "b", note, (), "test", "1.0"), "is missing"),
    ],
)
def test_a_drifted_seam_is_named_and_nothing_is_wrapped(bad, words):
    before = dict(vars(Target))
    with pytest.raises(SeamError, match=words):
        PatchSet((*EVERY_KIND, bad)).install("1.0")

    assert dict(vars(Target)) == before


def test_patches_of_other_releases_are_left_out():
    only_old = patch("gone", ("self",), since="0.5", until="1.0")
    patches = PatchSet((only_old, patch("method", ("self",))))
    patches.install("1.0")
    patches.uninstall()

    assert only_old.applies_to("0.9")
    assert not only_old.applies_to("1.0")


def test_a_wrapper_on_top_of_ours_is_not_torn_out():
    patches = PatchSet(EVERY_KIND)
    patches.install("1.0")
    ours = vars(Target)["method"]
    Target.method = lambda self, a, b=2: ours(self, a, b)
    with pytest.raises(SeamError, match="was replaced after kvcanary wrapped it"):
        patches.uninstall()
    Target.method = ours
    patches.uninstall()

    assert inspect.isfunction(vars(Target)["method"])


def test_resolve_sees_through_a_wrapper_that_is_already_there():
    patches = PatchSet((patch("static", ("a",), "staticmethod"),))
    patches.install("1.0")
    try:
        assert resolve(patches.patches[0]).owner is Target
    finally:
        patches.uninstall()
