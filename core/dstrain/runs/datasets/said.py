"""Say in one line what is read of a dataset."""

from dstrain.data.dataset import Dataset
from dstrain.data.forms.naming import TEXT
from dstrain.data.forms.source import Source


def dataset_line(source: Source, dataset: Dataset) -> str:
    """Say where a dataset is, its form, its rows, and the columns that are read."""
    table = dataset.table
    read = sorted(dataset.columns.values(), key=lambda column: not column.is_file)
    columns = dict.fromkeys(column.name for column in read)
    names = []
    for name in columns:
        original = table.originals.get(name, name)
        if source.form == "folder":
            is_text = original == TEXT
            names.append(f"{name} from caption files" if is_text else name)
        else:
            names.append(name if name == original else f"{name} from {original}")
    rows = f"{len(table.rows)} row{'s' * (len(table.rows) != 1)}"
    form = "" if source.form == "table" else f"{source.in_words}, "
    line = f"dataset {source.path}: {form}{rows}: {', '.join(names)}"
    if source.left_out:
        line += f"; not read: {', '.join(source.left_out)}"
    return line
