"""Rate how well variants fit the columns of a dataset, or the inputs of inference."""

from collections.abc import Callable, Collection

from dstrain.graph import Column, PipelineSpec

Score = tuple[int, int]
"""(names of what is given that a variant uses, less the names that it lacks)."""
Scorer = Callable[[PipelineSpec], Score | None]
"""Rates how well a variant fits what is given (a dataset's columns, the inputs of
inference); None if it cannot run with them.
"""


def score_columns(
    columns: Collection[str],
    extra: Collection[str],
    file_keys: Collection[str] | None = None,
) -> Scorer:
    """Return a function that scores variants by the columns of a dataset that they use;
    None if a variant lacks one that it needs, or does not know an extra input.

    Args:
        columns: The dataset's columns.
        extra: Inputs or columns that the variant has to know.
        file_keys: The columns whose files are loaded; None for all.
    """

    def score(spec: PipelineSpec) -> Score | None:
        known = {
            name: source.name
            for name, source in spec.inputs.items()
            if isinstance(source, Column)
            and (file_keys is None or not source.is_file or source.name in file_keys)
        }
        present = {name: column for name, column in known.items() if column in columns}
        names = {*known, *present.values()}
        if not names.issuperset(extra):
            return None
        if not spec.can_train(frozenset(present)):
            return None
        used = len(set(present.values()))
        return used, used - len(set(known.values()))

    return score


def score_inputs(inputs: Collection[str]) -> Scorer:
    """Return a function that scores variants by the inputs of inference that they use;
    None if a variant lacks one that it needs.
    """

    def score(spec: PipelineSpec) -> Score | None:
        present = frozenset(inputs) & set(spec.inputs)
        if not spec.can_train(present | set(spec.defaults)):
            return None
        return len(present), 0

    return score
