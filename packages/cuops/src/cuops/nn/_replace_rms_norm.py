"""The exchange of the RMSNorm modules of a model for `cuops.nn.RMSNorm`."""

from __future__ import annotations

import functools
import inspect
import math
import sys
import types
import weakref
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch.nn.parameter import is_lazy

from .. import _arguments
from ._known_rms_norms import FORMULAS, Formula
from .rms_norm import RMSNorm

ADDED_BY_LIBRARIES = "_"  # how attributes that are not the class's own begin
UNKNOWN = "its class is not known"
COMPILED = "it is compiled by itself, as it is now"
METHODS = ("forward", "_norm")  # that Hugging Face's classes have the formula in
OWN = ("__call__", "state_dict", "get_extra_state", "_save_to_state_dict", "_load_from_state_dict")
OTHER_FACTS = ("training", "normalized_shape", "elementwise_affine", "with_scale")


@dataclass(frozen=True)
class _Place:
    """A module's place in its parent."""

    path: str
    parent: torch.nn.Module
    name: str
    old: torch.nn.Module
    new: torch.nn.Module


class Replacement:
    """What `replace_rms_norm` did.

    Attributes:
        replaced: (path, class) of every module that was replaced.
        left: (path, class, reason) of every module that was not, but whose class is known, derives from a known one, or
            has RMSNorm in its name.
    """

    def __init__(self, model: torch.nn.Module, places: list[_Place], left: list[tuple[str, type, str]]) -> None:
        self.replaced = [(place.path, type(place.old)) for place in places]
        self.left = left
        self._model, self._places = type(model).__qualname__, places

    def undo(self) -> None:
        """Puts the very modules back that were there; they have the parameters as they are now.

        Raises RuntimeError, and changes nothing, where another module has taken a place since, or a module there has
        become one of another class, as parametrizations make it, has got another forward than that of its class and
        accelerate's hook, or no longer has the dictionary of parameters that both shared.
        """
        places = ((place, place.parent._modules.get(place.name)) for place in self._places)

        def is_as_it_was(place: _Place, now: torch.nn.Module | None) -> bool:
            shares = now is place.new and now._parameters is place.old._parameters
            return shares and type(now) is RMSNorm and _has_forward_of_its_class(now)

        if taken := [place.path for place, now in places if not is_as_it_was(place, now)]:
            raise RuntimeError(f"these modules are no longer those that replace_rms_norm put there: {', '.join(taken)}")
        for place in self._places:
            place.parent._modules[place.name] = place.old
            _take_forward(place.old, place.new)
            _take_hooks(place.old)
            for name in ("training", "_is_full_backward_hook"):  # dictionaries are shared; these are not
                place.old.__dict__[name] = place.new.__dict__[name]
        self._places = []

    def __repr__(self) -> str:
        undone = " and put back" if self.replaced and not self._places else ""
        modules = "1 module" if len(self.replaced) == 1 else f"{len(self.replaced)} modules"
        done = f"{modules} of {self._model} replaced by cuops.nn.RMSNorm{undone}"
        lines = [f"{done}, {len(self.left)} left alone"]
        for cls in dict.fromkeys(cls for _, cls in self.replaced):
            lines += [
                f"  {cls.__module__}.{cls.__qualname__}",
                *(f"    {path}" for path, of in self.replaced if of is cls),
            ]
        lines += [f"  left: {path}, {cls.__module__}.{cls.__qualname__}: {reason}" for path, cls, reason in self.left]
        if (not self.replaced and not self.left) or any(reason == UNKNOWN for *_, reason in self.left):
            lines.append("  to replace a class of the same formula: also={Class: cuops.nn.Formula('name of its eps')}")
        return "\n".join(lines)


def replace_rms_norm(model: torch.nn.Module, also: Mapping[type, Formula] | None = None) -> Replacement:
    """Replaces the RMSNorm modules in `model`, in place, by `cuops.nn.RMSNorm`.

    Known are `torch.nn.RMSNorm` and the RMSNorm classes of Hugging Face Transformers, those classes themselves: a class
    that derives from one of them, or only has such a name, is left alone, and so is a module whose formula was patched
    or that is compiled by itself.
    A new module has the very parameters, hooks and attributes of the old one, accelerate's hook among them, so that
    optimisers, tied weights and checkpoints stay as they are.

    Args:
        model: the model. It is not itself one of these modules.
        also: classes of other libraries or your own, each with the formula of its forward. One whose forward takes more
            than x, and maybe a residual, or that saves or loads a state of its own, is left alone.

    Returns:
        A `Replacement`, which prints what was replaced, and whose `undo()` puts the old modules back.

    Raises:
        TypeError: model is not a module, or `also` is not of classes and formulas.
        ValueError: model is itself such a module, which only its parent could replace; a formula of `also` names an
            attribute that a module lacks; or a class of `also` has its forward from a module of PyTorch's that is not
            RMSNorm.
    """
    if not isinstance(model, torch.nn.Module):
        raise TypeError(f"model: expected a torch.nn.Module, got {type(model).__qualname__}")
    if not isinstance(also, (Mapping, type(None))):
        raise TypeError(
            f"also: expected a mapping of classes to their cuops.nn.Formula, got a {type(also).__qualname__}"
        )
    also = dict(also or {})
    for cls, formula in also.items():
        if not isinstance(cls, type) or not isinstance(formula, Formula):
            raise TypeError(f"also: expected classes with their cuops.nn.Formula, got {cls!r}: {formula!r}")
        owner = next((base for base in cls.__mro__ if "forward" in vars(base)), cls)
        if owner.__module__.startswith("torch.nn.modules.") and owner not in (torch.nn.Module, torch.nn.RMSNorm):
            raise ValueError(f"also: expected classes of RMSNorm's formula, got {cls.__module__}.{cls.__qualname__}")
    itself = type(model._orig_mod if _is_wrapped(model) else model)
    if _known_formula(itself, also):
        raise ValueError(f"model: expected a module with RMSNorm modules in it, got a {itself.__qualname__} itself")
    places, left = [], []
    new: dict[torch.nn.Module, RMSNorm] = {}
    for prefix, parent in model.named_modules():
        for name, old in parent._modules.items():
            path = f"{prefix}.{name}" if prefix else name
            if old is None or isinstance(old, RMSNorm):
                continue
            reason = _reason_to_leave(old, also)
            if reason is None and _is_wrapped(parent):
                reason = COMPILED
            if reason is None:
                new[old] = new.get(old) or _replacement_of(old, also)
                places.append(_Place(path, parent, name, old, new[old]))
            elif "rmsnorm" in type(old).__name__.lower() or reason != UNKNOWN:
                left.append((path, type(old), reason))
    for place in places:
        place.parent._modules[place.name] = place.new
        _take_hooks(place.new)
    return Replacement(model, places, left)


def _is_of_its_class(module: torch.nn.Module, forward: object) -> bool:
    """Whether this is what `module.forward` is of a module that nobody has changed."""
    return forward == types.MethodType(type(module).forward, module)


def _calls_accelerate(module: torch.nn.Module) -> bool:
    """Whether its forward is that by which accelerate calls its hook, and then the forward of the class."""
    forward = vars(module).get("forward")
    return (
        isinstance(forward, functools.partial)
        and getattr(forward.func, "__module__", None) == "accelerate.hooks"
        and len(forward.args) == 1
        and forward.args[0] is module
        and _is_of_its_class(module, vars(module).get("_old_forward"))
    )


def _has_forward_of_its_class(module: torch.nn.Module) -> bool:
    """Whether what is called is the forward of its class, if with accelerate's hook."""
    own = vars(module).get("forward")  # which accelerate also leaves where it has removed a hook
    return own is None or _is_of_its_class(module, own) or _calls_accelerate(module)


def _take_forward(module: torch.nn.Module, other: torch.nn.Module) -> None:
    """Calls the forward of its class, and accelerate's hook where the other module has one."""
    hooked = vars(other)["forward"].func if _calls_accelerate(other) else None
    for name in ("forward", "_old_forward", "_hf_hook"):
        module.__dict__.pop(name, None)
    if hooked is not None:
        module.__dict__["_old_forward"] = own = module.forward
        module.__dict__["_hf_hook"] = vars(other)["_hf_hook"]
        module.__dict__["forward"] = functools.update_wrapper(functools.partial(hooked, module), own)


def _take_hooks(module: torch.nn.Module) -> None:
    """Makes hooks that know the module that they are called with know this one."""
    for hook in module._load_state_dict_pre_hooks.values():
        if getattr(hook, "with_module", False):
            hook.module = weakref.ref(module)


def _known_formula(cls: type, also: Mapping[type, Formula]) -> Formula | None:
    """The formula of a class, recognised by what it is and not by what it is called."""
    if cls in also:
        return also[cls]
    if cls is torch.nn.RMSNorm:
        return Formula()
    formula = FORMULAS.get(f"{cls.__module__}.{cls.__qualname__}")
    return formula if getattr(sys.modules.get(cls.__module__), cls.__name__, None) is cls else None


def _reason_to_leave(module: torch.nn.Module, also: Mapping[type, Formula]) -> str | None:
    """Why a module cannot be replaced, or None."""
    cls = type(module)
    formula = _known_formula(cls, also)
    if formula is None:
        known = next((base for base in cls.__mro__[1:] if _known_formula(base, also)), None)
        return f"its class is not known, only that it derives from {known.__qualname__}" if known else UNKNOWN
    patched = [name for name in METHODS if cls not in also and _is_foreign(cls, name)]
    patched += ["forward"] * (not _has_forward_of_its_class(module)) + ["_norm"] * ("_norm" in vars(module))
    if patched:
        return f"its {patched[0]} was patched"
    if module._compiled_call_impl is not None:
        return COMPILED
    if cls in also and (more := _more_than_a_formula(module)):
        return more
    allowed = {"weight", "bias"} if cls in also else {"weight"}
    if module._buffers or module._modules or not {"weight"} <= set(module._parameters) <= allowed:
        return f"it has other parameters than {' and '.join(sorted(allowed, reverse=True))}, or no weight at all"
    weight = module._parameters["weight"]
    if weight is None and cls is not torch.nn.RMSNorm:
        return "it has no weight"
    if weight is not None and (is_lazy(weight) or weight.ndim == 0 or weight.dtype not in _arguments.TORCH_DTYPES):
        return "its weight is lazy, a single number, or of a dtype that cuops.rms_norm does not take"
    is_of_library = cls is not torch.nn.RMSNorm and cls not in also  # and takes means over the last dimension alone
    if weight is not None and is_of_library and (weight.ndim != 1 or len(weight) == 1):
        return f"its weight is no vector: {tuple(weight.shape)}"
    wanted = {formula.eps, formula.weight_offset} if isinstance(formula.weight_offset, str) else {formula.eps}
    if missing := [name for name in wanted if not hasattr(module, str(name))]:
        if cls in also:
            raise ValueError(
                f"also: expected attributes that {cls.__qualname__} has, got {', '.join(map(repr, missing))}"
            )
        return f"it has no attribute {missing[0]}"
    eps, offset = getattr(module, formula.eps), _offset_of(module, formula)
    if eps is not None and not _is_taken(eps, least=0):
        return f"its eps is no finite number of at least 0: {eps!r}"
    if not _is_taken(offset):
        return f"its {formula.weight_offset} is no finite number: {offset!r}"
    own = {name for name in vars(module) if not name.startswith(ADDED_BY_LIBRARIES)} - {*OTHER_FACTS, "forward"}
    if cls not in also and own != {formula.eps}:
        return f"it has attributes that its class is not known for: {', '.join(sorted(own ^ {formula.eps}))}"
    return None


def _more_than_a_formula(module: torch.nn.Module) -> str | None:
    """What a module of `also` has that a new one would not."""
    if own := [name for name in OWN if getattr(type(module), name) is not getattr(torch.nn.Module, name)]:
        return f"its class has a {own[0]} of its own"
    try:
        _, *more = inspect.signature(module.forward).parameters.values()
    except (ValueError, NameError) as error:  # of what is not written in Python, or has annotations that are not there
        return f"what its forward takes is not known: {error}"
    others = [p.name for p in more if p.kind != p.VAR_KEYWORD and p.name != "residual"]
    return f"its forward takes more than x: {', '.join(others)}" if others else None


def _is_foreign(cls: type, name: str) -> bool:
    """Whether a class has a method that is not its own module's."""
    method = getattr(cls, name, None)
    # By its globals, which functools.wraps does not copy.
    return method is not None and getattr(method, "__globals__", {}).get("__name__") != cls.__module__


def _is_wrapped(module: torch.nn.Module) -> bool:
    """Whether this is what torch.compile makes of a module, whose call as it was then it keeps."""
    dynamo = sys.modules.get("torch._dynamo.eval_frame")
    return dynamo is not None and isinstance(module, dynamo.OptimizedModule)


def _is_taken(number: object, least: float = -math.inf) -> bool:
    """Whether `cuops.rms_norm` takes this as a number."""
    try:
        _arguments.number("", number, least)
    except (TypeError, ValueError):
        return False
    return True


def _offset_of(module: torch.nn.Module, formula: Formula) -> Any:
    offset = formula.weight_offset
    return getattr(module, offset) if isinstance(offset, str) else offset


def _replacement_of(old: torch.nn.Module, also: Mapping[type, Formula]) -> RMSNorm:
    """A new module on the dictionaries of parameters and hooks of the old one: what happens to one happens to both."""
    formula = _known_formula(type(old), also)
    assert formula is not None
    weight, eps = old._parameters["weight"], getattr(old, formula.eps)
    facts = {
        "normalized_shape": tuple(map(int, old.normalized_shape if weight is None else weight.shape)),
        "eps": None if eps is None else float(eps),
        "elementwise_affine": weight is not None,
        "weight_offset": float(_offset_of(old, formula)),
        "_y_dtype": None if type(old) is torch.nn.RMSNorm else formula.y_dtype,
    }
    if "bias" not in old._parameters:
        facts["bias"] = None
    new = RMSNorm.__new__(RMSNorm)
    new.__dict__.update(vars(old))
    new.__dict__.update(facts)
    _take_forward(new, old)
    return new
