"""The CPU seconds that tests use."""

import resource

_of_others = [0.0]


def note(seconds: float) -> None:
    """Count the seconds of a process that is no child of this one."""
    _of_others[0] += seconds


def own() -> float:
    """Return the CPU seconds of this process and of its children that have ended."""
    used = map(resource.getrusage, (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN))
    return sum(one.ru_utime + one.ru_stime for one in used)


def seconds() -> float:
    """Return what this process, its children, and those that `note` was told of used."""
    return own() + _of_others[0]
