"""Derived: an object whose attributes are listed in a table, each a function of the object."""

from collections.abc import Callable
from typing import Any, ClassVar, Self

Functions = dict[str, Callable[[Any], Any]]


class Derived:
    """Has the attributes of the table `FIELDS`, which are also the keys of its JSON, in this order.

    An attribute is computed when it is first read. So functions may read each other's attributes.
    """

    FIELDS: ClassVar[Functions]

    def __getattr__(self, name: str) -> Any:
        if name not in self.FIELDS:
            raise AttributeError(f"{type(self).__name__} has no {name}")
        vars(self)[name] = value = self.FIELDS[name](self)
        return value

    def with_values(self, **changes: object) -> Self:
        """Return a copy with other values. Attributes that were computed from the old values stay."""
        copy = object.__new__(type(self))
        vars(copy).update(vars(self), **changes)
        return copy

    def as_json(self) -> dict[str, Any]:
        return {name: getattr(self, name) for name in self.FIELDS}


def attributes_of(part: str, *names: str, **renamed: str) -> Functions:
    """Return functions that read attributes of a part of the object; None if there is no such part.

    `renamed`: the part's names by ours.
    """

    def reads(name: str) -> Callable[[Any], Any]:
        return lambda whole: None if (of := getattr(whole, part)) is None else getattr(of, name)

    return {
        ours: reads(theirs) for ours, theirs in {**dict(zip(names, names, strict=True)), **renamed}.items()
    }


def unset(*names: str) -> Functions:
    """Return functions of attributes that are None until they are set."""
    return dict.fromkeys(names, lambda whole: None)
