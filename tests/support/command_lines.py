"""A command line that a test adds to."""

BASE = (
    *("--model", "faky", "--toy"),
    *("--dataset_base_path", "data", "--output_path", "out"),
)
